"""Predicted seconds of a step, by part: what computes, what waits for which axes, the bubble, the optimizer, the host."""

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import NamedTuple

from jaxdist.config.rules.pipeline import uneven
from jaxdist.config.schema import Config
from jaxdist.mesh import BATCH_AXES
from jaxdist.parallel.pipeline.table import table_of
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.closed.sent import Sent
from jaxdist.plan.report.timeline import WorkCosts, simulate
from jaxdist.plan.search.cluster import Cluster
from jaxdist.plan.search.work import ModelWork, work_of

# Bytes that a step of an optimizer moves through the device's memory, for each byte of parameters and of its state:
# both are read and written, and gradients, which are as large as parameters, are read.
_STATE_PASSES, _PARAMETER_PASSES = 2, 3


class Seconds(NamedTuple):
    """Predicted seconds of a step.

    computing: products and what lies between them. bubble: a pipeline's stages wait for each other.
    waiting: {axes: seconds that computation waits for collectives over them}.
    optimizer: its passes over parameters and state. host: moving what is offloaded.
    between: of `waiting`, what is spent on links between hosts.
    """

    computing: float
    bubble: float
    waiting: dict[tuple[str, ...], float]
    optimizer: float
    host: float
    between: float

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
    config: Config, cluster: Cluster, sent: Iterable[Sent], state: tuple[int, int], known: Known
) -> Seconds:
    """The prediction for a configuration whose mesh has as many devices as the cluster.

    sent: its collectives. state: bytes of a device's parameters, and of its optimizer state.
    """
    sizes, parallel = asdict(config.mesh), config.parallel
    work, passes = computing_of(config, cluster, known)
    bubble = work * bubble_of(config, passes, known)
    waiting, between = _waiting(sent, config, cluster, work + bubble)
    parameters, optimizer = state
    moved = _PARAMETER_PASSES * parameters + _STATE_PASSES * optimizer
    offloaded = config.memory.offload.optimizer
    host = 2 * optimizer / cluster.to_host if offloaded else 0.0
    assert math.prod(sizes.values()) == cluster.devices and parallel.microbatches >= 1
    return Seconds(work, bubble, waiting, moved / cluster.bandwidth, host, between)


def computing_of(config: Config, cluster: Cluster, known: Known) -> tuple[float, ModelWork]:
    """(seconds that the busiest stage computes in a step without a bubble, the work of the model)."""
    mesh, parallel, model = config.mesh, config.parallel, config.model
    work = work_of(config, known)
    rows = rows_of(config)
    split = mesh.tensor * mesh.context
    blocks = max(parallel.stages, default=0) * parallel.chunks or -(-known.model(config).layers // mesh.pipe)
    rates = {"flops": cluster.flops, "bandwidth": cluster.bandwidth}
    assert model is not None
    once = blocks * work.block.seconds(rows, split, **rates) + work.ends.seconds(rows, split, **rates)
    return parallel.microbatches * once, work


def rows_of(config: Config) -> float:
    """Sequences of a microbatch on a device."""
    shards = math.prod(getattr(config.mesh, axis) for axis in BATCH_AXES)
    return config.data.global_batch / (shards * config.parallel.microbatches)


def bubble_of(config: Config, work: ModelWork, known: Known) -> float:
    """Seconds that a pipeline's stages wait for each other, for each second that they compute; 0 for one stage."""
    parallel, stages = config.parallel, config.mesh.pipe
    table = table_of(parallel.schedule) if stages > 1 else None
    if table is None:
        return 0.0
    again = round(work.block.flops / work.forward.flops - 3, 2)  # forward passes that the backward pass does again
    key = ("bubble", parallel.schedule, stages, parallel.microbatches, parallel.chunks, parallel.stages, again)

    def make() -> float:
        ticks = table(stages, parallel.microbatches, parallel.chunks)
        line = simulate(ticks, WorkCosts(1.0, 1.0 + again, 1.0), uneven(parallel.stages))
        return float(line.total / line.busy.max() - 1)

    found: float = known.get(key, make)
    return found


def _waiting(
    sent: Iterable[Sent], config: Config, cluster: Cluster, computing: float
) -> tuple[dict[tuple[str, ...], float], float]:
    """({axes: seconds that computation waits}, how much of it for links between hosts), of the busiest stage."""
    sizes = asdict(config.mesh)
    hideable: dict[tuple[tuple[str, ...], float], float] = {}
    waiting: dict[tuple[str, ...], float] = {}
    between = 0.0
    for each in sent:
        link, far = cluster.link(each.axes, sizes)
        took = max(each.calls) * (rounds(each.op, each.group_size) * link.latency_s + each.wire_bytes / link.bytes_per_s)
        share = hidden_share(each, config, cluster)
        hideable[each.axes, share] = hideable.get((each.axes, share), 0.0) + took
        between += took * (1 - share) if far else 0.0
    room = computing
    for (axes, share), took in sorted(hideable.items(), key=lambda item: item[0][1]):
        hidden = min(share * took, share * room)
        room -= hidden
        waiting[axes] = waiting.get(axes, 0.0) + took - hidden
    return waiting, between


def rounds(op: str, n: int) -> int:
    """Messages that a collective sends one after the other: in trees, as NCCL does where latency counts."""
    deep = math.ceil(math.log2(n)) if n > 1 else 0
    return {"psum": 2 * deep, "ppermute": 1}.get(op, deep)


def hidden_share(each: Sent, config: Config, cluster: Cluster) -> float:
    """The share of a collective's time that may run beside computation."""
    if each.phase == "once a step" or each.what in ("metrics", "optimizer"):
        return 0.0  # before the first block, or after the last: nothing is left to compute
    if each.what in ("parameters", "gradients"):
        return cluster.hidden.get(each.what, 0.0)
    owner = next((axis for axis in ("tensor", "expert", "context") if axis in each.axes), "")
    return cluster.hidden.get(owner, 0.0)
