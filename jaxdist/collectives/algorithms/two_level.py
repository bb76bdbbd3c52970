"""Two levels: fast neighbourhoods reduce first, so that the slow links carry each byte once.

n = outer x inner. A reduce-scatter inside the neighbourhoods is followed by an all-reduce between them, of 1/inner of
the data, and an all-gather inside. A device sends 2 (outer-1)/outer N/inner over the slow links; in the flat ring it
sends 2 (n-1)/n N (Jia et al. 2018, "Highly scalable deep learning training system", section 3.2). Of several mesh axes
the last is inner. Over one axis, and in sub-groups, no device is known to be a neighbour, and this is the ring.
"""

import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.algorithm import COMBINE, Algorithm
from jaxdist.collectives.algorithms import ring
from jaxdist.collectives.cost import Cost, even
from jaxdist.collectives.group import Array, Group, Pairs, shift
from jaxdist.collectives.parts import cut_parts, join_parts, padded_parts, part_at, put_part, unpadded
from jaxdist.collectives.varying import zeros_varying_like


def _all_reduce(x: Array, group: Group, op: str) -> Array:
    outer, inner = group.split()
    if inner.n == 1 or outer.n == 1:
        return ring.all_reduce(x, group, op)
    if _in_turns(group):
        return _two_by_two(x, group, inner, op)
    if outer.n == 2:
        return _two_neighbourhoods(x, group, inner, op)
    mine = ring.reduce_parts(padded_parts(x, inner.n), inner, op)
    return unpadded(ring.gather_parts(ring.all_reduce(mine, outer, op), inner), x)


def _in_turns(group: Group) -> bool:
    """Whether devices take turns on the slow link (`_two_by_two`). This pays if a host's devices share that link."""
    return group.inner == 2 and group.n == 4 and group.network.shared


def twist(inner: int) -> Pairs:
    """A cycle through two neighbourhoods that changes sides at every step: (0, d) -> (1, d) -> (0, d+1)."""
    there = [(d, inner + d) for d in range(inner)]
    back = [(inner + d, (d + 1) % inner) for d in range(inner)]
    return there + back


def _two_neighbourhoods(x: Array, group: Group, inner: Group, op: str) -> Array:
    """An all-reduce between two neighbourhoods, without exchanges between pairs.

    The outer ring would be such exchanges, which run at half speed over gloo. Instead, side 0 sends the first half of
    the data along `twist` to side 1, which completes it, while side 1 sends the second half. Results return the same
    way. The return ends one device further on, so the all-gather finds parts in other places than the reduce-scatter.
    """
    n, pairs = inner.n, twist(inner.n)
    side, rank = group.rank // n, group.rank % n
    parts = padded_parts(x, 2 * n)

    def inwards(i: Array) -> tuple[Array, Array]:  # positions of one part of each half, in the reduce-scatter
        return i % n, n + (i + side) % n

    def outwards(i: Array) -> tuple[Array, Array]:  # the same, in the all-gather
        return (i + side - 1) % n, n + i % n

    def reduce(step: Array, travelling: Array) -> Array:
        return COMBINE[op](inner.permute(travelling, shift(n)), ring.take(parts, inwards(rank - 2 - step)))

    last = inner.permute(lax.fori_loop(0, n - 2, reduce, ring.take(parts, inwards(rank - 1))), shift(n))

    def inside(half: Array) -> Array:  # one half at a time: first the one for which the other side waits
        return COMBINE[op](part_at(last, half), part_at(parts, jnp.stack(inwards(rank))[half]))

    theirs = group.permute(inside(side), pairs)
    mine = group.rounded(COMBINE[op](inside(1 - side), theirs))
    back = group.permute(mine, pairs)
    whole = zeros_varying_like(parts)
    for half, complete in ((1 - side, mine), (side, back)):
        whole = put_part(whole, complete, jnp.stack(outwards(rank))[half])
    return unpadded(ring.gather_in_place(whole, inner, outwards), x)


def turn(sender: int) -> Pairs:
    """A cycle through 2 x 2 devices: (0, sender) -> (1, other) -> (1, sender) -> (0, other).

    Device `sender` of each side sends to the other side, the other device to its neighbour.
    """
    near, far = 1 - sender, 2 + 1 - sender
    return [(sender, far), (far, 2 + sender), (2 + sender, near), (near, sender)]


def _two_by_two(x: Array, group: Group, inner: Group, op: str) -> Array:
    """An all-reduce on 2 x 2 devices that take turns on the slow link of their side.

    While one device sends to the other side at the link's full speed, the other gives its neighbour the data that it
    needs next. Half of the traffic inside a side thus costs no time of its own. Half `side` of the data is completed on
    this side, its part 1-d by device d.
    """
    side, d = group.rank // 2, group.rank % 2
    first, parts, swap = d == 0, padded_parts(x, 4), shift(2)

    def own(half: Array, d: Array) -> Array:
        return part_at(parts, 2 * half + d)

    neighbours = inner.permute(own(1 - side, 1 - d), swap)
    theirs = COMBINE[op](own(1 - side, d), neighbours)  # this side's share of what the other side completes
    one = group.permute(jnp.where(first, theirs, own(side, d)), turn(0))
    two = group.permute(jnp.where(first, own(side, d), theirs), turn(1))
    mine = group.rounded(COMBINE[op](COMBINE[op](own(side, 1 - d), one), two))
    three, four = group.permute(mine, turn(0)), group.permute(mine, turn(1))
    came, beside = jnp.where(first, four, three), jnp.where(first, three, four)
    rest = inner.permute(came, swap)
    whole = parts  # a buffer: all four parts are replaced
    for half, place, done in ((side, 1 - d, mine), (side, d, beside), (1 - side, d, came), (1 - side, 1 - d, rest)):
        whole = put_part(whole, done, 2 * half + place)
    return unpadded(whole, x)


def _reduce_scatter(x: Array, group: Group, op: str, dim: int) -> Array:
    outer, inner = group.split()
    parts = cut_parts(x, group.n, dim)
    parts = jnp.swapaxes(parts.reshape(outer.n, inner.n, *parts.shape[1:]), 0, 1)
    mine = ring.reduce_parts(parts, inner, op) if inner.n > 1 else parts[0]
    return ring.reduce_parts(mine, outer, op) if outer.n > 1 else mine[0]


def _all_gather(x: Array, group: Group, dim: int) -> Array:
    outer, inner = group.split()
    rows = ring.gather_parts(x, outer) if outer.n > 1 else x[None]
    parts = ring.gather_parts(rows, inner) if inner.n > 1 else rows[None]
    return join_parts(jnp.swapaxes(parts, 0, 1).reshape(group.n, *x.shape), dim)


def _cost(operation: str, size: int, group: Group) -> Cost:
    d, h = group.inner, group.n // group.inner
    if d == 1 or h == 1:
        return ring.cost(operation, size, group)
    if operation == "all_reduce" and _in_turns(group):
        part = -(-size // 4)
        return even(6, 6 * part, 4)._replace(inside_rounds=2, inside=2 * part)
    if operation == "all_gather":
        near, far = (d - 1) * h * size, (h - 1) * size
    else:
        share = 2 * -(-size // (2 * d)) if h == 2 and operation == "all_reduce" else -(-size // d)
        near, far = (d - 1) * share, (h - 1) * -(-share // h)
    both = 2 if operation == "all_reduce" else 1
    cost = even(both * (d + h - 2), both * (near + far), group.n, swap=h == 2 and operation != "all_reduce")
    return cost._replace(inside_rounds=both * (d - 1), inside=both * near)


two_level = Algorithm(_cost, _all_reduce, _reduce_scatter, _all_gather)
