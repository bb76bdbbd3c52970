"""The type of a value inside `jax.shard_map(check_vma=True)`: over which mesh axes it may differ between devices.

"Varying" over an axis: each device holds its own value. "Invariant": provably the same on all. `jax.grad` with respect
to an invariant parameter has already summed over the axis, so a hand-written all-reduce on top would count every device
twice: parameters are cast with `to_varying` first.

An axis of size 1 is off: the functions here neither cast nor communicate over it, and ranks on it are the constant 0.
(The compiler does not remove a reduction over one device on every backend.) Layouts must then not name it either, see
`specs.without_idle`.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.errors import UserError
from jaxdist.specs import PyTree


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes over which `x` is typed varying (empty outside `shard_map`)."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def active_axes(axis: str | Iterable[str]) -> tuple[str, ...]:
    """The axes with more than one device, in mesh order. Inside `shard_map` only.

    The order matters: `ppermute` over axes that are not in mesh order is silently wrong on jax 0.10.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    known = jax.sharding.get_abstract_mesh().axis_names
    for name in axes:
        if name not in known:
            raise UserError(f"axis={name!r}: not an axis of the mesh; allowed: {', '.join(map(str, known))}")
    return tuple(name for name in known if name in axes and lax.axis_size(name) > 1)


def rank(axis: str | Iterable[str]) -> jax.Array | int:
    """This device's index along the axes, counted as one in mesh order; varying over them."""
    axes = active_axes(axis)
    return lax.axis_index(axes) if axes else 0


def psum(x: PyTree, axis: str | Iterable[str]) -> PyTree:
    """Sum over the axes, typed invariant: for layers, whose reductions autodiff must see through."""
    axes = active_axes(axis)
    return lax.psum(x, axes) if axes else x


def pmax(x: PyTree, axis: str | Iterable[str]) -> PyTree:
    """Maximum over the axes, typed invariant. Not differentiable."""
    axes = active_axes(axis)
    return lax.pmax(x, axes) if axes else x


def to_varying(tree: PyTree, axes: Iterable[str]) -> PyTree:
    """Cast every leaf to varying over `axes`; no communication. Axes that a leaf already varies over are left alone."""
    axes = active_axes(axes)

    def cast(leaf: Any) -> Any:
        missing = tuple(axis for axis in axes if axis not in varying_axes(leaf))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def zeros_varying_like(tree: PyTree, dtype: Any = None) -> PyTree:
    """Zeros with the shapes and the varying types of `tree`: initial carries of a scan must have both."""
    return jax.tree.map(lambda leaf: to_varying(jnp.zeros(leaf.shape, dtype or leaf.dtype), varying_axes(leaf)), tree)
