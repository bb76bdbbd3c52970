"""The type of a strategy, and the pieces that strategies are made of.

All pieces work on one leaf or one tree and are driven by PartitionSpecs: a leaf whose spec names `fsdp` rests as a
shard. Casts and gathers are `custom_vjp`s with an explicit reduce dtype: a plain cast followed by an all-gather would
transpose to a reduce-scatter in the compute dtype, and sum gradients in bf16.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdist import registry
from jaxdist.collectives import active_axes, all_gather, all_reduce, in_buckets, reduce_scatter, to_varying
from jaxdist.mesh import BATCH_LIKE
from jaxdist.precision import Precision
from jaxdist.specs import claimed_axes, dim_of, entry_axes, from_entries, map_specs, spec_leaves

PyTree = Any


class Strategy(NamedTuple):
    """How parameters rest, meet the computation, and come back as gradients.

    place: (shapes, layer specs, mesh) -> specs at rest, for parameters, gradients and optimizer state alike.
    begin: (params at rest, specs) -> (diff, held), once a step; diff is what the schedule differentiates, held is not.
    gather: (diff unit, held unit, unit specs) -> usable unit, inside remat; its backward may reduce.
    reduce: (grads with respect to diff, specs) -> grads at rest, once a step.
    """

    place: Callable[[PyTree, PyTree, Mesh], PyTree]
    begin: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    gather: Callable[[PyTree, PyTree, PyTree], PyTree]
    reduce: Callable[[PyTree, PyTree], PyTree]


class StrategyOptions(NamedTuple):
    """What every strategy is made from. bucket_bytes: fuse gradients into all-reduces of at most
    this size; a larger leaf goes alone.
    min_shard_bytes: parameters smaller than this, counted for one block, stay whole."""

    precision: Precision
    algorithm: str = "native"
    bucket_bytes: int = 25 * 2**20
    min_shard_bytes: int = 0


def get_strategy(name: str, options: StrategyOptions) -> Strategy:
    """The `Strategy` made by `parallel/strategies/<name>.py`, or by a dotted path."""
    return registry.load("jaxdist.parallel.strategies", name, key="parallel.strategy")(options)


def place_whole(shapes: PyTree, specs: PyTree, mesh: Mesh) -> PyTree:
    """Every parameter rests as its layer declares it: a copy on every device of `data` and `fsdp`."""
    return specs


def place_sharded(shapes: PyTree, specs: PyTree, mesh: Mesh, *, min_shard_bytes: int) -> PyTree:
    """Add `fsdp` to one dim of every parameter that is large enough and divisible; the others stay whole.

    The largest dim that no axis splits yet; where there is none, the largest dim that `fsdp` can split further, as
    ("tensor", "fsdp"). The dim of stacked blocks (`pipe`) is never split: a unit is one block.
    """
    n = mesh.shape["fsdp"]

    def add_fsdp(spec: P, shape: jax.ShapeDtypeStruct) -> P:
        entries = [entry_axes(entry) for entry in spec] + [()] * (len(shape.shape) - len(spec))
        stack_dim = dim_of(spec, "pipe")
        blocks = 1 if stack_dim is None else shape.shape[stack_dim]
        if n == 1 or math.prod(shape.shape) * shape.dtype.itemsize < min_shard_bytes * blocks:
            return P(*spec)
        parts = [math.prod(mesh.shape[axis] for axis in entry) for entry in entries]
        local = [size // part for size, part in zip(shape.shape, parts, strict=True)]
        fits = [dim for dim, size in enumerate(local) if dim != stack_dim and size % n == 0 and size > 0]
        best = max(fits, key=lambda dim: (parts[dim] == 1, local[dim]), default=None)
        if best is None:
            return P(*spec)
        entries[best] = (*entries[best], "fsdp")
        return from_entries(entries)

    return map_specs(add_fsdp, specs, shapes)


def hold_nothing(tree: PyTree) -> PyTree:
    """The held tree of a strategy that holds nothing: an empty tuple for every leaf."""
    return jax.tree.map(lambda _: (), tree)


def begin_at_rest(params: PyTree, specs: PyTree) -> tuple[PyTree, PyTree]:
    """diff is the resting parameters, cast to varying over every batch-like axis; nothing is held.

    Without the cast `jax.grad` would already have summed the gradients over these axes (see `collectives.varying`).
    """
    return to_varying(params, BATCH_LIKE), hold_nothing(params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def cast_leaf(x: jax.Array, precision: Precision) -> jax.Array:
    """A whole parameter in the compute dtype; its gradient comes back through the reduce dtype."""
    return x.astype(precision.compute)


def _cast_forward(x: jax.Array, precision: Precision) -> tuple[jax.Array, None]:
    return x.astype(precision.compute), None


def _cast_backward(precision: Precision, _: None, grad: jax.Array) -> tuple[jax.Array]:
    return (grad.astype(precision.reduce).astype(precision.param),)


cast_leaf.defvjp(_cast_forward, _cast_backward)


def _gather(x: jax.Array, dim: int, precision: Precision) -> jax.Array:
    return all_gather(x.astype(precision.compute), "fsdp", dim=dim)


# The forward rules do not call the functions they belong to: a remat policy would see a custom_vjp_call where the
# all_gather is, and keep what it should drop (see `remat`).
@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_leaf(x: jax.Array, dim: int, precision: Precision, algorithm: str) -> jax.Array:
    """A shard -> the whole parameter in the compute dtype; its gradient is reduce-scattered in the reduce dtype."""
    return _gather(x, dim, precision)


def _gather_forward(x: jax.Array, dim: int, precision: Precision, algorithm: str) -> tuple[jax.Array, None]:
    return _gather(x, dim, precision), None


def _gather_backward(dim: int, precision: Precision, algorithm: str, _: None, grad: jax.Array) -> tuple[jax.Array]:
    shard = reduce_scatter(grad.astype(precision.reduce), "fsdp", dim=dim, algorithm=algorithm)
    return (shard.astype(precision.param),)


gather_leaf.defvjp(_gather_forward, _gather_backward)


def finish(grads: PyTree, specs: PyTree, options: StrategyOptions) -> PyTree:
    """Sum each leaf over the batch-like axes that its spec does not name, in buckets, in the reduce dtype.

    Hybrid sharding, parameters kept whole, and tied embeddings across pipeline stages need no code of their own: what
    is missing is always the sum over the axes over which the leaf is a copy.
    """
    leaves, treedef = jax.tree.flatten(grads)
    axes_of = [active_axes(claimed_axes(spec)) for spec in spec_leaves(specs)]
    for axes in sorted(set(axes_of) - {()}):
        members = [i for i, own in enumerate(axes_of) if own == axes]
        reduced = in_buckets(
            functools.partial(all_reduce, axis=axes, algorithm=options.algorithm),
            [to_varying(leaves[i].astype(options.precision.reduce), axes) for i in members],
            limit=options.bucket_bytes,
        )
        for i, leaf in zip(members, reduced, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)
