"""Work that only some stages do, or only some rows of stacked blocks: run in a condition, or run by all and masked."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import to_varying, varying_axes
from jaxdist.specs import PyTree

# (predicate, function () -> tree if true, function () -> tree if false) -> tree. Both functions below are one:
#     by_condition(rank("pipe") == 0, lambda: embed(batch), lambda: h)
Choose = Callable[..., PyTree]


def typed_like(tree: PyTree, like: PyTree) -> PyTree:
    """The tree, cast to vary over the mesh axes that `like` varies over: both branches of a condition must."""
    return jax.tree.map(lambda leaf, kind: to_varying(leaf, varying_axes(kind)), tree, like)


def by_condition(predicate: jax.Array | bool, yes: Callable[[], PyTree], no: Callable[[], PyTree]) -> PyTree:
    """yes() or no(), as the predicate says. The other one is not computed."""
    return lax.cond(jnp.asarray(predicate), yes, no)


def by_mask(predicate: jax.Array | bool, yes: Callable[[], PyTree], no: Callable[[], PyTree]) -> PyTree:
    """yes() or no(), as the predicate says. Both are computed, so that no collective is inside a condition."""
    return jax.tree.map(lambda a, b: jnp.where(predicate, a, b), yes(), no())


def pack(saved: PyTree) -> list[jax.Array]:
    """Residuals as a list of arrays, with random keys as plain integers, to go through loops and conditions.

    The tree structure of residuals contains functions. These compare unequal after each trace, and JAX would refuse a
    carry whose structure changes.
    """
    return [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in jax.tree.leaves(saved)]


def unpack(arrays: list[jax.Array], like: PyTree) -> PyTree:
    """The inverse of `pack`. like: residuals of this structure; their leaves may be ShapeDtypeStructs."""
    leaves, treedef = jax.tree.flatten(like)
    pairs = zip(arrays, leaves, strict=True)
    return jax.tree.unflatten(treedef, [jax.random.wrap_key_data(x) if _is_key(leaf) else x for x, leaf in pairs])


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
