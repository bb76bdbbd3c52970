"""Varying types: inside `jax.shard_map(check_vma=True)`, the mesh axes along which a value may differ.

A value is "varying" over an axis if each device has its own, and "invariant" if all provably have the same. `jax.grad`
with respect to an invariant parameter has already summed the gradient over the axis. A hand-written all-reduce on top
would sum a second time, so parameters are cast with `to_varying` first.

An axis of size 1 is off. The functions here neither cast nor communicate over it, and the rank along it is the constant
0, because not every backend removes a reduction over one device. Layouts must not name such an axis either, see
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


def active_axes(axis: str | Iterable[str], *, inside: bool = False) -> tuple[str, ...]:
    """The axes with more than one device, in mesh order. Outside `shard_map` all are off, as for a layer on whole
    arrays. inside: whether it must be inside, or else raises `UserError`, as it does for an axis that is none."""
    axes = tuple(axis) if not isinstance(axis, str) and isinstance(axis, Iterable) else (axis,)
    known = jax.sharding.get_abstract_mesh().manual_axes
    for name in axes if known or inside else ():
        if name not in known:
            allowed = ", ".join(map(str, known)) or f"none here; call it inside jax.shard_map over the axis {name!r}"
            raise UserError(f"axis={name!r}: not an axis of the mesh; allowed: {allowed}")
    # `ppermute` over axes that are not in mesh order is silently wrong on jax 0.10.
    return tuple(name for name in known if name in axes and lax.axis_size(name) > 1)


def rank(axis: str | Iterable[str]) -> jax.Array | int:
    """This device's index along the axes, counted as one axis in mesh order. It is typed varying over them."""
    axes = active_axes(axis)
    return lax.axis_index(axes) if axes else 0


def psum(x: PyTree, axis: str | Iterable[str]) -> PyTree:
    """The sum over the axes, typed invariant. For layers: autodiff knows this reduction's transpose."""
    axes = active_axes(axis)
    return lax.psum(x, axes) if axes else x


def pmax(x: PyTree, axis: str | Iterable[str]) -> PyTree:
    """The maximum over the axes, typed invariant. Not differentiable."""
    axes = active_axes(axis)
    return lax.pmax(x, axes) if axes else x


def to_varying(tree: PyTree, axes: Iterable[str]) -> PyTree:
    """Every leaf cast to varying over `axes`, and those over which it varies already. No communication."""
    axes = active_axes(axes)

    def cast(leaf: Any) -> Any:
        missing = tuple(axis for axis in axes if axis not in varying_axes(leaf))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def zeros_varying_like(tree: PyTree, dtype: Any = None) -> PyTree:
    """Zeros with the shapes and the varying types of `tree`, as the initial carry of a scan needs them."""
    return jax.tree.map(lambda leaf: to_varying(jnp.zeros(leaf.shape, dtype or leaf.dtype), varying_axes(leaf)), tree)
