"""Dropout with the same mask in every layout: masks depend on samples, layers and heads, never on devices.

There is one key a sample: fold_in(fold_in(fold_in(seed key, step), global sample), layer). The functions here fold in
the site inside the layer and, for activations that are split by heads, the global head.

Legend: B batch, h local heads.
"""

import jax
import numpy as np

from jaxdist.collectives import rank
from jaxdist.errors import UserError
from jaxdist.nn.context.dropout_masks import by_head, drop
from jaxdist.nn.context.positions import ContextSplit, context_size, devices_along, own_context
from jaxdist.nn.sequence_parallel import own_positions


def check_rate(rate: float) -> float:
    """The rate of dropout. Raises `UserError` for what is none."""
    if not 0 <= rate < 1:
        raise UserError(f"dropout: {rate}; allowed: a number >= 0 and < 1, the share that is dropped")
    return rate


def unused_keys(rows: int) -> jax.Array:
    """Dropout keys of so many samples, for a model without dropout, which does not read them."""
    return jax.random.split(jax.random.key(0), rows)


def dropout(x: jax.Array, keys_B: jax.Array, *, site: int, rate: float, sequence: bool = False) -> jax.Array:
    """Dropout of x [B, ...], which all devices of `tensor` have: zero with probability `rate`, else x / (1 - rate).

    With `context`, x is this device's positions, and with sequence, its part of these: [B, S / context / tensor, ...].
    The mask is the same as for the whole sequence.
    """
    if not check_rate(rate):
        return x
    parts = context_size() * (devices_along("tensor") if sequence else 1)
    shape = x.shape[1:] if parts == 1 else (x.shape[1] * parts, *x.shape[2:])
    keep = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, shape))(keys_B)
    keep = own_context(keep, dim=1)
    return drop(x, own_positions(keep, dim=1) if sequence else keep, rate)


def dropout_columns(x: jax.Array, keys_B: jax.Array, *, site: int, rate: float) -> jax.Array:
    """Dropout of x [B, ..., D / tensor], whose last dim is split over `tensor`, by the mask of the whole."""
    positions = (x.shape[1] * context_size(), *x.shape[2:-1]) if x.ndim > 2 else ()
    shape = (*positions, x.shape[-1] * devices_along("tensor"))
    keep = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, shape))(keys_B)
    keep = own_context(keep, dim=1) if positions else keep
    return drop(x, own_positions(keep, dim=keep.ndim - 1), rate)


def dropout_heads(
    x: jax.Array, keys_B: jax.Array, *, site: int, rate: float, split: ContextSplit | None = None
) -> jax.Array:
    """Dropout of x [B, h, ...], whose heads are split over `tensor`. split: as for `kept_heads`."""
    return drop(x, kept_heads(x.shape, keys_B, site=site, rate=rate, split=split), rate) if rate else x


def kept_heads(
    shape: tuple[int, ...], keys_B: jax.Array, *, site: int, rate: float, split: ContextSplit | None = None
) -> jax.Array:
    """What `dropout_heads` keeps of an array of this shape, [B, h, ...]: True or False.

    split: what `context` has split: the heads, too, or the queries, which are dim 2. None: nothing, or it is off.
    """
    _, local, *rest = shape
    count = context_size()
    group = rank("tensor") * count + rank("context") if split == "heads" else rank("tensor")
    whole = (rest[0] * count, *rest[1:]) if split == "queries" else tuple(rest)
    keep = by_head(lambda key: jax.random.bernoulli(key, np.float32(1 - rate), whole), keys_B, site, group, local)
    return own_context(keep, dim=2) if split == "queries" else keep
