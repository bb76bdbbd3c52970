"""Work that not every stage does, or not in every row of its blocks: in a condition, or computed by all and masked."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import to_varying, varying_axes, zeros_varying_like
from jaxdist.specs import PyTree

Choose = Callable[..., PyTree]  # (predicate, tree if true, tree if false), both as functions of nothing


def typed_like(tree: PyTree, like: PyTree) -> PyTree:
    """The tree, cast to vary over what `like` varies over: both branches of a condition must."""
    return jax.tree.map(lambda leaf, kind: to_varying(leaf, varying_axes(kind)), tree, like)


def by_condition(predicate: jax.Array | bool, yes: Callable[[], PyTree], no: Callable[[], PyTree]) -> PyTree:
    """What one of the two gives; the other is not computed."""
    return lax.cond(jnp.asarray(predicate), yes, no)


def by_mask(predicate: jax.Array | bool, yes: Callable[[], PyTree], no: Callable[[], PyTree]) -> PyTree:
    """The same, after computing both: no collective stands in a condition."""
    return jax.tree.map(lambda a, b: jnp.where(predicate, a, b), yes(), no())


class Packing(NamedTuple):
    """How what is kept goes into buffers and out of branches: as a list of arrays, of which random keys are plain
    integers. The structure is not the same object from trace to trace, so that no carry can have it."""

    treedef: Any
    keys: list[bool]

    def pack(self, saved: PyTree) -> list[jax.Array]:
        """The arrays of what is kept."""
        leaves = zip(jax.tree.leaves(saved), self.keys, strict=True)
        return [jax.random.key_data(leaf) if is_key else leaf for leaf, is_key in leaves]

    def unpack(self, arrays: list[jax.Array]) -> PyTree:
        """The inverse of `pack`."""
        leaves = zip(arrays, self.keys, strict=True)
        return jax.tree.unflatten(
            self.treedef, [jax.random.wrap_key_data(leaf) if is_key else leaf for leaf, is_key in leaves]
        )


def packing_of(saved: PyTree) -> Packing:
    """For trees like this one."""
    leaves, treedef = jax.tree.flatten(saved)
    return Packing(treedef, [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves])


def work_or_pass(
    choose: Choose, predicate: jax.Array, work: Callable[[], tuple[PyTree, PyTree]], passing: PyTree
) -> tuple[PyTree, PyTree]:
    """work() -> (x, rest), or else (passing, zeros). passing: like x."""
    shapes = jax.eval_shape(work)[1]
    packing = packing_of(shapes)
    zeros = to_varying(zeros_varying_like(jax.eval_shape(packing.pack, shapes)), ("pipe",))

    def packed() -> tuple[PyTree, list[jax.Array]]:
        x, rest = work()
        return typed_like((x, packing.pack(rest)), (passing, zeros))

    x, arrays = choose(predicate, packed, lambda: (passing, zeros))
    return x, packing.unpack(arrays)
