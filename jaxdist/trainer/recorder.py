"""Metrics of finished steps, for the console and metrics.jsonl. They are read one step late."""

import functools
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist.mesh import on_cpu
from jaxdist.observe import read_metrics
from jaxdist.runtime.watch.watchdog import Watch
from jaxdist.trainer.measures.clock import Clock, process_start
from jaxdist.trainer.measures.step_figures import StepFigures
from jaxdist.trainer.nonfinite import NonFinite, Spikes, lower_rate
from jaxdist.trainer.run import Outputs, RunPlan, Work


def last_time(outputs: Outputs) -> float | None:
    """The time of the last line of metrics.jsonl; None without one, and on processes that write none."""
    writer = outputs.metrics
    records = [] if writer is None or not writer.path.exists() else read_metrics(writer.path)
    return records[-1].get("time") if records else None


@functools.cache
def _first_session() -> float:
    """When this was first called in this process, by `time.monotonic`."""
    return time.monotonic()


def session_start(called: float) -> float:
    """When this session began, by `time.monotonic`: the first of a process with the process, others when training was
    called."""
    return process_start() if called <= _first_session() else called


class Measured(NamedTuple):
    """What measures the steps of a session, over its rollbacks."""

    clock: Clock
    figures: StepFigures


def updates_before(step: int, skipped: int, in_a_row: int) -> int:
    """How many updates came before a step. The optimizer does not count steps that were skipped.

    Args:
        step: Its number, from 1.
        skipped: How many steps were skipped so far, with this one; of replicas, by the one that skipped the fewest.
        in_a_row: How many of them were the last ones; of replicas, by the one that skipped the most.
    """
    return step - 1 - skipped + (in_a_row > 0 and skipped > 0)


class Recorder:
    """Writes finished steps to the console and metrics.jsonl, and raises `NonFinite` for what must not go on."""

    def __init__(
        self, plan: RunPlan, work: Work, outputs: Outputs, watch: Watch, spikes: Spikes, measured: Measured
    ) -> None:
        self._outputs, self._crumbs, self._spikes = outputs, watch.crumbs, spikes
        self._max_skips, precision = plan.parts.options.max_skips, plan.parts.options.precision
        self._narrow = np.dtype(precision.compute).itemsize < 4
        self._dispatched: tuple[int, dict[str, jax.Array]] | None = None  # the step that is not recorded yet
        self._finished: tuple[dict[str, Any], dict[str, float]] | None = None  # its values and its times
        self._unwritten = self._warned = False
        self._rates, self._recorded = work.rates, work.recorded
        # XLA:CPU computes within the call of a step, or lets it wait; with GPUs it returns at once.
        self._calls_wait = on_cpu(plan.mesh)
        self._replicas = plan.parts.replicas
        self._clock, self._figures = measured
        self._clock.restart()
        self.awaited = self._clock.awaited

    def calling(self, step: int) -> AbstractContextManager[None]:
        """The context in which a step is called. step: its number."""
        if self._dispatched is not None and self._replicas is not None and self._replicas.step.waits(step):
            self._wait()  # else the time of the step before would include that of this one
        return self._clock.spending("device") if self._calls_wait else nullcontext()

    def dispatched(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """A step was handed to the device: record the one before it, which never waits for this one."""
        with jax.transfer_guard_device_to_host("allow"):  # these copies are meant, and nothing waits for them here
            for value in metrics.values():
                value.copy_to_host_async()
        self._record()
        self._dispatched = step, metrics

    def catch_up(self, evaluate: Callable[[], dict[str, float]] | None = None) -> dict[str, float]:
        """Wait for the last step and record it with its arrays, and with the evaluation that follows it, which no
        step's time includes. Returns that evaluation, {} without one."""
        return self._record(evaluate, arrays=True)

    def _wait(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Wait for the dispatched step, whose time ends now. Returns its values, numbers and arrays, and its times."""
        if self._finished is None:
            assert self._dispatched is not None
            with self._clock.spending("device"):
                found = jax.device_get(self._dispatched[1])
            values = {name: value if np.ndim(value) else float(value) for name, value in found.items()}
            self._finished = values, self._clock.finished()
        return self._finished

    def _record(
        self, evaluate: Callable[[], dict[str, float]] | None = None, *, arrays: bool = False
    ) -> dict[str, float]:
        """Wait for the dispatched step, if there is one, and record it. Returns its evaluation. arrays: they are in its
        line, too. In every line they would be most of the file."""
        if self._dispatched is None:
            return {}
        (values, times), step = self._wait(), self._dispatched[0]
        self._dispatched = self._finished = None
        self._crumbs.at_step("record")
        shared = "skipped_in_a_row" in values  # else the values are of this process, and the others' are not judged
        loss, norm = values.pop("loss"), values["grad_norm"]
        skipped, in_a_row = int(values.pop("skipped", 0)), int(values.pop("skipped_in_a_row", 0))
        metrics = {"loss": loss, **values}
        before = updates_before(step, skipped, in_a_row)
        if self._rates is not None:
            metrics["lr"] = float(self._rates[before])
        metrics |= times
        metrics |= self._figures.metrics(metrics["step_s"])
        metrics |= {"skipped": skipped} if in_a_row else {}
        self._outputs.console.step(step, metrics)
        with self._clock.spending("eval"):
            intact = math.isfinite(loss) or 0 < in_a_row <= self._max_skips
            evaluation = evaluate() if evaluate is not None and intact else {}
        if evaluation:
            self._outputs.console.evaluation(step, evaluation)
            self._warn_of_evaluation(step, evaluation["eval/loss"])
        whole = metrics | evaluation | self._clock.line()
        self._write(step, whole, arrays=arrays)
        self._recorded(step, whole)
        if not shared:
            return evaluation
        if in_a_row or not (math.isfinite(loss) and math.isfinite(norm)):
            self._judge(step, loss, norm, in_a_row, values.get("loss_scale"), fresh=before == 0)
        else:
            self._spikes.check(step, loss)
        return evaluation

    def _warn_of_evaluation(self, step: int, loss: float) -> None:
        """Say once that an evaluation is not finite, though the loss of training is."""
        if math.isfinite(loss) or self._warned:
            return
        self._warned = True
        why = "the held-out data hold NaN or inf or weigh nothing, or the model gives some for them"
        what = f"eval/loss of step {step} is {loss}: {why}; such evaluations count neither as the best nor for patience"
        self._outputs.warn({"step": step, "what": what, "action": "went on"})

    def _write(self, step: int, metrics: dict[str, Any], *, arrays: bool) -> None:
        """Write a line of metrics.jsonl. A full disk is said once, and does not end the run before its end."""
        if self._outputs.metrics is None:
            return
        numbers = {name: value for name, value in metrics.items() if not np.ndim(value)}
        self._outputs.sinks.record(step, numbers)
        try:
            self._outputs.metrics.write(step, metrics if arrays else numbers)
            self._unwritten = False
        except OSError as error:
            if not self._unwritten:
                self._outputs.console.line(
                    f"warning: metrics.jsonl, step {step}: {error.strerror}; kept for the next one"
                )
            self._unwritten = True

    def _judge(self, step: int, loss: float, norm: float, in_a_row: int, scale: float | None, *, fresh: bool) -> None:
        """Say that a step was skipped, or raise `NonFinite`. fresh: whether parameters are still the first ones."""
        limit = self._max_skips
        if 0 < in_a_row <= limit:
            after = "" if scale is None else f"; loss scale now {scale:g}"
            self._outputs.console.line(f"step {step} skipped: loss {loss:.4g}, gradient norm {norm:.4g}{after}")
            return
        name, value = ("grad_norm", norm) if math.isfinite(loss) else ("loss", loss)
        row = f", after {limit} more in a row (precision.max_consecutive_skips)" if limit else ""
        other = ", or take precision=fp32" if self._narrow else ""
        text, mend = f"{name} of step {step} is {value}{row}", f"try {lower_rate(self._rates)}{other}"
        if fresh:  # whatever the learning rate is
            mend = f"before any update: look at the loss, the labels and the initial parameters{other}"
        raise NonFinite(step, text, guarded=in_a_row > 0, mend=mend)
