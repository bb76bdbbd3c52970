"""Dropout with the same mask in every layout: masks depend on samples, layers and heads, never on devices.

There is one key a sample: fold_in(fold_in(fold_in(seed key, step), global sample), layer). The functions here fold in
the site inside the layer and, for activations that are split by heads, the global head.

Legend: B batch, h local heads.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry_2x32

from jaxdist.collectives import rank
from jaxdist.nn.context.positions import ContextSplit, context_size, own_context
from jaxdist.nn.sequence_parallel import own_positions


def drop(x: jax.Array, keep: jax.Array, rate: float) -> jax.Array:
    """x / (1 - rate) where it is kept, else zero."""
    # A product, not a quotient: see `norm._mean`. `where` chooses the factor, not the result: XLA fuses a product by a
    # constant with a later sum only where it sees the constant, which would depend on the layout.
    return x * jnp.where(keep, jnp.asarray(1 / (1 - rate), x.dtype), jnp.zeros((), x.dtype))


def dropout(x: jax.Array, keys_B: jax.Array, *, site: int, rate: float, sequence: bool = False) -> jax.Array:
    """Dropout of x [B, ...], which all devices of `tensor` have: zero with probability `rate`, else x / (1 - rate).

    With `context`, x is this device's positions, and with sequence, its part of these: [B, S / context / tensor, ...].
    The mask is the same as for the whole sequence.
    """
    if not rate:
        return x
    parts = context_size() * (lax.axis_size("tensor") if sequence else 1)
    shape = x.shape[1:] if parts == 1 else (x.shape[1] * parts, *x.shape[2:])
    keep = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, shape))(keys_B)
    keep = own_context(keep, dim=1)
    return drop(x, own_positions(keep, dim=1) if sequence else keep, rate)


def dropout_columns(x: jax.Array, keys_B: jax.Array, *, site: int, rate: float) -> jax.Array:
    """Dropout of x [B, ..., D / tensor], whose last dim is split over `tensor`, by the mask of the whole."""
    positions = (x.shape[1] * context_size(), *x.shape[2:-1]) if x.ndim > 2 else ()
    shape = (*positions, x.shape[-1] * lax.axis_size("tensor"))
    keep = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, shape))(keys_B)
    keep = own_context(keep, dim=1) if positions else keep
    return drop(x, own_positions(keep, dim=keep.ndim - 1), rate)


def dropout_heads(
    x: jax.Array, keys_B: jax.Array, *, site: int, rate: float, split: ContextSplit | None = None
) -> jax.Array:
    """Dropout of x [B, h, ...], whose heads are split over `tensor`.

    split: what `context` has split: the heads, too, or the queries, which are dim 2. None: nothing, or it is off.
    """
    if not rate:
        return x
    local, count = x.shape[1], context_size()
    group = rank("tensor") * count + rank("context") if split == "heads" else rank("tensor")
    shape = (x.shape[2] * count, *x.shape[3:]) if split == "queries" else x.shape[2:]
    keep = _by_head(lambda key: jax.random.bernoulli(key, np.float32(1 - rate), shape), keys_B, site, group, local)
    return drop(x, own_context(keep, dim=2) if split == "queries" else keep, rate)


def _by_head(draw: Callable[[jax.Array], jax.Array], keys_B: jax.Array, site: int, group: Any, local: int) -> jax.Array:
    """What is drawn for each sample and head, [B, h, ...]. group: which `local` of all heads these are."""
    heads = group * local + jnp.arange(local, dtype=jnp.int32)
    own_key = lambda key, head: jax.random.fold_in(jax.random.fold_in(key, site), head)  # noqa: E731
    return jax.vmap(lambda key: jax.vmap(lambda head: draw(own_key(key, head)))(heads))(keys_B)


def kept_pairs(
    keys_B: jax.Array, rows: jax.Array, columns: jax.Array, *, length: int, heads: int, site: int, rate: float
) -> jax.Array:
    """Which weights of some pairs of positions `dropout_heads` keeps, [B, h, R, C]. No other pairs are drawn.

    keys_B: of the generator threefry2x32. rows, columns: [R] and [C], integers; of queries and of keys. length: of the
    whole sequence of keys, at most 2^20. heads: how many this device has, h.
    """
    high, low = places_of(rows, columns, length)

    def draw(key: jax.Array) -> jax.Array:
        # The bits that `jax.random.bernoulli` takes for these places of its array; and what it makes of them.
        one, other = jnp.split(threefry_2x32(jax.random.key_data(key), jnp.concatenate([high, low], axis=None)), 2)
        bits = lax.shift_right_logical(one ^ other, jnp.uint32(9)) | jnp.uint32(0x3F800000)
        return lax.bitcast_convert_type(bits.reshape(low.shape), jnp.float32) - jnp.float32(1) < np.float32(1 - rate)

    return _by_head(draw, keys_B, site, rank("tensor"), heads)


def places_of(rows: jax.Array, columns: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """The numbers rows * length + columns, [R, C], of 64 bits in two halves of type uint32: the high, the low."""
    assert 0 < length <= 1 << 20, "the products below fit into 32 bits"
    row, column = rows.astype(jnp.uint32)[:, None], columns.astype(jnp.uint32)
    large = (row >> 10) * np.uint32(length)  # counts 2^10
    small = (row & 1023) * np.uint32(length) + column
    low = (large << 10) + small
    return (large >> 22) + (low < small).astype(jnp.uint32), low
