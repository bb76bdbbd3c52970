"""The type of a value inside `jax.shard_map(check_vma=True)`: over which mesh axes it may differ between devices.

"Varying" over an axis: each device holds its own value. "Invariant": provably the same on all. `jax.grad` with respect to
an invariant parameter has already summed over the axis, so a hand-written all-reduce on top would count every device
twice: parameters are cast with `to_varying` first.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

PyTree = Any


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes over which `x` is typed varying (empty outside `shard_map`)."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def to_varying(tree: PyTree, axes: Iterable[str]) -> PyTree:
    """Cast every leaf to varying over `axes`; no communication. Axes that a leaf already varies over are left alone."""
    axes = tuple(axes)

    def cast(leaf: Any) -> Any:
        missing = tuple(axis for axis in axes if axis not in varying_axes(leaf))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def zeros_varying_like(tree: PyTree, dtype: Any = None) -> PyTree:
    """Zeros with the shapes and the varying types of `tree`: initial carries of a scan must have both."""
    return jax.tree.map(lambda leaf: to_varying(jnp.zeros(leaf.shape, dtype or leaf.dtype), varying_axes(leaf)), tree)
