"""Dropout whose mask depends on what is dropped, never on where: the same in every layout.

Keys come one a sample: fold_in(fold_in(fold_in(seed key, step), global sample), layer); here the site inside the layer
is folded in, and for activations split by heads the global head. Legend: B batch, h local heads.
"""

import jax
import jax.numpy as jnp

from jaxdist.collectives import rank
from jaxdist.nn.sequence_parallel import own_positions, whole_length


def _drop(x: jax.Array, keep: jax.Array, rate: float) -> jax.Array:
    # A product, not a quotient: see `norm._mean`. The factor is chosen, not the result: whether a product by a constant
    # that is chosen afterwards is fused with a sum depends on whether the compiler sees the constant there.
    return x * jnp.where(keep, jnp.asarray(1 / (1 - rate), x.dtype), jnp.zeros((), x.dtype))


def dropout(x: jax.Array, keys_B: jax.Array, *, site: int, rate: float, sequence: bool = False) -> jax.Array:
    """x [B, ...], a whole copy on every device of `tensor`: zero with probability `rate`, else x / (1 - rate).
    sequence: x [B, S / tensor, ...] is this device's positions (`jaxdist.nn.sequence_parallel`); the mask is cut from
    that of the whole."""
    if not rate:
        return x
    shape = (whole_length(x.shape[1]), *x.shape[2:]) if sequence else x.shape[1:]
    keep = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, shape))(keys_B)
    return _drop(x, own_positions(keep, dim=1) if sequence else keep, rate)


def dropout_heads(x: jax.Array, keys_B: jax.Array, *, site: int, rate: float) -> jax.Array:
    """x [B, h, ...], heads split over `tensor`."""
    if not rate:
        return x
    local = x.shape[1]
    heads = rank("tensor") * local + jnp.arange(local, dtype=jnp.int32)

    def mask(key: jax.Array, head: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(jax.random.fold_in(key, site), head), 1 - rate, x.shape[2:])

    keep = jax.vmap(lambda key: jax.vmap(lambda head: mask(key, head))(heads))(keys_B)
    return _drop(x, keep, rate)
