"""Sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198): between a row-parallel layer and the next
column-parallel one, where all devices of `tensor` would compute the same, each has the positions of its rank.

The all-reduce at the end of a pair becomes a reduce-scatter over positions, and a pair begins with an all-gather: the
bytes of an all-reduce together. Autodiff transposes one to the other. Activations are [B, S / tensor, D] and typed
varying over `tensor`, so that gradients of parameters which all devices have (norms, biases) are summed over it: see
`to_varying` in `norm` and `linear`. Without `tensor` in the mesh nothing happens.
"""

import jax
from jax import lax

from jaxdist.collectives import active_axes, rank, to_varying
from jaxdist.nn.matmul.collective import check_positions


def whole_sequence(x_BSD: jax.Array) -> jax.Array:
    """[B, S / tensor, ...] -> [B, S, ...] on every device, typed varying."""
    if not active_axes("tensor"):
        return x_BSD
    return lax.all_gather(x_BSD, "tensor", axis=1, tiled=True)


def sum_to_positions(x_BSD: jax.Array) -> jax.Array:
    """The sum over `tensor` of summands [B, S, ...]; each device gets its positions, [B, S / tensor, ...]."""
    if not active_axes("tensor"):
        return x_BSD
    check_positions(x_BSD.shape[1])
    return lax.psum_scatter(to_varying(x_BSD, ("tensor",)), "tensor", scatter_dimension=1, tiled=True)


def own_positions(x: jax.Array, *, dim: int) -> jax.Array:
    """This device's positions of what all devices have whole."""
    if not active_axes("tensor"):
        return x
    check_positions(x.shape[dim])
    own = x.shape[dim] // lax.axis_size("tensor")
    return lax.dynamic_slice_in_dim(to_varying(x, ("tensor",)), rank("tensor") * own, own, axis=dim)


def whole_length(own: int) -> int:
    """Positions of the sequence, from those of a device."""
    return own * lax.axis_size("tensor") if active_axes("tensor") else own
