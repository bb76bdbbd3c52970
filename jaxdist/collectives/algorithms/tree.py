"""Binomial trees: in round k, ranks 2^k apart communicate. ceil(log2 n) rounds lead to the root, as many back.

The rounds are few, but each sends the whole message. That suits small messages: rounds cost more than bytes there.
An all-reduce is a reduction to rank 0 and a broadcast from it (Thakur, Rabenseifner and Gropp 2005, section 3).
"""

import math

import jax.numpy as jnp

from jaxdist.collectives.algorithm import COMBINE, from_rooted
from jaxdist.collectives.cost import Cost
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


def cost(operation: str, size: int, group: Group) -> Cost:
    """The cost of an operation. The busiest rank is the root if values go out from it.

    Otherwise it is a leaf, or the root of the second largest subtree.
    """
    n, levels = group.n, (group.n - 1).bit_length()
    if operation == "reduce":
        return Cost(levels, size, (n - 1) * size, levels * size)
    if operation == "broadcast":
        return Cost(levels, levels * size, (n - 1) * size, levels * size)
    if (
        operation == "all_reduce"
    ):  # rank 0 only sends down; the busiest other rank sends one message fewer down, and one up
        return Cost(2 * levels, levels * size, 2 * (n - 1) * size, 2 * levels * size)
    if operation in ("reduce_scatter", "all_gather"):
        return _both_ways(operation, size, group)
    # Gather and scatter: messages double in size towards the root.
    part = size if operation == "gather" else size // n
    messages = [(2**k, len(pairs)) for k, pairs in enumerate(rounds(n))]
    total = sum(length * pairs for length, pairs in messages) * part
    serial = (2**levels - 1) * part
    return Cost(levels, serial if operation == "scatter" else 2 ** (levels - 1) * part, total, serial)


def _both_ways(operation: str, size: int, group: Group) -> Cost:
    """The cost of a reduce-scatter (reduce, scatter) or an all-gather (gather, broadcast).

    The root sends on the way back only, all other ranks on both ways.
    """
    n = group.n
    pair = ("reduce", size), ("scatter", size)
    if operation == "all_gather":
        pair = ("gather", size), ("broadcast", n * size)
    up, down = (cost(name, length, group) for name, length in pair)
    sent = [0] * n
    for k, pairs in enumerate(rounds(n)):
        for child, parent in pairs:
            sent[child] += size * 2**k if operation == "all_gather" else size
            sent[parent] += n * size if operation == "all_gather" else 2**k * (size // n)
    return Cost(up.rounds + down.rounds, max(sent), up.total + down.total, up.serial + down.serial)


tree = from_rooted(cost, broadcast, reduce, _gather, scatter)
