"""Time the train step of configurations, one after the other, on the first batch of their data."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxdist.build import Parts, assemble, mesh_of_config
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.init import init_state
from jaxdist.jaxpr.evaluate import without_dead_code
from jaxdist.plan.auto_remat import start_fitting
from jaxdist.plan.compiled.hardware import peak_flops
from jaxdist.plan.compiled.memory import footprint_of
from jaxdist.plan.traced.flops import model_flops
from jaxdist.plan.traced.ledger import ledger_of
from jaxdist.plan.traced.sharding import aligned
from jaxdist.runtime.start import fit_to_devices, start
from jaxdist.specs import PyTree
from jaxdist.trainer.batches.load import load_data, loader_of, work_of_a_step

WARM_UP = 3  # steps before the first that counts


@dataclass(frozen=True)
class Timing:
    """The figures of a configuration's step.

    - name: the settings that make it differ from the others.
    - seconds: of each step.
    - per_step, unit: what a step is trained on, such as 4096 "tokens".
    - compile_s: seconds that XLA took.
    - device_bytes: the most memory that a step takes on a device, by its compiler; None: it keeps no account.
    - sent_bytes: what a device sends in a step, by the ledger.
    - mfu: the share of the devices' peak that the products of the model take; None: no peak is known.
    - device: the kind of the devices. devices: their number.
    """

    name: str
    seconds: tuple[float, ...]
    per_step: int
    unit: str
    compile_s: float
    device_bytes: int | None
    sent_bytes: int
    mfu: float | None
    device: str
    devices: int

    @property
    def median(self) -> float:
        """Seconds of the median step."""
        return statistics.median(self.seconds)


def check_variants(configs: Sequence[Config]) -> None:
    """Raise `UserError` for a configuration that cannot be timed, or does not fit the devices, before any is timed."""
    for config in configs:
        if config.distill.on:
            raise UserError("distill: a step is timed without its teacher here; set distill.mixing=0")
        if config.parallel.local.on:
            raise UserError(
                f"parallel.local.every: {config.parallel.local.every}, but a step is timed without outer steps here;"
                " set it to 0, or read step_s in the metrics.jsonl of a run"
            )
    first, *others = configs
    if others:
        start(first)
    for config in others:
        fit_to_devices(config)


def time_step(name: str, config: Config, steps: int) -> Timing:
    """The timing of a configuration. All processes of a job must call it. Raises `UserError` as a run would."""
    config = start_fitting(config)
    mesh = mesh_of_config(config)
    parts, source = assemble(config, mesh), load_data(config)
    loader = loader_of(config, source, mesh)
    batch = loader.batch(0)
    began = time.perf_counter()
    traced = parts.step.trace(parts.target, batch)
    program = traced.lower().compile()
    compile_s, footprint = time.perf_counter() - began, footprint_of(program, config, parts)
    state = init_state(parts.model, parts.optimizer, mesh, parts.options)
    seconds, per_step = _seconds(program, state, batch, steps), work_of_a_step(config, source)
    kind = mesh.devices.flat[0].device_kind
    return Timing(
        name,
        seconds,
        *per_step,
        compile_s,
        footprint and footprint.peak,
        round(ledger_of(without_dead_code(traced.jaxpr), parts.target).wire_bytes) if mesh.size > 1 else 0,
        _mfu(parts, batch, statistics.median(seconds), peak_flops(kind, parts.options.precision), mesh.size),
        kind,
        mesh.size,
    )


def _seconds(
    program: Callable[..., tuple[PyTree, dict[str, jax.Array]]], state: PyTree, batch: PyTree, steps: int
) -> tuple[float, ...]:
    """Seconds between finished steps. As in training, a step is dispatched before the one before it has finished."""
    finished, waiting = list[float](), list[jax.Array]()
    for _ in range(WARM_UP + steps + 1):
        state, metrics = program(state, batch)
        waiting.append(metrics["loss"])
        if len(waiting) == 2:
            waiting.pop(0).block_until_ready()
            finished.append(time.perf_counter())
    jax.block_until_ready(state)
    return tuple(np.diff(finished)[WARM_UP - 1 :].tolist())


def _mfu(parts: Parts, batch: PyTree, seconds: float, peak: float | None, devices: int) -> float | None:
    if peak is None:
        return None
    target, precision = parts.target, parts.options.precision
    flops = model_flops(parts.model, target.params, target.model_state, batch, precision=precision)
    return flops / (seconds * devices * peak)


def timing_table(timings: Sequence[Timing]) -> list[str]:
    """The timings as lines, each beside the first."""
    unit, first = timings[0].unit, timings[0].median
    rows: list[tuple[str, ...]] = [
        ("", "ms a step", "10 to 90 %", f"{unit}/s", "beside the first", "MFU", "MiB a device", "MiB sent", "compile s")
    ]
    for each in timings:
        low, high = np.quantile(each.seconds, [0.1, 0.9]) * 1e3
        rows.append(
            (
                each.name,
                f"{each.median * 1e3:.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{each.per_step / each.median:,.0f}",
                f"{first / each.median:.2f} x",
                "-" if each.mfu is None else f"{each.mfu:.1%}",
                "-" if each.device_bytes is None else f"{each.device_bytes / 2**20:,.1f}",
                f"{each.sent_bytes / 2**20:,.2f}",
                f"{each.compile_s:.1f}",
            )
        )
    return aligned(rows, right=range(1, 9))
