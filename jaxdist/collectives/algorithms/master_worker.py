"""The master-worker baseline: all workers send to the master, which combines and sends the result to all.

The master receives (n-1) N bytes and sends as many. Its link is the bottleneck, and each added worker makes it worse.
"""

import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.algorithm import COMBINE, from_rooted
from jaxdist.collectives.group import Array, Group, Pairs
from jaxdist.collectives.parts import in_own_place


def traffic(nbytes: float, n: int) -> float:
    """Bytes that the master receives, and as many that it sends: (P-1) N."""
    return (n - 1) * nbytes


def _workers(group: Group, root: int) -> list[int]:
    return [rank for rank in range(group.n) if rank != root]


def _reduce(x: Array, group: Group, op: str, root: int) -> Array:
    total = x
    for worker in _workers(group, root):  # one after the other: they share the master's link
        total = COMBINE[op](total, group.permute(x, [(worker, root)]))
    return total


def _broadcast(x: Array, group: Group, root: int) -> Array:
    x = result = group.rounded(x)
    for worker in _workers(group, root):
        result = jnp.where(group.rank == worker, group.permute(x, [(root, worker)]), result)
    return result


def _gather(x: Array, group: Group, root: int) -> Array:
    parts = in_own_place(x, group)
    for worker in _workers(group, root):
        parts = lax.dynamic_update_index_in_dim(parts, group.permute(x, [(worker, root)]), worker, 0)
    return parts


def _scatter(parts: Array, group: Group, root: int) -> Array:
    mine = parts[root]
    for worker in _workers(group, root):
        mine = jnp.where(group.rank == worker, group.permute(parts[worker], [(root, worker)]), mine)
    return mine


def _gather_rounds(n: int) -> list[tuple[Pairs, int]]:
    return [([(worker, 0)], 1) for worker in range(1, n)]


master_worker = from_rooted(_gather_rounds, _broadcast, _reduce, _gather, _scatter)
