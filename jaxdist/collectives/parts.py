"""Arrays cut into n equal parts, one for each rank of a group: [n, ...]."""

import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.group import Array, Group
from jaxdist.collectives.varying import zeros_varying_like


def cut_parts(x: Array, n: int, dim: int) -> Array:
    """x as n equal parts of `dim`: [..., n * k, ...] -> [n, ..., k, ...]."""
    parts = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    return jnp.moveaxis(parts, dim, 0)


def join_parts(parts: Array, dim: int) -> Array:
    """The inverse of `cut_parts`."""
    x = jnp.moveaxis(parts, 0, dim)
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])


def padded_parts(x: Array, n: int) -> Array:
    """x, flattened, as n equal parts [n, ceil(size / n)], with zeros at the end."""
    return jnp.pad(x.ravel(), (0, -x.size % n)).reshape(n, -1)


def unpadded(parts: Array, like: Array) -> Array:
    """The inverse of `padded_parts`. The result has the shape of `like`."""
    return parts.ravel()[: like.size].reshape(like.shape)


def part_at(parts: Array, index: Array) -> Array:
    """parts[index mod n]."""
    return lax.dynamic_index_in_dim(parts, index % parts.shape[0], keepdims=False)


def put_part(parts: Array, value: Array, index: Array) -> Array:
    """parts with parts[index mod n] replaced."""
    return lax.dynamic_update_index_in_dim(parts, value, index % parts.shape[0], 0)


def in_own_place(x: Array, group: Group) -> Array:
    """[n, ...] with x in this device's place and zeros elsewhere."""
    return put_part(zeros_varying_like(jnp.broadcast_to(x, (group.n, *x.shape))), x, group.rank)
