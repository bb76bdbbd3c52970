"""The ring: every device sends to its right neighbour and combines what comes from its left neighbour.

An all-reduce of N bytes is a reduce-scatter and an all-gather of n-1 rounds each. In every round each device sends one
chunk of N/n, which makes 2 (n-1)/n N in all. No algorithm sends less (Patarasuk and Yuan 2009, theorem 1). Two problems
remain: the latency of 2 (n-1) rounds, and that the slowest link sets the pace.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.algorithm import COMBINE, Int8Halves, from_halves
from jaxdist.collectives.compression import decode, encode
from jaxdist.collectives.cost import Cost, halves_cost
from jaxdist.collectives.group import Array, Group, shift
from jaxdist.collectives.parts import in_own_place, padded_parts, part_at, put_part, unpadded
from jaxdist.config.entries import AlgorithmFacts

FACTS = AlgorithmFacts(int8=True)

Places = Callable[[Array], tuple[Array, ...]]  # rank mod n -> the positions of its parts, which travel together


def traffic(nbytes: float, n: int) -> float:
    """Bytes that each device sends in an all-reduce: 2 N (P-1)/P."""
    return 2 * nbytes * (n - 1) / n


def alone_in(i: Array) -> tuple[Array]:
    """The `Places` of a plain ring: the part of rank i is at position i."""
    return (i,)


def take(parts: Array, places: tuple[Array, ...]) -> Array:
    """The parts at these positions, which travel together: [len(places), ...]."""
    return jnp.stack([part_at(parts, i) for i in places])


def reduce_round(step: Array, travelling: Array, parts: Array, group: Group, op: str, by: int) -> Array:
    """One round of the reduce-scatter: what travels moves on by `by` ranks, and takes up the part of this device."""
    # The part that starts at rank p + by is complete when it arrives at rank p, n-1 rounds later.
    return COMBINE[op](group.permute(travelling, shift(group.n, by)), part_at(parts, group.rank - by * (2 + step)))


def gather_round(step: Array, carry: tuple[Array, Array], group: Group, by: int) -> tuple[Array, Array]:
    """One round of the all-gather. carry: (parts so far, the last to arrive), of which the latter is passed on."""
    parts, travelling = carry[0], group.permute(carry[1], shift(group.n, by))
    return put_part(parts, travelling, group.rank - by * (1 + step)), travelling


def reduce_parts(parts: Array, group: Group, op: str) -> Array:
    """[n, ...] -> this device's part of the reduction."""
    first = part_at(parts, group.rank - 1)
    return lax.fori_loop(
        0, group.n - 1, lambda step, travelling: reduce_round(step, travelling, parts, group, op, 1), first
    )


def gather_parts(x: Array, group: Group) -> Array:
    """Every device's x: [n, ...]."""
    start = in_own_place(x, group), x
    return lax.fori_loop(0, group.n - 1, lambda step, carry: gather_round(step, carry, group, 1), start)[0]


def gather_in_place(parts: Array, group: Group, places: Places = alone_in) -> Array:
    """An all-gather inside one buffer: the result has at places(i) what rank i had there."""

    def round_(step: Array, parts: Array) -> Array:
        arrived = group.permute(take(parts, places(group.rank - step)), shift(group.n))
        for row, i in zip(arrived, places(group.rank - 1 - step), strict=True):
            parts = put_part(parts, row, i)
        return parts

    return lax.fori_loop(0, group.n - 1, round_, parts)


def all_reduce(x: Array, group: Group, op: str) -> Array:
    """Reduce-scatter, then all-gather, of n padded parts."""
    # Both in one buffer: over gloo, fresh memory takes more time than copies inside old memory.

    def reduce(step: Array, parts: Array) -> Array:
        arrived = group.permute(part_at(parts, group.rank - 1 - step), shift(group.n))
        return put_part(parts, COMBINE[op](arrived, part_at(parts, group.rank - 2 - step)), group.rank - 2 - step)

    parts = lax.fori_loop(0, group.n - 1, reduce, padded_parts(x, group.n))
    if group.wire is not None:
        parts = put_part(parts, group.rounded(part_at(parts, group.rank)), group.rank)
    return unpadded(gather_in_place(parts, group), x)


def _reduce_parts_int8(parts: Array, group: Group) -> tuple[Array, Array]:
    """`reduce_parts` for sums, with int8 on the wire (`Int8Halves.reduce_parts`)."""
    size = parts.shape[1]

    def round_(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        travelling, lost = carry
        code = encode(travelling)
        lost = put_part(lost, travelling - decode(code, size), group.rank - 1 - step)
        arrived = decode(group.permute(code, shift(group.n)), size)
        return arrived + part_at(parts, group.rank - 2 - step), lost

    return lax.fori_loop(0, group.n - 1, round_, (part_at(parts, group.rank - 1), jnp.zeros_like(parts)))


def cost(operation: str, size: int, group: Group) -> Cost:
    """The cost of an all-reduce is 2 (n-1) rounds of N/n; that of its halves, half of it."""
    return halves_cost(operation, size, group.n, group.n - 1, swap=group.n == 2)


ring = from_halves(
    cost, reduce_parts, gather_parts, all_reduce=all_reduce, int8=Int8Halves(_reduce_parts_int8, gather_parts)
)
