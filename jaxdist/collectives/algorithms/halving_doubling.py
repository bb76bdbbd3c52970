"""Reduce-scatter by halving, all-gather by doubling: the fewest rounds with the fewest bytes, for any n.

In each round of the reduce-scatter a device sends half of its parts. If it keeps k of them, it sends to the rank k
places further round the circle. This takes ceil(log2 n) rounds and (n-1)/n N bytes for any n (Traeff 2024, arXiv
2410.14234, algorithm 1; the all-gather is Bruck et al. 1997). The classic butterfly (Thakur et al. 2005, section 4.5)
has the same rounds and bytes for powers of two, but each of its rounds is an exchange between pairs, which runs at half
speed over gloo. Here only the largest message of an even n is one: it goes n/2 places.
"""

import jax.numpy as jnp

from jaxdist.collectives.algorithm import COMBINE, from_halves
from jaxdist.collectives.cost import Cost, halves_cost
from jaxdist.collectives.group import Array, Group, shift


def halvings(n: int) -> list[tuple[int, int]]:
    """The parts of a device before and after each round: 6 -> (6, 3), (3, 2), (2, 1)."""
    steps = []
    while n > 1:
        steps.append((n, (n + 1) // 2))
        n = (n + 1) // 2
    return steps


def _reduce_parts(parts: Array, group: Group, op: str) -> Array:
    held = jnp.roll(parts, -group.rank, axis=0)  # held[i] is for the rank i places further on
    for count, kept in halvings(group.n):
        arrived = group.permute(held[kept:count], shift(group.n, kept))
        held = jnp.concatenate([COMBINE[op](held[: count - kept], arrived), held[count - kept : kept]])
    return held[0]


def gather_parts(x: Array, group: Group) -> Array:
    """Every device's x, by doubling: [n, ...]."""
    held = x[None]  # held[i] comes from the rank i places further on
    for count, kept in reversed(halvings(group.n)):
        held = jnp.concatenate([held, group.permute(held[: count - kept], shift(group.n, -kept))])
    return jnp.roll(held, group.rank, axis=0)


def cost(operation: str, size: int, group: Group) -> Cost:
    """The cost of an all-reduce is 2 ceil(log2 n) rounds and the ring's bytes; of its halves, half of it."""
    return halves_cost(operation, size, group.n, (group.n - 1).bit_length(), swap=group.n % 2 == 0)


halving_doubling = from_halves(cost, _reduce_parts, gather_parts)
