"""Binomial trees: in round k, ranks 2^k apart communicate. ceil(log2 n) rounds lead to the root, as many back.

The rounds are few, but each sends the whole message. That suits small messages: rounds cost more than bytes there.
An all-reduce is a reduction to rank 0 and a broadcast from it (Thakur, Rabenseifner and Gropp 2005, section 3).
"""

import math

import jax.numpy as jnp

from jaxdist.collectives.algorithm import COMBINE, from_rooted
from jaxdist.collectives.group import Array, Group, Pairs


def traffic(nbytes: float, n: int) -> float:
    """Bytes that are sent one after the other on the way to the root, and as many on the way back: log2(P) N."""
    return math.log2(n) * nbytes


def rounds(n: int, root: int = 0) -> list[Pairs]:
    """The rounds of a reduction, as (child, parent) pairs. Backwards, with the pairs turned, they are a broadcast."""

    def away(distance: int) -> int:
        return (root + distance) % n

    strides = [2**k for k in range((n - 1).bit_length())]
    return [[(away(i), away(i - stride)) for i in range(stride, n, 2 * stride)] for stride in strides]


def reduce(x: Array, group: Group, op: str, root: int) -> Array:
    """A reduction by pairs: ranks 0 and 1, 2 and 3, then pairs of pairs. Ranks are counted from the root."""
    for pairs in rounds(group.n, root):
        arrived = group.permute(x, pairs)
        x = jnp.where(group.among(parent for _, parent in pairs), COMBINE[op](x, arrived), x)
    return x


def broadcast(x: Array, group: Group, root: int) -> Array:
    """The root's x on every rank, by the reduction's rounds backwards."""
    x = group.rounded(x)
    for pairs in reversed(rounds(group.n, root)):
        arrived = group.permute(x, [(parent, child) for child, parent in pairs])
        x = jnp.where(group.among(child for child, _ in pairs), arrived, x)
    return x


def _gather(x: Array, group: Group, root: int) -> Array:
    """Every rank's x on the root, [n, ...]."""
    n = group.n
    held = x[None]  # before the round of stride s: the values of this rank and the s - 1 after it
    for pairs in rounds(n, root):
        held = jnp.concatenate([held, group.permute(held, pairs)])
    return jnp.roll(held[:n], root, axis=0)  # the root is at distance 0 from itself


def scatter(parts: Array, group: Group, root: int) -> Array:
    """The root's parts[rank], by the gather's rounds backwards: each hands on the farther half of a rank's parts."""
    padded = 2 ** (group.n - 1).bit_length() - group.n
    held = jnp.pad(jnp.roll(parts, -root, axis=0), [(0, padded)] + [(0, 0)] * (parts.ndim - 1))
    for pairs in reversed(rounds(group.n, root)):
        near, far = jnp.split(held, 2)
        arrived = group.permute(far, [(parent, child) for child, parent in pairs])
        held = jnp.where(group.among(child for child, _ in pairs), arrived, near)
    return held[0]


def _gather_rounds(n: int) -> list[tuple[Pairs, int]]:
    return [(pairs, 2**k) for k, pairs in enumerate(rounds(n))]


tree = from_rooted(_gather_rounds, broadcast, reduce, _gather, scatter)
