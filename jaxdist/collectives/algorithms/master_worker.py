"""The master-worker baseline: all workers send to the master, which combines and sends the result to all.

The master receives (n-1) N bytes and sends as many. Its link is the bottleneck, and each added worker makes it worse.
"""

import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.algorithm import COMBINE, from_rooted
from jaxdist.collectives.cost import Cost
from jaxdist.collectives.group import Array, Group
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


def _cost(operation: str, size: int, group: Group) -> Cost:
    n, both_ways = group.n, {"reduce_scatter": ("reduce", "scatter"), "all_gather": ("gather", "broadcast")}
    if operation in both_ways:
        there, back = both_ways[operation]
        up, down = _cost(there, size, group), _cost(back, n * size if back == "broadcast" else size, group)
        busiest = max(up.busiest, down.busiest)  # the master sends on the way back only
        return Cost(up.rounds + down.rounds, busiest, up.total + down.total, up.serial + down.serial)
    message = size // n if operation == "scatter" else size
    one_way = (n - 1) * message
    if operation == "all_reduce":
        return Cost(2 * (n - 1), one_way, 2 * one_way, 2 * one_way)
    return Cost(n - 1, message if operation in ("reduce", "gather") else one_way, one_way, one_way)


master_worker = from_rooted(_cost, _broadcast, _reduce, _gather, _scatter)
