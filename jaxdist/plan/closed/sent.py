"""Collectives of a step in closed form: what `sends` beside each strategy, schedule, layer and algorithm returns."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple


class Transfer(NamedTuple):
    """A kind of collective of a step, with all its calls.

    op: psum, all_gather, reduce_scatter, ppermute or all_to_all, as in `jaxdist.plan.traced.ledger`.
    axes: of the mesh. group_size: devices that take part.
    wire_bytes: of one call, what a device sends (`jaxdist.plan.traced.ledger.wire_bytes`); a mean, where they differ.
    calls: in a step, on each stage of a pipeline; one number without one.
    phase: forward, backward, recompute or once a step.
    what: "parameters", "gradients", "activations", "metrics" or "optimizer", for the sums of a plan.
    """

    op: str
    axes: tuple[str, ...]
    group_size: int
    wire_bytes: float
    calls: tuple[float, ...]
    phase: str
    what: str


def bytes_by_axes(sent: Iterable[Transfer]) -> dict[tuple[str, ...], float]:
    """Bytes that a device of the busiest stage sends in a step, by axes: as `Ledger.total("axes")`."""
    sent = list(sent)
    stages = max((len(each.calls) for each in sent), default=1)

    def on(each: Transfer, stage: int) -> float:
        return each.wire_bytes * each.calls[stage if len(each.calls) > 1 else 0]

    busiest = max(range(stages), key=lambda stage: sum(on(each, stage) for each in sent))
    found: Counter[tuple[str, ...]] = Counter()
    for each in sent:
        if (size := on(each, busiest)) > 0:
            found[each.axes] += size  # type: ignore[assignment]
    return dict(found.most_common())


def merged_transfers(sent: Iterable[Transfer]) -> list[Transfer]:
    """The same, with one entry for all that differ in bytes and calls only."""
    found: dict[tuple[Any, ...], list[Transfer]] = {}
    for each in sent:
        found.setdefault((*each[:3], *each[5:], len(each.calls)), []).append(each)

    def one(some: list[Transfer]) -> Transfer:
        calls = [sum(stage) for stage in zip(*(each.calls for each in some), strict=True)]
        sizes = [sum(x) for x in zip(*([n * each.wire_bytes for n in each.calls] for each in some), strict=True)]
        mean = max(sizes) / max(1, max(calls))
        return some[0]._replace(wire_bytes=mean, calls=tuple(size / mean if mean else 0 for size in sizes))

    return [one(some) if len(some) > 1 else some[0] for some in found.values()]


def rounds(op: str, n: int) -> int:
    """Messages that a collective sends one after the other: in trees, as NCCL does where latency counts."""
    deep = math.ceil(math.log2(n)) if n > 1 else 0
    return {"psum": 2 * deep, "ppermute": 1}.get(op, deep)
