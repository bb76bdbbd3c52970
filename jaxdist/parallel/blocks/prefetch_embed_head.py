"""Embedding and head of a model whose blocks are `prefetched`: their communication, too, away from the computation that
needs it.

Their tables are the largest parameters of a model with a large vocabulary. Gathered whole, as units, they would have no
computation to hide behind: the embedding's stands before the first block, the head's after the last. So the embedding
does not gather its tables: they rest as columns; every device looks up its columns of all devices' tokens, and an
all-to-all brings each device all columns of its own tokens (tokens x width elements instead of vocabulary x width).
And what the head reads is gathered in as many slices as there are blocks, one beside each block, and its gradient is
reduced in the same slices beside the blocks of the backward pass.

Only under a strategy that gathers what it computes with (`regathers`). Where whole parameters are on the device anyway,
embedding and head are used as they are.
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
from jaxdist.nn import ModelDef
from jaxdist.parallel.strategy import Strategy, regathers
from jaxdist.specs import PyTree, dim_of, map_specs, only

Gather = Callable[[PyTree], PyTree]


class Riders(NamedTuple):
    """What is gathered, and its gradient reduced, a slice beside each block. gather: of slices of diff -> usable
    slices; its backward reduces. dims: the dim that each leaf is cut along. rounds: number of slices."""

    gather: Gather
    dims: PyTree
    rounds: int

    def empty(self, diff: PyTree) -> PyTree:
        """Zeros in the place of what is usable."""
        return zeros_varying_like(jax.eval_shape(self.gather, diff))

    def cut(self, tree: PyTree, i: jax.Array | int) -> PyTree:
        """Slice i of every leaf. Where the rounds do not divide a dim, the last slices share elements."""

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
        """(whole, with slice i gathered; what brings the gradients of that slice back to diff)."""
        found, reduce = jax.vjp(self.gather, self.cut(diff, i))
        return self.paste(whole, i, found), reduce

    def reduce(self, grads: PyTree, i: jax.Array | int, reduce: Callable[..., Any], whole: PyTree) -> PyTree:
        """The gradients, with those of slice i brought back to diff. whole: gradients of what is usable."""
        return self.paste(grads, i, *reduce(self.cut(whole, i)))

    def _place(self, length: int, i: jax.Array | int) -> tuple[jax.Array | int, int]:
        size = -(-length // self.rounds)
        start = jnp.minimum(i * size, length - size) if isinstance(i, jax.Array) else min(i * size, length - size)
        return start, size


def riding_dims(specs: PyTree, diff: PyTree, read: PyTree, rounds: int) -> PyTree:
    """For each leaf the dim that it is cut along, -1 where it does not ride: it is no shard over fsdp, is not trained,
    not read, or has no other dim that is long enough."""

    def one(spec: P, leaf: Any, first: float) -> int:
        shard = dim_of(spec, "fsdp")
        if shard is None or not isinstance(leaf, jax.Array) or math.isinf(first):
            return -1
        others = [dim for dim in range(leaf.ndim) if dim != shard and leaf.shape[dim] >= rounds]
        return max(others, key=lambda dim: leaf.shape[dim], default=-1)

    return map_specs(one, specs, diff, read)


def first_reads(function: Callable[..., Any], tree: PyTree, *arguments: Any) -> PyTree:
    """For each leaf of the tree the number of the first equation of function(tree, *arguments) that reads it; infinity
    where none does."""
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
    """The embedding's unit for a tied head(own, unit, h, batch), which reads a part of it: zeros in the place of the
    others. gather: what is wanted (None: all) -> that of the unit, usable."""
    shapes = jax.eval_shape(lambda: gather(None))
    read = first_reads(lambda unit: head(own, unit, h, batch), shapes)
    wanted = jax.tree.map(math.isfinite, read)
    pick = lambda wanted, found, shape: found if wanted else zeros_varying_like(shape)  # noqa: E731
    return jax.tree.map(pick, wanted, gather(wanted), shapes)


def by_columns(specs: PyTree, shapes: PyTree) -> bool:
    """Whether all parameters of the embedding rest as columns, or can be cut into them."""
    if not active_axes("fsdp"):
        return False

    def fits(spec: P, leaf: Any) -> bool:
        dim, last = dim_of(spec, "fsdp"), len(leaf.shape) - 1
        if dim is None:
            return last >= 0 and leaf.shape[last] % lax.axis_size("fsdp") == 0
        return dim == last and spec[dim] == "fsdp"

    return all(jax.tree.leaves(map_specs(fits, specs, shapes)))


def without_fsdp(specs: PyTree) -> PyTree:
    """The specs of columns that stay where they are."""
    return map_specs(lambda spec: P(*(None if entry == "fsdp" else entry for entry in spec)), specs)


def embed_columns(
    embed: Callable[..., jax.Array], specs: PyTree, params: PyTree, batch: PyTree, keys: PyTree
) -> jax.Array:
    """h [b, S, D] of this device's samples. embed: (params, batch, keys) -> h, which works column by column. params:
    usable columns, or whole leaves where the spec does not name fsdp."""
    n = lax.axis_size("fsdp")

    def own(spec: P, leaf: jax.Array) -> jax.Array:
        if dim_of(spec, "fsdp") is not None:
            return leaf
        width = leaf.shape[-1] // n
        return lax.dynamic_slice_in_dim(leaf, rank("fsdp") * width, width, leaf.ndim - 1)

    columns = map_specs(own, specs, params)
    read = first_reads(lambda batch: embed(columns, batch, keys), batch)
    everybody = jax.tree.map(
        lambda leaf, first: all_gather(leaf, "fsdp", dim=0) if math.isfinite(first) else leaf, batch, read
    )
    h = embed(columns, everybody, keys)
    return all_to_all(h, "fsdp", split_dim=0, concat_dim=h.ndim - 1)


class Ends(NamedTuple):
    """Embedding and head around a prefetched stack. units: specs of units. use: as `program._use`, without its first
    arguments. embed: (diff, held, batch) -> h, where it cannot work by columns. head: (diff, held, h, batch) -> (sum,
    weight), where nothing rides. run: (name, function, *arguments) -> what it returns, as `program._run`."""

    model: ModelDef
    strategy: Strategy
    units: PyTree
    use: Callable[..., PyTree]
    embed: Callable[..., jax.Array]
    head: Callable[..., tuple[jax.Array, jax.Array]]
    run: Callable[..., Any]

    def whole(self, usable: PyTree, h: jax.Array, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        """The head: (sum, weight), from usable units."""
        found: tuple[jax.Array, jax.Array] = self.run(
            "head", self.model.head, usable["head"], usable.get("embed"), h, batch
        )
        return found

    def embedded(self, diff: PyTree, held: PyTree, batch: PyTree) -> jax.Array:
        """h of this device's samples."""
        specs = self.units["embed"]
        columns = without_fsdp(specs)

        def usable() -> PyTree:
            with jax.named_scope("embed"):
                return self.strategy.gather(diff["embed"], held["embed"], columns)

        apart = self.model.columns and regathers(self.strategy, specs)
        if not apart or not by_columns(specs, jax.eval_shape(usable)):
            return self.embed(diff, held, batch)
        embed = functools.partial(self.run, "embed", self.model.embed)
        return embed_columns(embed, specs, usable(), batch, batch["keys"])

    def riders(self, diff: PyTree, held: PyTree, h: jax.Array, batch: PyTree) -> tuple[Riders, PyTree, Any]:
        """(what rides, its diff, (usable units of the head, from what rode) -> (sum, weight) given h)."""
        names = ("head", "embed") if self.model.tied else ("head",)
        units, own, rest = ({name: tree[name] for name in names} for tree in (self.units, diff, held))
        if not regathers(self.strategy, units):
            return Riders(lambda tree: tree, {}, self.model.layers), {}, lambda _, h: self.head(diff, held, h, batch)

        def gather(tree: PyTree, wanted: PyTree) -> PyTree:
            return {name: self.use(name, tree[name], rest[name], wanted[name]) for name in names}

        every = map_specs(lambda _: True, units)
        shapes = jax.eval_shape(lambda: gather(own, every))
        read = first_reads(self.whole, shapes, h, batch)
        dims = riding_dims(units, own, read, self.model.layers)
        ride = jax.tree.map(lambda dim: dim >= 0, dims)
        apart = jax.tree.map(lambda dim, first: dim < 0 and math.isfinite(first), dims, read)
        riders = Riders(lambda tree: gather(tree, ride), only(ride, dims), self.model.layers)

        def head(rode: PyTree, h: jax.Array) -> tuple[jax.Array, jax.Array]:
            def pick(rides: bool, needed: bool, shape: Any, whole: Any, part: Any) -> jax.Array:
                return whole if rides else part if needed else zeros_varying_like(shape)

            usable = jax.tree.map(pick, ride, apart, shapes, rode, gather(own, apart))
            return self.whole(usable, h, batch)

        return riders, only(ride, own), head
