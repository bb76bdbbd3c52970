"""`all_reduce`, `reduce_scatter`, `all_gather` over mesh axes, by any algorithm, for use inside `jax.shard_map`."""

from typing import Any

import jax
from jax import lax

from jaxdist import registry
from jaxdist.collectives.algorithm import Algorithm
from jaxdist.collectives.varying import active_axes
from jaxdist.errors import UserError

PyTree = Any
Axes = str | tuple[str, ...]
ALGORITHMS = "jaxdist.collectives.algorithms"


def get_algorithm(name: str) -> Algorithm:
    """The `Algorithm` in `collectives/algorithms/<name>.py`, or at a dotted path."""
    return registry.load(ALGORITHMS, name, key="parallel.grad_sync.algorithm")


def all_reduce(x: PyTree, axis: Axes, *, algorithm: str = "native") -> PyTree:
    """The sum of `x` over `axis` on every device, in the dtype of `x`. Any shape; `x` may be a pytree.

    `native` gives a result typed invariant over the axes with more than one device; hand-written algorithms give a
    result typed varying, which leaves `shard_map` through `claim_replicated`.
    """
    axes = active_axes(axis)
    return jax.tree.map(lambda leaf: get_algorithm(algorithm).all_reduce(leaf, axes) if axes else leaf, x)


def reduce_scatter(x: PyTree, axis: Axes, *, dim: int = 0, algorithm: str = "native") -> PyTree:
    """This device's share of the sum of `x` over `axis`: the rank-th of n equal parts of `dim`.

    Raises `UserError` when `dim` is not divisible by the n devices of the group.
    """
    axes = active_axes(axis)

    def scatter(leaf: jax.Array) -> jax.Array:
        n = lax.axis_size(axes)
        if leaf.shape[dim] % n:
            group = f"{'*'.join(axes)}={n}"
            raise UserError(f"reduce_scatter: dim {dim} of {leaf.shape} is not divisible by {group}; pad it")
        return get_algorithm(algorithm).reduce_scatter(leaf, axes, dim)

    return jax.tree.map(scatter, x) if axes else x


def all_gather(x: PyTree, axis: Axes, *, dim: int = 0, algorithm: str = "native") -> PyTree:
    """The devices' `x` concatenated along `dim`, in rank order: n times as large."""
    axes = active_axes(axis)
    return jax.tree.map(lambda leaf: get_algorithm(algorithm).all_gather(leaf, axes, dim) if axes else leaf, x)
