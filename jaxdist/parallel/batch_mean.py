"""Means over the rows of a batch that is spread over devices, for the losses of users: batch statistics, for example.

`shared_rows` says how `batch_mean` runs in a trace. It is a context of JAX: what `jax.jit` has traced under another
value is not used again.
"""

import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.errors import UserError
from jaxdist.mesh import BATCH_AXES
from jaxdist.precision.policy import accumulation_dtype

SCOPE = "jaxdist.batch_mean"  # the named scope of the operations


class SharedRows(NamedTuple):
    """How `batch_mean` runs.

    axes: the mesh axes that the rows are spread over; () adds up the rows that are at hand.
    samples: the axis of a `vmap` over this device's rows, if a loss is run row by row.
    blank: the means that are zeros instead, in a trace that only asks what depends on what: "" none, "synchronous"
        those over all devices, "every" those of one device too.
    """

    axes: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    blank: str = ""


shared_rows = jax.make_user_context(None)


def batch_mean(
    x: jax.Array, weight: jax.Array | None = None, *, axis: int | tuple[int, ...] = 0, sync: bool = True
) -> jax.Array:
    """The mean of x over the rows of the global microbatch, in at least fp32. For use in a loss of your own.

    All devices get the same mean, and its gradient is exact, so that a model with batch statistics trains alike in
    every layout. It is one sum over the devices in each pass. Outside of a train step it is a plain mean.

    x: [B, ...], this device's rows.
    weight: of each row, [B], or of the leading dims of x, such as a mask. The mean is sum(weight * x) / sum(weight), or
        0 where all weights are 0.
    axis: the dims of x to average over; the rows' must be among them.
    sync: False averages over this device's rows only, as PyTorch's BatchNorm does. Layouts then differ.

    Every device must call it: it is refused in `lax.cond` and `lax.while_loop`.

    >>> images = jnp.ones((8, 4, 4, 3))
    >>> mean = jaxdist.batch_mean(images, axis=(0, 1, 2))  # a mean of each channel
    >>> variance = jaxdist.batch_mean((images - mean) ** 2, axis=(0, 1, 2))
    >>> mean.shape, float(variance.sum())
    ((3,), 0.0)
    """
    rows: SharedRows | None = shared_rows.value
    if rows is None:
        _check_whole()
        rows = SharedRows()
    x = jnp.asarray(x)
    dims = _dims(x.shape, axis, sync=sync)
    wide = accumulation_dtype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.dtype(jnp.float32)
    axes = rows.samples + (rows.axes if sync else ())
    with jax.named_scope(SCOPE):
        if rows.blank == "every" or (rows.blank and sync):
            return jnp.zeros([size for dim, size in enumerate(x.shape) if dim not in dims], wide)
        x = x.astype(wide)
        if weight is None:
            count = float(math.prod(x.shape[dim] for dim in dims) * math.prod(map(lax.axis_size, axes)))
            return _total(x.sum(dims), axes) / count
        weight = jnp.asarray(weight).astype(wide)
        if weight.shape != x.shape[: weight.ndim]:
            raise UserError(
                f"batch_mean: weight has shape {weight.shape}, x {x.shape}; allowed: the leading dims of x, such as"
                f" {x.shape[:1]}"
            )
        weight = jnp.broadcast_to(weight.reshape(weight.shape + (1,) * (x.ndim - weight.ndim)), x.shape)
        total, count = _total(((weight * x).sum(dims), weight.sum(dims)), axes)
        return jnp.where(count != 0, total / jnp.where(count != 0, count, 1), 0)


def _dims(shape: tuple[int, ...], axis: Any, *, sync: bool) -> tuple[int, ...]:
    """The dims of x to average over, from 0. Raises `UserError` for what is no dim of x, and without the rows' dim."""
    given = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    dims = {number + len(shape) if number < 0 else number for number in map(operator.index, given)}
    if not dims <= set(range(len(shape))) or len(dims) < len(given):
        raise UserError(f"batch_mean: axis={axis} of an x of shape {shape}; allowed: its dims, each once")
    if sync and 0 not in dims:
        raise UserError(
            f"batch_mean: axis={axis} leaves out dim 0, the rows, which are spread over devices; allowed: with 0; or"
            " x.mean(axis), which needs no other device"
        )
    return tuple(sorted(dims))


def _check_whole() -> None:
    """Raise `UserError` in a `shard_map` over axes that split a batch, where a mean of these rows is another's."""
    if split := [axis for axis in BATCH_AXES if axis in jax.sharding.get_abstract_mesh().manual_axes]:
        raise UserError(
            f"batch_mean: called in a shard_map over {', '.join(split)} that is not a loss_fn's; allowed: in a loss_fn"
            " given to make_train_step (not in a ModelDef), or outside of any shard_map"
        )


def _total(tree: Any, axes: tuple[str, ...]) -> Any:
    """The sum over devices.

    In a region without the check of varying types, which is where users' losses run, JAX transposes it to a sum over
    devices. That is the derivative: each device holds the gradient of its own copy of the sum, and their sum is the
    gradient of each summand.
    """
    return lax.psum(tree, axes) if axes else tree
