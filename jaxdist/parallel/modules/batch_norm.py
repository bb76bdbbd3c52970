"""Flax's BatchNorm with the statistics of all rows of a microbatch, on whatever device they are.

Ioffe and Szegedy 2015. Flax computes them with `jnp.mean`, which in a step are those of one device's rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.errors import UserError
from jaxdist.parallel.batch_mean import batch_mean


def normalise(
    layer: Any,
    x: jax.Array,
    running: tuple[jax.Array, jax.Array],
    affine: tuple[jax.Array | None, jax.Array | None],
    *,
    use_running: bool,
    mask: jax.Array | None,
    sync: bool,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """(normalised x, running statistics after it).

    layer: a BatchNorm of NNX or Linen, whose fields have the same names
    running: its mean and variance
    affine: its scale and bias
    use_running: whether to normalise by the running statistics, and leave them
    mask: of what counts, like x or to be broadcast to it
    sync: whether the statistics are those of all devices
    """
    if layer.axis_name is not None or layer.axis_index_groups is not None:
        raise UserError(
            f"BatchNorm: axis_name={layer.axis_name!r}, axis_index_groups={layer.axis_index_groups}; allowed: None, as"
            " jaxdist takes the statistics of all devices by itself; sync=False takes those of each device"
        )
    axis = layer.axis if isinstance(layer.axis, tuple | list) else (layer.axis,)
    features = {dim % x.ndim for dim in axis}
    others = tuple(dim for dim in range(x.ndim) if dim not in features)
    spread = lambda leaf: jnp.expand_dims(leaf, others)  # noqa: E731
    mean, variance = running
    if not use_running:
        mean, variance = _statistics(x, others, mask, fast=layer.use_fast_variance, sync=sync)
        pairs = zip(running, (mean, variance), strict=True)
        running = tuple(_moved(old, new, layer.momentum) for old, new in pairs)  # type: ignore[assignment]
    given = [leaf for leaf in (x, *affine) if leaf is not None]
    with jax.numpy_dtype_promotion("standard"):  # statistics are wider than what they normalise
        dtype = layer.dtype or jnp.result_type(*given)
        scale, bias = (None if leaf is None else spread(leaf.reshape(mean.shape)) for leaf in affine)
        factor = lax.rsqrt(spread(variance) + layer.epsilon)
        y = (x - spread(mean)) * (factor if scale is None else factor * scale)
        return (y if bias is None else y + bias).astype(dtype), running


def _statistics(
    x: jax.Array, dims: tuple[int, ...], mask: jax.Array | None, *, fast: bool, sync: bool
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance over these dims. fast: by the mean of squares, which needs one round of sums."""
    weight = None if mask is None else jnp.broadcast_to(mask, x.shape)
    if mask is not None and mask.shape == (x.shape[0],) + (1,) * (x.ndim - 1):
        weight = mask.reshape(-1)  # of rows: one sum of them does for all features
    mean = batch_mean(x, weight, axis=dims, sync=sync)
    wide = x.astype(mean.dtype)
    if fast:
        return mean, jnp.maximum(0, batch_mean(wide * wide, weight, axis=dims, sync=sync) - mean * mean)
    return mean, batch_mean((wide - jnp.expand_dims(mean, dims)) ** 2, weight, axis=dims, sync=sync)


def _moved(old: jax.Array, new: jax.Array, momentum: float) -> jax.Array:
    return (momentum * old.astype(new.dtype) + (1 - momentum) * new).astype(old.dtype)
