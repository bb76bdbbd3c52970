"""Masks of dropout inside attention: what is drawn for a head, and for some pairs of positions alone.

Legend: B batch, h heads of this device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry_2x32

from jaxdist.collectives import rank
from jaxdist.errors import UserError

MOST_POSITIONS = 1 << 20


def drop(x: jax.Array, keep: jax.Array, rate: float) -> jax.Array:
    """x / (1 - rate) where it is kept, else zero."""
    # A product, not a quotient: see `mean_of_last`. `where` chooses the factor, not the result: XLA fuses a product by
    # a constant with a later sum only where it sees the constant, which would depend on the layout.
    return x * jnp.where(keep, jnp.asarray(1 / (1 - rate), x.dtype), jnp.zeros((), x.dtype))


def by_head(draw: Callable[[jax.Array], jax.Array], keys_B: jax.Array, site: int, group: Any, local: int) -> jax.Array:
    """What is drawn for each sample and head of this device, [B, h, ...]. Its heads are those from group * local on."""
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
    if length > MOST_POSITIONS:
        raise UserError(  # the products of `places_of` would not fit into 32 bits
            f"dropout: a ring draws masks of at most {MOST_POSITIONS} positions, and the sequence has {length}; allowed"
            " here: context all_to_all or gather, or dropout=0 (model.dropout, which model.from may have read)"
        )
    if not jax.config.jax_threefry_partitionable:
        raise UserError(
            "dropout: a ring draws parts of masks, which jax_threefry_partitionable=False (JAX_THREEFRY_PARTITIONABLE)"
            " does not allow; allowed: True, jax's default; or context all_to_all or gather; or dropout=0"
        )
    high, low = places_of(rows, columns, length)

    def draw(key: jax.Array) -> jax.Array:
        # The bits that `jax.random.bernoulli` takes for these places of its array; and what it makes of them.
        one, other = jnp.split(threefry_2x32(jax.random.key_data(key), jnp.concatenate([high, low], axis=None)), 2)
        bits = lax.shift_right_logical(one ^ other, jnp.uint32(9)) | jnp.uint32(0x3F800000)
        return lax.bitcast_convert_type(bits.reshape(low.shape), jnp.float32) - jnp.float32(1) < np.float32(1 - rate)

    return by_head(draw, keys_B, site, rank("tensor"), heads)


def places_of(rows: jax.Array, columns: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """The numbers rows * length + columns, [R, C], of 64 bits in two halves of type uint32: the high, the low."""
    row, column = rows.astype(jnp.uint32)[:, None], columns.astype(jnp.uint32)
    large = (row >> 10) * np.uint32(length)  # counts 2^10
    small = (row & 1023) * np.uint32(length) + column
    low = (large << 10) + small
    return (large >> 22) + (low < small).astype(jnp.uint32), low
