"""Two rings at once, each with half of the data: one sends to the right, the other to the left.

Rounds and bytes are those of one ring. Where links carry both directions at full rate (torus networks, TPU and NVLink
rings), a single ring leaves them half idle, and two rings take half of the time.
"""

import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.algorithm import from_halves
from jaxdist.collectives.algorithms.ring import cost, gather_round, reduce_round
from jaxdist.collectives.group import Array, Group
from jaxdist.collectives.parts import in_own_place, part_at

RIGHT, LEFT = 1, -1


def _halves(parts: Array) -> tuple[Array, Array]:
    """The data of the two rings: [n, m] -> [n, ceil(m/2)] and [n, floor(m/2)]."""
    middle = -(-parts.shape[1] // 2)
    return parts[:, :middle], parts[:, middle:]


def _reduce_parts(parts: Array, group: Group, op: str) -> Array:
    """[n, ...] -> this device's part of the reduction."""
    right, left = _halves(parts.reshape(group.n, -1))

    def round_(step: Array, travelling: tuple[Array, Array]) -> tuple[Array, Array]:
        return (
            reduce_round(step, travelling[0], right, group, op, RIGHT),
            reduce_round(step, travelling[1], left, group, op, LEFT),
        )

    start = part_at(right, group.rank - RIGHT), part_at(left, group.rank - LEFT)
    return jnp.concatenate(lax.fori_loop(0, group.n - 1, round_, start)).reshape(parts.shape[1:])


def _gather_parts(x: Array, group: Group) -> Array:
    """Every device's x: [n, ...]."""
    right, left = (half[0] for half in _halves(x.reshape(1, -1)))

    def round_(step: Array, carry: tuple[tuple[Array, Array], ...]) -> tuple[tuple[Array, Array], ...]:
        return gather_round(step, carry[0], group, RIGHT), gather_round(step, carry[1], group, LEFT)

    start = (in_own_place(right, group), right), (in_own_place(left, group), left)
    (right, _), (left, _) = lax.fori_loop(0, group.n - 1, round_, start)
    return jnp.concatenate([right, left], axis=1).reshape(group.n, *x.shape)


# The ring's cost: one direction of a link carries about half of each round's bytes.
bidirectional_ring = from_halves(cost, _reduce_parts, _gather_parts)
