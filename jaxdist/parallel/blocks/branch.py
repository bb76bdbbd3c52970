"""Work that only some stages do, or only some rows of stacked blocks: run in a condition, or run by all and masked."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import to_varying, varying_axes, zeros_varying_like
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


class Packing(NamedTuple):
    """A way to carry residuals through loops and conditions: as a list of arrays, with random keys as plain integers.

    Residuals contain functions, which compare unequal after each trace, so that no carry can have their tree structure.

    treedef: of the residuals.
    keys: for each leaf, whether it is a random key.
    """

    treedef: Any
    keys: list[bool]

    def pack(self, saved: PyTree) -> list[jax.Array]:
        """The arrays of these residuals."""
        leaves = zip(jax.tree.leaves(saved), self.keys, strict=True)
        return [jax.random.key_data(leaf) if is_key else leaf for leaf, is_key in leaves]

    def unpack(self, arrays: list[jax.Array]) -> PyTree:
        """The inverse of `pack`."""
        leaves = zip(arrays, self.keys, strict=True)
        return jax.tree.unflatten(
            self.treedef, [jax.random.wrap_key_data(leaf) if is_key else leaf for leaf, is_key in leaves]
        )


def packing_of(saved: PyTree) -> Packing:
    """The packing for residuals like these. Leaves may be ShapeDtypeStructs."""
    leaves, treedef = jax.tree.flatten(saved)
    return Packing(treedef, [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves])


def work_or_pass(
    choose: Choose, predicate: jax.Array, work: Callable[[], tuple[PyTree, PyTree]], passing: PyTree
) -> tuple[PyTree, PyTree]:
    """work() -> (x, rest) if the predicate is true; otherwise (passing, zeros). passing: an array like x."""
    shapes = jax.eval_shape(work)[1]
    packing = packing_of(shapes)
    zeros = to_varying(zeros_varying_like(jax.eval_shape(packing.pack, shapes)), ("pipe",))

    def packed() -> tuple[PyTree, list[jax.Array]]:
        x, rest = work()
        return typed_like((x, packing.pack(rest)), (passing, zeros))

    x, arrays = choose(predicate, packed, lambda: (passing, zeros))
    return x, packing.unpack(arrays)
