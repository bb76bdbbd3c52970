"""Figures of a step that its program tells: the share of the devices' peak that it reaches, and what it sends."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxdist.errors import UserError
from jaxdist.jaxpr.evaluate import without_dead_code
from jaxdist.observe.console import error_text
from jaxdist.plan.compiled.hardware import peak_flops
from jaxdist.plan.traced.flops import model_flops
from jaxdist.plan.traced.ledger import ledger_of
from jaxdist.specs import PyTree
from jaxdist.trainer.run import RunPlan


class StepFigures:
    """What is known of a step beside its time. `begin` reads it from the program while the device computes."""

    def __init__(self, plan: RunPlan, say: Callable[[str], None]) -> None:
        self._plan, self._say = plan, say
        self._devices = [device for device in plan.mesh.local_devices if device.memory_stats() is not None]
        self._peak = peak_flops(plan.mesh.devices.flat[0].device_kind, plan.parts.options.precision)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._flops: float | None = None
        self._sent: int | None = 0 if plan.mesh.size == 1 else None

    def begin(self, batch: PyTree) -> None:
        """Read the program of the step, which has been traced, in a thread. batch: the first one."""
        if self._thread is not None or jax.process_index() != 0 or (self._sent == 0 and self._peak is None):
            return
        target = self._plan.parts.target
        traced = None if self._sent == 0 else self._plan.parts.step.trace(target, batch).jaxpr
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
        # No daemon: while it traces, Python may not end, or the process dies in jaxlib. `close` waits for it.
        self._thread = threading.Thread(target=self._read, args=(traced, like), name="jaxdist-figures")
        self._thread.start()

    def close(self) -> None:
        """Wait for the thread, which then begins with no other figure."""
        self._closed = True
        if self._thread is not None:
            self._thread.join()

    def _read(self, traced: Any, batch: PyTree) -> None:
        parts = self._plan.parts
        if self._peak is not None:
            with self._told("mfu"):
                self._flops = model_flops(
                    parts.model, parts.evaluated, parts.target.model_state, batch, precision=parts.options.precision
                )
        if traced is not None and not self._closed:
            with self._told("sent_bytes"):
                sent = ledger_of(without_dead_code(traced), parts.target).wire_bytes
                self._sent = round(sent + self._outer_steps(batch))

    def _outer_steps(self, batch: PyTree) -> float:
        """What a device sends in outer steps, as a mean over all steps."""
        parts = self._plan.parts
        if parts.replicas is None:
            return 0.0
        from jaxdist.plan.traced.outer_steps import sent_by_outer

        return sent_by_outer(parts.step, parts.target, batch)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """A context in which a figure that cannot be had is a line on the console."""
        try:
            yield
        except UserError as error:  # such as a loop of unknown length that communicates
            self._say(f"metrics.jsonl has no {name}: {error}")
        except Exception as error:  # of a user's own loss; it must not end the run
            self._say(f"metrics.jsonl has no {name}: {error_text(error)}")

    def metrics(self, step_s: float) -> dict[str, float]:
        """The metrics of a step of that many seconds, where they are known:

        - mfu: the share of the devices' peak that the products of the model take.
        - peak_memory_bytes: the highest so far of this process's devices.
        - sent_bytes: what a device sends in a step, by the ledger.
        """
        found: dict[str, float] = {}
        if self._flops and self._peak:
            found["mfu"] = self._flops / (step_s * self._plan.mesh.size * self._peak)
        stats = [device.memory_stats() or {} for device in self._devices]
        if peaks := [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]:
            found["peak_memory_bytes"] = max(peaks)
        return found if self._sent is None else found | {"sent_bytes": self._sent}
