"""Sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198): a device works on its own positions only.

This holds between a row-parallel layer and the next column-parallel one, where all devices of `tensor` would compute
the same. The all-reduce after a row-parallel layer becomes a reduce-scatter over positions, and an all-gather stands
before the column-parallel layer: together they send the bytes of the all-reduce. Autodiff transposes one to the other.

Activations are [B, S / tensor, D] and typed varying over `tensor`. Parameters of which all devices have a copy (norms,
biases) are cast with `to_varying`, so that their gradients are summed over `tensor`. If `tensor` is 1, nothing happens.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import active_axes, all_gather, psum, rank, reduce_scatter, to_varying
from jaxdist.nn.matmul.collective import check_positions


def whole_sequence(x_BSD: jax.Array) -> jax.Array:
    """An all-gather of positions: [B, S / tensor, ...] -> [B, S, ...] on every device, typed varying."""
    if not active_axes("tensor"):
        return x_BSD
    whole: jax.Array = all_gather(x_BSD, "tensor", dim=1)
    return whole


def sum_to_positions(x_BSD: jax.Array) -> jax.Array:
    """A reduce-scatter of positions: [B, S, ...] -> the sum over `tensor` at this device's, [B, S / tensor, ...]."""
    if not active_axes("tensor"):
        return x_BSD
    check_positions(x_BSD.shape[1])
    own: jax.Array = reduce_scatter(x_BSD, "tensor", dim=1)
    return own


def own_positions(x: jax.Array, *, dim: int) -> jax.Array:
    """This device's positions of an array that all devices have. dim: the dim of positions."""
    if not active_axes("tensor"):
        return x
    check_positions(x.shape[dim])
    own = x.shape[dim] // lax.axis_size("tensor")
    return lax.dynamic_slice_in_dim(to_varying(x, ("tensor",)), rank("tensor") * own, own, axis=dim)


def first_position(x_BSD: jax.Array) -> jax.Array:
    """The first position of all, [B, D] on every device, from this device's positions [B, S / tensor, D]."""
    first_BD = x_BSD[:, 0]
    return psum(jnp.where(rank("tensor") == 0, first_BD, jnp.zeros_like(first_BD)), "tensor")
