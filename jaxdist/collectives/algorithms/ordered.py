"""Sums in a fixed order, whatever the number of devices: rank 0 with 1, 2 with 3; then pairs of pairs; and so on.

2n devices add in the same order as n devices that each add two neighbours first, so that the results are the same bits
(`parallel.grad_sync.deterministic`). If n is a power of two, small arrays are reduced by recursive doubling (log2 n
rounds of N), and large ones by recursive halving and an all-gather, with 2 (n-1)/n N in 2 log2 n rounds (Thakur et al.
2005). Any other n goes by the tree, which adds in this order, too.
"""

from jax import lax

from jaxdist.collectives.algorithm import COMBINE, from_halves
from jaxdist.collectives.algorithms import halving_doubling, tree
from jaxdist.collectives.cost import Cost, even, halves_cost
from jaxdist.collectives.group import Array, Group, Pairs
from jaxdist.collectives.parts import padded_parts, unpadded

SMALL = 4096  # elements; up to here the rounds cost more than the bytes


def _partners(n: int, distance: int) -> Pairs:
    return [(rank, rank ^ distance) for rank in range(n)]


def _levels(n: int) -> int | None:
    """log2 n for a power of two, else None."""
    return n.bit_length() - 1 if n & (n - 1) == 0 else None


def _reduce_parts(parts: Array, group: Group, op: str) -> Array:
    """[n, ...] -> this device's part of the reduction."""
    held, levels = parts, _levels(group.n)
    if levels is None:
        return tree.scatter(tree.reduce(parts, group, op, 0), group, 0)
    for k in range(levels):  # ranks that differ in bit k are a pair: each keeps the parts that share its bit k
        halves = held.reshape(held.shape[0] // 2, 2, *parts.shape[1:])  # by bit k of the part's number
        bit = (group.rank >> k) & 1
        keep, give = (lax.dynamic_index_in_dim(halves, which, 1, keepdims=False) for which in (bit, 1 - bit))
        held = COMBINE[op](group.rounded(keep), group.permute(give, _partners(group.n, 2**k)))
    return held[0]


def _all_reduce(x: Array, group: Group, op: str) -> Array:
    levels = _levels(group.n)
    if levels is None:
        return tree.broadcast(tree.reduce(x, group, op, 0), group, 0)
    if x.size > SMALL:
        mine = _reduce_parts(padded_parts(x, group.n), group, op)
        return unpadded(halving_doubling.gather_parts(group.rounded(mine), group), x)
    for k in range(levels):
        x = COMBINE[op](group.rounded(x), group.permute(x, _partners(group.n, 2**k)))
    return x


def _cost(operation: str, size: int, group: Group) -> Cost:
    n, levels = group.n, _levels(group.n)
    if operation == "all_gather":
        return halving_doubling.cost(operation, size, group)
    if levels is None:
        return tree.tree.cost(operation, size, group)
    if operation == "all_reduce" and size <= SMALL:
        return even(levels, levels * size, n, swap=True)
    return halves_cost(operation, size, n, levels, swap=True)


ordered = from_halves(_cost, _reduce_parts, halving_doubling.gather_parts, all_reduce=_all_reduce)
