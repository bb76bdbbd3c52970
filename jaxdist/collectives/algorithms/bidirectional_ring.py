"""Two rings at once, each with half of the data: one sends to the right, the other to the left.

The rounds and bytes of one ring. A link that carries both directions at once moves the same bytes in half of the time
when a single direction leaves it half idle (torus networks; TPU and NVLink rings).
"""

import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.algorithm import Algorithm, Array, cut, join, padded_parts, unpadded
from jaxdist.collectives.algorithms.ring import alone, cost, gather_round, part, reduce_round
from jaxdist.collectives.group import Group

RIGHT, LEFT = 1, -1


def _halves(parts: Array) -> tuple[Array, Array]:
    """[n, m] -> [n, ceil(m/2)] and [n, floor(m/2)]."""
    middle = -(-parts.shape[1] // 2)
    return parts[:, :middle], parts[:, middle:]


def _reduce_parts(parts: Array, group: Group, op: str) -> Array:
    """[n, m] -> [m]."""
    right, left = _halves(parts)

    def round_(step: Array, travelling: tuple[Array, Array]) -> tuple[Array, Array]:
        return (
            reduce_round(step, travelling[0], right, group, op, RIGHT),
            reduce_round(step, travelling[1], left, group, op, LEFT),
        )

    start = part(right, group.rank - RIGHT), part(left, group.rank - LEFT)
    return jnp.concatenate(lax.fori_loop(0, group.n - 1, round_, start))


def _gather_parts(x: Array, group: Group) -> Array:
    """[m] -> [n, m]."""
    right, left = (half[0] for half in _halves(x[None]))

    def round_(step: Array, carry: tuple[tuple[Array, Array], ...]) -> tuple[tuple[Array, Array], ...]:
        return gather_round(step, carry[0], group, RIGHT), gather_round(step, carry[1], group, LEFT)

    start = (alone(right, group), right), (alone(left, group), left)
    (right, _), (left, _) = lax.fori_loop(0, group.n - 1, round_, start)
    return jnp.concatenate([right, left], axis=1)


def _all_reduce(x: Array, group: Group, op: str) -> Array:
    mine = _reduce_parts(padded_parts(x, group.n), group, op)
    return unpadded(_gather_parts(group.rounded(mine), group), x)


def _reduce_scatter(x: Array, group: Group, op: str, dim: int) -> Array:
    parts = cut(x, group.n, dim)
    return _reduce_parts(parts.reshape(group.n, -1), group, op).reshape(parts.shape[1:])


def _all_gather(x: Array, group: Group, dim: int) -> Array:
    return join(_gather_parts(x.ravel(), group).reshape(group.n, *x.shape), dim)


# Rounds and bytes are the ring's; of each round's bytes, one direction of a link sees about half.
bidirectional_ring = Algorithm(cost, _all_reduce, _reduce_scatter, _all_gather)
