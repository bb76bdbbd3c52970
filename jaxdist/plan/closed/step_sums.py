"""What a step sends once, whatever the number of its microbatches: parameters that are gathered at its start, the sums
of gradients, the sums of the loss and its weight."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jaxdist.collectives.bucket import plan_buckets
from jaxdist.mesh import BATCH_LIKE
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.strategies._moves import Moves
from jaxdist.parallel.wrappers.reduce_in_backward import summed_in_backward
from jaxdist.plan.closed.calls import AxisSizes, collective_call
from jaxdist.plan.closed.sent import Transfer
from jaxdist.plan.closed.shares import Share
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import SHARD_AXES, STACKED, UNITS

ONCE = "once a step"


def once_a_step(
    shares: Sequence[Share], sizes: AxisSizes, options: StepOptions, moves: Moves, *, in_backward: bool
) -> list[Transfer]:
    """All that a step sends once, beside what the optimizer sends.

    in_backward: whether the step has one backward pass, in which gradients may be summed (`reduce_in_backward`).
    """
    sync, reduce, found = options.grad_sync, options.precision.reduce, list[Transfer]()

    def add(
        what: str, axes: tuple[str, ...], operation: str, elements: int, dtype: Any, how: Any, times: int = 1
    ) -> None:
        found.append(
            collective_call(operation, elements, dtype, axes, sizes, how).sent(axes, sizes, ONCE, what, (times,))
        )

    for each in shares:
        if each.stages > 1:
            add("parameters", ("pipe",), "all_gather", each.elements // each.stages, each.stored, {})
        if each.axes and not moves.gather_each:
            of_a_row = each.elements // each.rows
            add("parameters", each.axes, "all_gather", of_a_row, each.received, sync.gathering, each.rows)
        if each.axes and each.trained and not moves.reduce_each:
            add("gradients", each.axes, "reduce_scatter", each.elements * each.parts, reduce, sync.reduction)
        if each.stages > 1 and each.trained:
            add("gradients", ("pipe",), "reduce_scatter", each.elements, reduce, sync.reduction)
    trained = [each for each in shares if each.trained]
    found += _sums(trained, sizes, options, in_backward=in_backward and moves.reduce_each)
    if axes := tuple(axis for axis in BATCH_LIKE if sizes[axis] > 1):
        loss = accumulation_dtype(options.precision.compute)
        if sync.deterministic:  # and a broadcast, which gives the sum an invariant type
            add("metrics", axes, "all_reduce", 2, loss, sync.reduction)
        add("metrics", axes, "all_reduce", 2, loss, {})
    return found


def _sums(trained: Sequence[Share], sizes: AxisSizes, options: StepOptions, *, in_backward: bool) -> Iterator[Transfer]:
    """The sums of `grad_sync.finish`, bucket by bucket: at the end of the step, and of each block those gradients that
    travel in the backward pass."""
    sync, itemsize = options.grad_sync, jnp.dtype(options.precision.reduce).itemsize
    early = set[tuple[str, ...]]()
    if in_backward and sync.wire_dtype != "int8":
        size = Counter[tuple[str, ...]]()
        for share in trained:
            if share.unit == STACKED:
                size[share.rest] += share.elements // share.rows * itemsize
        shards = [axis for axis in SHARD_AXES if sizes[axis] > 1]
        early = summed_in_backward(size, options, shards=shards)
    how = {**sync.reduction, "wire_dtype": sync.wire_dtype}
    order = sorted(range(len(trained)), key=lambda i: (-UNITS.index(trained[i].unit), -i))
    late = [trained[i] for i in order if not (trained[i].unit == STACKED and trained[i].rest in early)]
    blocks = [trained[i] for i in order if trained[i].unit == STACKED and trained[i].rest in early]
    for shares, rows, phase in ((late, 1, ONCE), (blocks, blocks[0].rows if blocks else 1, "backward")):
        for axes in sorted({share.rest for share in shares} - {()}):
            members = [share for share in shares if share.rest == axes]
            elements = [share.elements // rows for share in members]
            kinds = [share.tensor for share in members]
            for bucket in plan_buckets([size * itemsize for size in elements], kinds, int(sync.bucket_mb * 2**20)):
                one = collective_call(
                    "all_reduce", sum(elements[i] for i in bucket), options.precision.reduce, axes, sizes, how
                )
                yield one.sent(axes, sizes, phase, "gradients", (rows,))
