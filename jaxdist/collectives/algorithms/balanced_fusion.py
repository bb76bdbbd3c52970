"""Balanced fusion: every device is a parameter server for exactly 1/n of the fused buffer.

A server gets its part from all workers, sums it, and sends the sum back to all (SageMaker data parallel's balanced
fusion buffers, with servers : workers = 1 : 1). In round k every device sends to the rank k places further on. All
links are busy, and every device sends exactly (n-1)/n N each way. A server adds its own part first, then the others'.
"""

import jax
import jax.numpy as jnp

from jaxdist.collectives.algorithm import COMBINE, Int8Halves, from_halves
from jaxdist.collectives.compression import decode, encode
from jaxdist.collectives.cost import Cost, halves_cost
from jaxdist.collectives.group import Array, Group, shift
from jaxdist.collectives.parts import in_own_place, part_at, put_part
from jaxdist.config.entries import AlgorithmFacts

FACTS = AlgorithmFacts(int8=True)


def _exchange(parts: Array, group: Group) -> Array:
    """An all-to-all: parts[i] goes to rank i. The result [n, ...] is ordered by sender."""
    came = in_own_place(part_at(parts, group.rank), group)
    for k in range(1, group.n):
        arrived = group.permute(part_at(parts, group.rank + k), shift(group.n, k))
        came = put_part(came, arrived, group.rank - k)
    return came


def _serve(parts: Array, group: Group, op: str) -> Array:
    """The reduction of the part that this device serves, from all n parts [n, ...] of each device's buffer."""
    mine = part_at(parts, group.rank)
    for k in range(1, group.n):
        mine = COMBINE[op](mine, group.permute(part_at(parts, group.rank + k), shift(group.n, k)))
    return mine


def _send_back(mine: Array, group: Group) -> Array:
    """An all-gather: every device's served part, [n, ...]."""
    parts = in_own_place(mine, group)
    for k in range(1, group.n):
        arrived = group.permute(mine, shift(group.n, k))
        parts = put_part(parts, arrived, group.rank - k)
    return parts


def _serve_int8(parts: Array, group: Group) -> tuple[Array, Array]:
    """`_serve` for sums, with int8 on the wire (`Int8Halves.reduce_parts`)."""
    size = parts.shape[1]
    codes = jax.vmap(encode)(parts)
    lost = parts - jax.vmap(lambda code: decode(code, size))(codes)
    came = jax.vmap(lambda code: decode(code, size))(_exchange(codes, group))
    came = put_part(came, part_at(parts, group.rank), group.rank)  # its own part does not travel
    return came.sum(0), put_part(lost, jnp.zeros_like(parts[0]), group.rank)


def _cost(operation: str, size: int, group: Group) -> Cost:
    """The ring's rounds and bytes."""
    # For an even n, one of the n-1 rounds each way is an exchange between pairs: a large part if n is 2 or 4.
    return halves_cost(operation, size, group.n, group.n - 1, swap=group.n in (2, 4))


balanced_fusion = from_halves(_cost, _serve, _send_back, all_to_all=_exchange, int8=Int8Halves(_serve_int8, _send_back))
