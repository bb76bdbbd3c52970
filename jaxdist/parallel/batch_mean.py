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
from jaxdist.jaxpr.forbidden import LOCAL_SCOPE, SHARED_SCOPE
from jaxdist.mesh import BATCH_AXES
from jaxdist.precision.policy import accumulation_dtype

SPLIT_AXES = ("data", "fsdp")  # the mesh axes that the rows of a user's loss may be spread over


class SharedRows(NamedTuple):
    """How `batch_mean` runs. The fields from blank on are for traces that only check a loss.

    axes: the mesh axes that the rows are spread over; () adds up the rows that are at hand.
    samples: the axis of a `vmap` over this device's rows, if a loss is run row by row.
    blank: the means that are zeros instead: "" none, "synchronous" those over all devices, "every" those of one device
        too.
    in_rule: whether only rules of custom derivatives are traced.
    axis_size: the size of the mesh axes, where it is not theirs, so that another one is a `jax.vmap`'s; 0 elsewhere.
    """

    axes: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    blank: str = ""
    in_rule: bool = False
    axis_size: int = 0


shared_rows = jax.make_user_context(None)


def batch_mean(
    x: jax.Array, weight: jax.Array | None = None, *, axis: int | tuple[int, ...] | None = 0, sync: bool = True
) -> jax.Array:
    """The mean of x over the rows of the global microbatch, in at least fp32. For use in a loss of your own.

    All devices get the same mean, and its gradient is exact, so that a model with batch statistics trains alike in
    every layout. It is one sum over the devices in each pass. Outside of a train step it is a plain mean.

    x: [B, ...], this device's rows.
    weight: of each row, [B], or of the leading dims of x, such as a mask. The mean is sum(weight * x) / sum(weight), or
        0 where all weights are 0.
    axis: the dims of x to average over, None for all; the rows' must be among them.
    sync: False averages over this device's rows only, as PyTorch's BatchNorm does. Layouts then differ.

    Every device must call it: it is refused in `lax.cond` and `lax.while_loop`, and once a row, as in a `jax.vmap` over
    rows. A loss may not differentiate it itself (`jax.grad` inside of a loss), nor call it in a function with a
    custom_vjp or custom_jvp. All that is allowed with sync=False.

    >>> images = jnp.ones((8, 4, 4, 3))
    >>> mean = jaxdist.batch_mean(images, axis=(0, 1, 2))  # a mean of each channel
    >>> variance = jaxdist.batch_mean((images - mean) ** 2, axis=(0, 1, 2))
    >>> mean.shape, float(variance.sum())
    ((3,), 0.0)
    """
    if isinstance(x, dict):
        raise UserError("batch_mean: x is a dict; allowed: an array; write jax.tree.map(jaxdist.batch_mean, x)")
    rows: SharedRows | None = shared_rows.value
    if sync:
        _check_place(rows)
    rows, x = rows or SharedRows(), jnp.asarray(x)
    dims = _dims(x.shape, axis, sync=sync)
    if jnp.iscomplexobj(x):
        raise UserError(f"batch_mean: x is {x.dtype}; allowed: real numbers; give x.real and x.imag by themselves")
    wide = accumulation_dtype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.dtype(jnp.float32)
    axes = rows.samples + (rows.axes if sync else ())
    with jax.named_scope(SHARED_SCOPE if sync else LOCAL_SCOPE):
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
        spread = weight.reshape(weight.shape + (1,) * (x.ndim - weight.ndim))
        if set(range(weight.ndim)) <= set(dims):  # all entries of the mean have the same weights
            weights = weight.sum() * math.prod(x.shape[dim] for dim in dims if dim >= weight.ndim)
        else:
            weights = jnp.broadcast_to(spread, x.shape).sum(dims)
        total, count = _total(((spread * x).sum(dims), weights), axes)
        return jnp.where(count != 0, total / jnp.where(count != 0, count, 1), 0)


def _dims(shape: tuple[int, ...], axis: Any, *, sync: bool) -> tuple[int, ...]:
    """The dims of x to average over, from 0. Raises `UserError` for what is no dim of x, and without the rows' dim."""
    axis = range(len(shape)) if axis is None else axis
    given = tuple(axis) if isinstance(axis, tuple | list | range) else (axis,)
    dims = {number + len(shape) if number < 0 else number for number in map(operator.index, given)}
    if not dims <= set(range(len(shape))) or len(dims) < len(given):
        raise UserError(f"batch_mean: axis={axis} of an x of shape {shape}; allowed: its dims, each once")
    if sync and 0 not in dims:
        raise UserError(
            f"batch_mean: axis={axis} leaves out dim 0, which must be the rows, spread over devices; allowed: with 0,"
            " after jnp.moveaxis(x, 1, 0) where they are dim 1"
        )
    return tuple(sorted(dims))


def _check_place(rows: SharedRows | None) -> None:
    """Raise `UserError` where a sum over the devices would be another's, or its derivative not be known."""
    if rows is None:
        if split := [axis for axis in BATCH_AXES if axis in jax.sharding.get_abstract_mesh().manual_axes]:
            raise UserError(
                f"batch_mean: called in a shard_map over {', '.join(split)} that is not a loss_fn's; allowed: in a"
                " loss_fn given to make_train_step (not in a ModelDef), or outside of any shard_map"
            )
        return
    if rows.in_rule:
        raise UserError(
            "batch_mean: called in a function with a custom_vjp or custom_jvp, or in its rule, where nothing adds up"
            " the derivatives of all devices; call it outside, and give that function the mean as an argument"
        )
    probed = SPLIT_AXES if rows.axis_size else ()
    if taken := [axis for axis in probed if lax.axis_size(axis) != rows.axis_size]:
        raise UserError(
            f"batch_mean: called in a jax.vmap or pmap with axis_name={taken[0]!r}, which is a mesh axis, so that it"
            " would sum over that axis; give the vmap's another name"
        )


def _total(tree: Any, axes: tuple[str, ...]) -> Any:
    """The sum over devices.

    In a region without the check of varying types, which is where users' losses run, JAX transposes it to a sum over
    devices. That is the derivative: each device holds the gradient of its own copy of the sum, and their sum is the
    gradient of each summand.
    """
    return lax.psum(tree, axes) if axes else tree
