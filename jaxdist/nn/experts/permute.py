"""Rows of tokens brought to places of experts, and back. Both ways, and in both backward passes, rows are only read by
an index: a scatter of wide rows, which is slow on GPUs and adds in no fixed order, never happens.

Legend: N groups, g tokens of a group, k choices of a token, R = g k choices of a group, M places, D width.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.collectives import to_varying, varying_axes
from jaxdist.precision.policy import accumulation_dtype


def sources(slot_NR: jax.Array, places: int) -> jax.Array:
    """[N, M] the choice in each place, R for an empty one. slot_NR: the place of each choice; `places` for none."""
    choices = slot_NR.shape[1]
    numbers = jnp.arange(choices, dtype=jnp.int32)
    empty = jnp.full((len(slot_NR), places + 1), choices, jnp.int32)
    fill = jax.vmap(lambda row, slot: row.at[slot].set(numbers))  # of integers alone
    return fill(to_varying(empty, varying_axes(slot_NR)), slot_NR)[:, :-1]


def _read(rows_NXD: jax.Array, index_NY: jax.Array) -> jax.Array:
    """[N, Y, D] the rows at an index, and zeros where the index is X."""
    count = rows_NXD.shape[1]
    found = jnp.take_along_axis(rows_NXD, jnp.minimum(index_NY, count - 1)[..., None], axis=1, mode="clip")
    return jnp.where((index_NY < count)[..., None], found, jnp.zeros((), found.dtype))


@jax.custom_vjp
def dispatch(x_NgD: jax.Array, slot_NR: jax.Array, source_NM: jax.Array) -> jax.Array:
    """[N, M, D] the token in each place, zeros in empty ones. slot, source: see `sources`."""
    (_, g, _), choices = x_NgD.shape, slot_NR.shape[1]
    token = jnp.where(source_NM < choices, source_NM // (choices // g), g)
    return _read(x_NgD, token)


def _dispatch_forward(x_NgD: jax.Array, slot_NR: jax.Array, source_NM: jax.Array) -> tuple[jax.Array, Any]:
    return dispatch(x_NgD, slot_NR, source_NM), (slot_NR, x_NgD[:, :, :0])


def _dispatch_backward(kept: tuple[jax.Array, jax.Array], grad_NMD: jax.Array) -> tuple[jax.Array, None, None]:
    slot_NR, like = kept
    N, g, _ = like.shape
    each = _read(grad_NMD, slot_NR).reshape(N, g, -1, grad_NMD.shape[-1])
    return each.sum(2, dtype=accumulation_dtype(each.dtype)).astype(each.dtype), None, None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def collect(rows_NMD: jax.Array, slot_NR: jax.Array, source_NM: jax.Array) -> jax.Array:
    """[N, R, D] the row of each choice, zeros for a choice without a place: the inverse of `dispatch`."""
    return _read(rows_NMD, slot_NR)


collect.defvjp(
    lambda rows, slot, source: (collect(rows, slot, source), source),
    lambda source, grad: (_read(grad, source), None, None),
)
