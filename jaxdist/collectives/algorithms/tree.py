"""Binomial trees: in round k, ranks 2^k apart meet. ceil(log2 n) rounds to the root, as many back.

Few rounds, each with the whole message: for small messages, where a round costs more than its bytes.
An all-reduce is a reduction to rank 0 and a broadcast from it (Thakur, Rabenseifner and Gropp 2005, section 3).
"""

import math

import jax.numpy as jnp

from jaxdist.collectives.algorithm import COMBINE, from_rooted
from jaxdist.collectives.cost import Cost
from jaxdist.collectives.group import Array, Group, Pairs


def traffic(nbytes: float, n: int) -> float:
    """Bytes that pass one after the other on the way to the root, and again on the way back: log2(P) N."""
    return math.log2(n) * nbytes


def rounds(n: int, root: int = 0) -> list[Pairs]:
    """(child, parent) pairs of each round towards the root. Backwards, with the pairs turned, they are a broadcast."""

    def away(distance: int) -> int:
        return (root + distance) % n

    strides = [2**k for k in range((n - 1).bit_length())]
    return [[(away(i), away(i - stride)) for i in range(stride, n, 2 * stride)] for stride in strides]


def reduce(x: Array, group: Group, op: str, root: int) -> Array:
    """To the root, pairwise: rank 0 with 1, 2 with 3, then pairs of pairs (distances from the root)."""
    for pairs in rounds(group.n, root):
        arrived = group.permute(x, pairs)
        x = jnp.where(group.among(parent for _, parent in pairs), COMBINE[op](x, arrived), x)
    return x


def broadcast(x: Array, group: Group, root: int) -> Array:
    """The root's x, by the reduction's rounds backwards."""
    x = group.rounded(x)
    for pairs in reversed(rounds(group.n, root)):
        arrived = group.permute(x, [(parent, child) for child, parent in pairs])
        x = jnp.where(group.among(child for child, _ in pairs), arrived, x)
    return x


def _gather(x: Array, group: Group, root: int) -> Array:
    """Before the round of stride s, a rank holds the values of the s ranks from itself on."""
    n = group.n
    held = x[None]  # in order of distance from this rank
    for pairs in rounds(n, root):
        held = jnp.concatenate([held, group.permute(held, pairs)])
    return jnp.roll(held[:n], root, axis=0)  # the root is at distance 0 from itself


def scatter(parts: Array, group: Group, root: int) -> Array:
    """The gathering backwards: each round hands on the farther half of what a rank holds."""
    padded = 2 ** (group.n - 1).bit_length() - group.n
    held = jnp.pad(jnp.roll(parts, -root, axis=0), [(0, padded)] + [(0, 0)] * (parts.ndim - 1))
    for pairs in reversed(rounds(group.n, root)):
        near, far = jnp.split(held, 2)
        arrived = group.permute(far, [(parent, child) for child, parent in pairs])
        held = jnp.where(group.among(child for child, _ in pairs), arrived, near)
    return held[0]


def cost(operation: str, size: int, group: Group) -> Cost:
    """Of the busiest rank: the root where values go out, else a leaf or the second largest subtree."""
    n, levels = group.n, (group.n - 1).bit_length()
    if operation == "reduce":
        return Cost(levels, size, (n - 1) * size, levels * size)
    if operation == "broadcast":
        return Cost(levels, levels * size, (n - 1) * size, levels * size)
    if operation == "all_reduce":  # rank 0 sends in the broadcast only; the busiest of the others one fewer, and one up
        return Cost(2 * levels, levels * size, 2 * (n - 1) * size, 2 * levels * size)
    if operation in ("reduce_scatter", "all_gather"):
        return _both_ways(operation, size, group)
    # Messages double towards the root.
    part = size if operation == "gather" else size // n
    messages = [(2**k, len(pairs)) for k, pairs in enumerate(rounds(n))]
    total = sum(length * pairs for length, pairs in messages) * part
    serial = (2**levels - 1) * part
    return Cost(levels, serial if operation == "scatter" else 2 ** (levels - 1) * part, total, serial)


def _both_ways(operation: str, size: int, group: Group) -> Cost:
    """Reduce and scatter, or gather and broadcast: the root sends on the way back only, the others up and down."""
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
