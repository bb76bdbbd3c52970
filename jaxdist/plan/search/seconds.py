"""Predicted seconds of a step, by part: computing, waiting for each set of axes, bubble, optimizer, host memory."""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import NamedTuple

from jaxdist.config.rules.pipeline import uneven
from jaxdist.config.schema import Config
from jaxdist.optim import leave_out
from jaxdist.parallel.pipeline.table import table_of
from jaxdist.plan.calibration.file import Calibration
from jaxdist.plan.closed.leaves import Known, parts_of_a_step, rows_of
from jaxdist.plan.closed.memory.units import units_of
from jaxdist.plan.closed.sent import Transfer, rounds
from jaxdist.plan.explain import IN_HOST_MEMORY
from jaxdist.plan.report.timeline import WorkCosts, simulate
from jaxdist.plan.search.cluster import PlanCluster
from jaxdist.plan.search.work import ModelWork, model_work
from jaxdist.specs import leaves_by_name

# Bytes that a step of an optimizer moves through the device's memory, for each byte of parameters and of its state:
# both are read and written, and gradients, which are as large as parameters, are read. Frozen parameters lie still.
_STATE_PASSES, _PARAMETER_PASSES = 2, 3


class Seconds(NamedTuple):
    """Predicted seconds of a step.

    computing: products and what lies between them. bubble: a pipeline's stages wait for each other.
    waiting: {axes: seconds that computation waits for collectives over them}.
    optimizer: its passes over parameters and state. host: moving what is offloaded.
    """

    computing: float
    bubble: float
    waiting: dict[tuple[str, ...], float]
    optimizer: float
    host: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.computing + self.bubble + sum(self.waiting.values()) + self.optimizer + self.host

    def parts(self) -> dict[str, float]:
        """By name, for tables and pictures: {"computing": s, "waiting for fsdp": s, ...}; what is 0 is left out."""
        named = {"computing": self.computing, "bubble": self.bubble}
        named |= {f"waiting for {'+'.join(axes)}": each for axes, each in self.waiting.items()}
        named |= {"optimizer": self.optimizer, "host memory": self.host}
        return {name: each for name, each in named.items() if each > 0}


def seconds_of(
    config: Config, cluster: PlanCluster, sent: Iterable[Transfer], state: Mapping[str, int], known: Known
) -> Seconds:
    """The prediction for a configuration whose mesh has as many devices as the cluster.

    sent: its collectives. state: bytes of a device's parameters and optimizer state, {part: bytes} of `AtRest`.
    """
    sizes, parallel = asdict(config.mesh), config.parallel
    work, passes = computing_of(config, cluster, known)
    bubble = work * bubble_of(config, passes, known)
    waiting = _waiting(sent, config, cluster, work + bubble)
    offloaded = state.get(IN_HOST_MEMORY, 0)
    trained = _trained_share(config, known) * state["parameters"]
    moved = _PARAMETER_PASSES * trained + _STATE_PASSES * (state["optimizer state"] + offloaded)
    host = 2 * (offloaded + _activations_in_host_memory(config, known)) / cluster.to_host
    assert math.prod(sizes.values()) == cluster.devices and parallel.microbatches >= 1
    return Seconds(work, bubble, waiting, moved / cluster.bandwidth, host)


def _trained_share(config: Config, known: Known) -> float:
    """The share of a device's bytes of parameters that are trained."""
    if not config.optimizer.frozen:
        return 1.0
    trained = leaves_by_name(leave_out(known.model(config).shapes, config.optimizer.frozen))
    sizes = {leaf.name: leaf.nbytes for leaf in known.leaves(config)}
    return sum(size for name, size in sizes.items() if name in trained) / sum(sizes.values())


def _activations_in_host_memory(config: Config, known: Known) -> float:
    """Bytes that remat "offload" moves to host memory in a step: what lies between blocks. That copies may run beside
    computation is left out."""
    if config.memory.remat != "offload":
        return 0.0
    rows = parts_of_a_step(config) * rows_of(config)
    return units_of(config, known, rows_of(config)).h(rows) * known.model(config).layers / config.mesh.pipe


def computing_of(config: Config, cluster: PlanCluster, known: Known) -> tuple[float, ModelWork]:
    """(seconds that the busiest stage computes in a step without a bubble, the work of the model)."""
    mesh, parallel = config.mesh, config.parallel
    work = model_work(config, known)
    rows = rows_of(config)
    split = mesh.tensor * mesh.context
    blocks = max(parallel.stages, default=0) * parallel.chunks or -(-known.model(config).layers // mesh.pipe)
    if cluster.measured is not None:
        block, ends = measured_units(cluster.measured, config.memory.remat, mesh.tensor, rows, work)
        return parts_of_a_step(config) * (blocks * block + ends) / mesh.context, work
    rates = {"flops": cluster.flops, "float8": cluster.float8 or cluster.flops, "bandwidth": cluster.bandwidth}
    once = blocks * work.block.seconds(rows, split, **rates) + work.ends.seconds(rows, split, **rates)
    return parts_of_a_step(config) * once, work


def measured_units(found: Calibration, remat: object, tensor: int, rows: float, work: ModelWork) -> tuple[float, float]:
    """(seconds of a block, of the ends) by a calibration: on the line through the numbers of rows that were measured.

    A remat that was not measured takes the time of "none" by its FLOPs; parts of layers that were not, an even share.
    """
    named = [each for each in found.compute if each.remat == str(remat)]
    scale = 1.0
    if not named:
        named = [each for each in found.compute if each.remat == "none"]
        scale = work.block.flops / work.plain.flops
    whole = sorted((each for each in named if each.tensor == 1), key=lambda each: each.rows)
    block, ends = (_on_line([(each.rows, getattr(each, part)) for each in whole], rows) for part in ("block", "ends"))
    if tensor > 1:
        parts = [each for each in found.compute if each.tensor == tensor]
        same = [each for part in parts for each in found.compute if (*each[:3],) == (part.remat, 1, part.rows)]
        share = (
            (parts[0].block / same[0].block, parts[0].ends / same[0].ends)
            if same and same[0].ends
            else (1 / tensor,) * 2
        )
        block, ends = block * share[0], ends * share[1]
    return scale * block, ends


def _on_line(points: list[tuple[int, float]], at: float) -> float:
    """The value at a place, on the lines through neighbouring points; below the first, in proportion."""
    if at <= points[0][0]:
        return points[0][1] * at / points[0][0] if len(points) == 1 else max(0.0, _between(points[0], points[1], at))
    for low, high in itertools.pairwise(points):
        if at <= high[0]:
            return _between(low, high, at)
    return points[-1][1] * at / points[-1][0]


def _between(low: tuple[int, float], high: tuple[int, float], at: float) -> float:
    return low[1] + (high[1] - low[1]) * (at - low[0]) / (high[0] - low[0])


def bubble_of(config: Config, work: ModelWork, known: Known) -> float:
    """Seconds that a pipeline's stages wait for each other, for each second that they compute; 0 for one stage."""
    parallel, stages = config.parallel, config.mesh.pipe
    table = table_of(parallel.schedule) if stages > 1 else None
    if table is None:
        return 0.0
    # In forward passes: what gradients of weights take, one where all are trained; and the rest of a backward pass.
    weights = round(min(1.0, max(0.0, work.plain.flops / work.forward.flops - 2)), 2)
    inputs = round(work.block.flops / work.forward.flops - 1 - weights, 2)
    key = (
        "bubble",
        parallel.schedule,
        stages,
        parallel.microbatches,
        parallel.chunks,
        parallel.stages,
        weights,
        inputs,
    )

    def make() -> float:
        ticks = table(stages, parallel.microbatches, parallel.chunks)
        line = simulate(ticks, WorkCosts(1.0, inputs, weights), uneven(parallel.stages))
        return float(line.total / line.busy.max() - 1)

    found: float = known.get(key, make)
    return found


def _waiting(
    sent: Iterable[Transfer], config: Config, cluster: PlanCluster, computing: float
) -> dict[tuple[str, ...], float]:
    """{axes: seconds that computation waits}, of the busiest stage."""
    sizes, given = asdict(config.mesh), list(sent)
    links = [cluster.link(each.axes, sizes)[0] for each in given]

    def took(stage: int) -> list[float]:
        """Seconds of each on a stage. Of the parameters or gradients of a unit, which do not wait for each other, the
        latency counts once: compilers combine them, or run them side by side."""
        found, together = list[float](), dict[tuple[object, ...], float]()
        for each, link in zip(given, links, strict=True):
            calls = each.calls[min(stage, len(each.calls) - 1)]
            # `sent` has the calls of a whole batch, and each half has them.
            parts = config.parallel.batch_split if each.what == "activations" else 1
            latency = parts * calls * rounds(each.op, each.group_size) * link.latency_s
            if each.what in ("parameters", "gradients"):
                key = (each.axes, each.phase, each.op)
                before = together.get(key, 0.0)
                together[key] = max(before, latency)
                latency = together[key] - before
            found.append(latency + calls * each.wire_bytes / link.bytes_per_s)
        return found

    busiest = max(map(took, range(max((len(each.calls) for each in given), default=1))), key=sum)
    by_share: dict[tuple[tuple[str, ...], float], float] = {}
    waiting: dict[tuple[str, ...], float] = {}
    for each, seconds in zip(given, busiest, strict=True):
        share = hidden_share(each, config, cluster)
        by_share[each.axes, share] = by_share.get((each.axes, share), 0.0) + seconds
    room = computing
    for (axes, share), seconds in sorted(by_share.items(), key=lambda item: item[0][1]):
        hidden = min(share * seconds, share * room)
        room -= hidden
        waiting[axes] = waiting.get(axes, 0.0) + seconds - hidden
    return {axes: seconds for axes, seconds in waiting.items() if seconds > 0}


def hidden_share(each: Transfer, config: Config, cluster: PlanCluster) -> float:
    """The share of a collective's time that may run beside computation."""
    if each.phase == "once a step" or each.what in ("metrics", "optimizer"):
        return 0.0  # before the first block, or after the last: nothing is left to compute
    if each.what in ("parameters", "gradients"):
        return cluster.hidden.get(each.what, 0.0)
    owner = next((axis for axis in ("tensor", "expert", "context") if axis in each.axes), "")
    owner = "tensor in halves" if owner == "tensor" and config.parallel.batch_split > 1 else owner
    return cluster.hidden.get(owner, 0.0)
