"""Embedding and head around prefetched blocks: their communication, too, runs beside computation.

With a large vocabulary their tables are the largest parameters of a model. Gathered whole, they would have no
computation to run beside: the embedding comes before the first block, the head after the last.

- The embedding is not gathered. Its parameters are sharded by columns: every device looks up its columns of the tokens
  of all devices, and an all-to-all brings each device all columns of its own tokens. That sends tokens x width elements
  instead of vocabulary x width.
- The head's parameters are gathered in as many slices as there are blocks, one slice beside each block. Their gradients
  are reduced in the same slices beside the blocks of the backward pass.

Both are for strategies that gather parameters at each use (`regathers`). Other strategies have whole parameters on
every device, and use embedding and head as they are.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import active_axes, all_gather, all_to_all, rank, zeros_varying_like
from jaxdist.jaxpr.walk import equations
from jaxdist.parallel.strategy import regathers
from jaxdist.parallel.units import Units
from jaxdist.specs import PyTree, entry_axes, map_specs, only, shard_of

LOOKED_UP_OVER = ("fsdp", "expert")  # each device of these axes has samples of its own


class HeadSlices(NamedTuple):
    """Parameters of the head in slices, of which each is gathered beside a block, and its gradient reduced beside one.

    gather: slices of diff -> slices ready for use. Its backward pass reduces gradients. For example:
        lambda slices: jax.tree.map(lambda leaf: all_gather(leaf, "fsdp", dim=0), slices)
    dims: the dim that each leaf is cut along.
    rounds: the number of slices.
    """

    gather: Callable[[PyTree], PyTree]
    dims: PyTree
    rounds: int

    def empty(self, diff: PyTree) -> PyTree:
        """Zeros in the place of the whole parameters."""
        return zeros_varying_like(jax.eval_shape(self.gather, diff))

    def cut(self, tree: PyTree, i: jax.Array | int) -> PyTree:
        """Slice i of every leaf. If `rounds` does not divide a dim, the last slices share elements."""

        def one(dim: int, leaf: jax.Array) -> jax.Array:
            start, size = self._place(leaf.shape[dim], i)
            return lax.dynamic_slice_in_dim(leaf, start, size, dim)

        return jax.tree.map(one, self.dims, tree)

    def paste(self, tree: PyTree, i: jax.Array | int, slices: PyTree) -> PyTree:
        """The tree with these as slice i, in its dtypes."""

        def one(dim: int, leaf: jax.Array, new: jax.Array) -> jax.Array:
            start, _ = self._place(leaf.shape[dim], i)
            return lax.dynamic_update_slice_in_dim(leaf, new.astype(leaf.dtype), start, dim)

        return jax.tree.map(one, self.dims, tree, slices)

    def fetch(self, diff: PyTree, whole: PyTree, i: jax.Array | int) -> tuple[PyTree, Callable[..., Any]]:
        """(whole parameters, with slice i gathered; function that reduces the gradients of that slice)."""
        found, reduce = jax.vjp(self.gather, self.cut(diff, i))
        return self.paste(whole, i, found), reduce

    def reduce(self, grads: PyTree, i: jax.Array | int, reduce: Callable[..., Any], whole: PyTree) -> PyTree:
        """The gradients with respect to diff, with slice i reduced. whole: gradients of the whole parameters."""
        return self.paste(grads, i, *reduce(self.cut(whole, i)))

    def _place(self, length: int, i: jax.Array | int) -> tuple[jax.Array | int, int]:
        size = -(-length // self.rounds)
        start = jnp.minimum(i * size, length - size) if isinstance(i, jax.Array) else min(i * size, length - size)
        return start, size


def dims_of_slices(specs: PyTree, diff: PyTree, read: PyTree, rounds: int) -> PyTree:
    """For each leaf the dim that it is cut along; -1 for a leaf without slices.

    Such a leaf is no shard, is not trained, is not read, or has no other dim that is long enough.
    """

    def one(spec: P, leaf: Any, first: float) -> int:
        shard = shard_of(spec)
        if shard is None or not isinstance(leaf, jax.Array) or math.isinf(first):
            return -1
        others = [dim for dim in range(leaf.ndim) if dim != shard.dim and leaf.shape[dim] >= rounds]
        return max(others, key=lambda dim: leaf.shape[dim], default=-1)

    return map_specs(one, specs, diff, read)


def first_reads(function: Callable[..., Any], tree: PyTree, *arguments: Any) -> PyTree:
    """For each leaf the number of the first equation of function(tree, *arguments) that reads it; infinity if none
    does."""
    leaves, treedef = jax.tree.flatten(tree)
    traced = jax.make_jaxpr(lambda leaves: function(jax.tree.unflatten(treedef, leaves), *arguments))(leaves).jaxpr
    first: dict[Any, float] = {}
    for i, variables in enumerate([*(equation.invars for equation in equations(traced)), traced.outvars]):
        for var in variables:
            if not isinstance(var, Literal):
                first.setdefault(var, i)
    return jax.tree.unflatten(treedef, [first.get(var, math.inf) for var in traced.invars])


def only_read(
    gather: Callable[[PyTree | None], PyTree], head: Callable[..., Any], own: PyTree, h: jax.Array, batch: PyTree
) -> PyTree:
    """The embedding's parameters that a tied head(own, embedding, h, batch) reads, and zeros in place of the others.

    gather: which parameters are wanted, or None for all -> these parameters, ready for use.
    """
    shapes = jax.eval_shape(lambda: gather(None))
    read = first_reads(lambda unit: head(own, unit, h, batch), shapes)
    wanted = jax.tree.map(math.isfinite, read)
    pick = lambda wanted, found, shape: found if wanted else zeros_varying_like(shape)  # noqa: E731
    return jax.tree.map(pick, wanted, gather(wanted), shapes)


def by_columns(specs: PyTree, shapes: PyTree) -> bool:
    """Whether all parameters of the embedding are sharded by columns, or can be.

    Not with `context`: its devices look up other positions of the same samples.
    """
    axes = active_axes(LOOKED_UP_OVER)
    if not axes or active_axes("context"):
        return False

    def fits(spec: P, leaf: Any) -> bool:
        shard, last = shard_of(spec), len(leaf.shape) - 1
        if shard is None:
            return last >= 0 and leaf.shape[last] % lax.axis_size(axes) == 0
        return shard.dim == last and active_axes(entry_axes(spec[last])) == axes

    return all(jax.tree.leaves(map_specs(fits, specs, shapes)))


def without_shards(specs: PyTree) -> PyTree:
    """The specs without the shards of a strategy: columns that are not gathered."""

    def one(spec: P) -> P:
        shard = shard_of(spec)
        return spec if shard is None else P(*(None if dim == shard.dim else entry for dim, entry in enumerate(spec)))

    return map_specs(one, specs)


def embed_columns(
    embed: Callable[..., jax.Array], specs: PyTree, params: PyTree, batch: PyTree, keys: PyTree
) -> jax.Array:
    """h [b, S, D] of this device's samples.

    embed: (params, batch, keys) -> h, where each column of h depends on the same column of the parameters.
    params: columns ready for use; whole leaves where a strategy has not split them.
    """
    axes = active_axes(LOOKED_UP_OVER)

    def own(spec: P, leaf: jax.Array) -> jax.Array:
        if shard_of(spec) is not None:
            return leaf
        width = leaf.shape[-1] // lax.axis_size(axes)
        return lax.dynamic_slice_in_dim(leaf, rank(axes) * width, width, leaf.ndim - 1)

    columns = map_specs(own, specs, params)
    read = first_reads(lambda batch: embed(columns, batch, keys), batch)
    everybody = jax.tree.map(
        lambda leaf, first: all_gather(leaf, axes, dim=0) if math.isfinite(first) else leaf, batch, read
    )
    h = embed(columns, everybody, keys)
    return all_to_all(h, axes, split_dim=0, concat_dim=h.ndim - 1)


def embed_ahead(
    units: Units, embed: Callable[..., jax.Array], diff: PyTree, captured: PyTree, batch: PyTree
) -> jax.Array:
    """h of this device's samples, by columns where the embedding can.

    embed: (diff, captured, batch) -> h, for one that cannot.
    diff, captured: of the embedding.
    """
    specs = units.specs["embed"]
    columns = without_shards(specs)

    def usable() -> PyTree:
        with jax.named_scope("embed"):
            return units.strategy.gather(diff, captured, columns)

    apart = units.model.columns and regathers(units.strategy, specs)
    if not apart or not by_columns(specs, jax.eval_shape(usable)):
        return embed(diff, captured, batch)
    run = functools.partial(units.run, "embed", units.model.embed)
    return embed_columns(run, specs, usable(), batch, batch["keys"])


def slice_head(
    units: Units, head: Callable[..., Any], diff: PyTree, captured: PyTree, h: jax.Array, batch: PyTree
) -> tuple[HeadSlices, PyTree, Callable[[PyTree, jax.Array], Any]]:
    """(the head's slices, their diff, function (gathered slices, h) -> (loss sum, weight sum)).

    head: (diff, captured, h, batch) -> (loss sum, weight sum), for a head without slices.
    """
    names, rounds = units.head_units, units.model.layers
    specs, own, rest = ({name: tree[name] for name in names} for tree in (units.specs, diff, captured))
    if not regathers(units.strategy, specs):
        return HeadSlices(lambda tree: tree, {}, rounds), {}, lambda _, h: head(diff, captured, h, batch)

    def gather(tree: PyTree, wanted: PyTree) -> PyTree:
        return {name: units.gather(name, tree[name], rest[name], wanted[name]) for name in names}

    def loss(usable: PyTree, h: jax.Array, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        return units.run_head(usable["head"], usable.get("embed"), h, batch)

    every = map_specs(lambda _: True, specs)
    shapes = jax.eval_shape(lambda: gather(own, every))
    read = first_reads(loss, shapes, h, batch)
    dims = dims_of_slices(specs, own, read, rounds)
    cut = jax.tree.map(lambda dim: dim >= 0, dims)
    apart = jax.tree.map(lambda dim, first: dim < 0 and math.isfinite(first), dims, read)
    slices = HeadSlices(lambda tree: gather(tree, cut), only(cut, dims), rounds)

    def loss_after(whole: PyTree, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        def pick(is_cut: bool, needed: bool, shape: Any, whole: Any, part: Any) -> jax.Array:
            return whole if is_cut else part if needed else zeros_varying_like(shape)

        usable = jax.tree.map(pick, cut, apart, shapes, whole, gather(own, apart))
        return loss(usable, h, batch)

    return slices, only(cut, own), loss_after
