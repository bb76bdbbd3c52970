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
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdist import registry
from jaxdist.collectives import all_gather, reduce_scatter, to_varying, varying_axes
from jaxdist.mesh import BATCH_LIKE
from jaxdist.parallel.sync import GradSync, finish, reduce_late
from jaxdist.precision import Precision
from jaxdist.specs import dim_of, entry_axes, from_entries, is_model, map_specs, unit_specs

PyTree = Any


class Strategy(NamedTuple):
    """How parameters rest, meet the computation, and come back as gradients.

    place: (shapes, layer specs, mesh) -> specs at rest, for parameters, gradients and optimizer state alike.
    begin: (params at rest, specs) -> (diff, held), once a step; diff is what the schedule differentiates, held is not.
    gather: (diff unit, held unit, unit specs) -> usable unit, inside remat; its backward may reduce.
    reduce: (grads with respect to diff, residual, specs) -> (grads at rest, residual), once a step. The residual is
    what lossy sums carry from step to step (see `sync`), or ().
    drops: whether what `gather` returns is too large to be kept for the backward pass, which gathers it again.
    """

    place: Callable[[PyTree, PyTree, Mesh], PyTree]
    begin: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    gather: Callable[[PyTree, PyTree, PyTree], PyTree]
    reduce: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
    drops: bool = False


class StrategyOptions(NamedTuple):
    """What every strategy is made from. min_shard_bytes: parameters smaller than this, counted for one block, stay
    whole."""

    precision: Precision
    sync: GradSync = GradSync()
    min_shard_bytes: int = 0

    @property
    def finish(self) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
        """The sums that are left at the end of a step, as `Strategy.reduce` wants them."""
        return functools.partial(finish, sync=self.sync, reduce_dtype=self.precision.reduce)

    def finish_whole(self, grads: PyTree, residual: PyTree, specs: PyTree) -> tuple[PyTree, PyTree]:
        """`finish` for gradients that are whole where parameters rest as shards: they are reduce-scattered first."""
        shards = reduce_late(grads, specs, sync=self.sync, reduce_dtype=self.precision.reduce)
        return self.finish(shards, residual, specs)


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
def gather_leaf(x: jax.Array, dim: int, precision: Precision, sync: GradSync) -> jax.Array:
    """A shard -> the whole parameter in the compute dtype; its gradient is reduce-scattered in the reduce dtype."""
    return _gather(x, dim, precision)


def _gather_forward(x: jax.Array, dim: int, precision: Precision, sync: GradSync) -> tuple[jax.Array, None]:
    return _gather(x, dim, precision), None


def _gather_backward(dim: int, precision: Precision, sync: GradSync, _: None, grad: jax.Array) -> tuple[jax.Array]:
    shard = reduce_scatter(grad.astype(precision.reduce), "fsdp", dim=dim, **sync.reduction)
    return (shard.astype(precision.param),)


gather_leaf.defvjp(_gather_forward, _gather_backward)


def gather_once(params: PyTree, specs: PyTree, precision: Precision) -> PyTree:
    """Whole copies in the compute dtype of the parameters that rest as shards over fsdp; () for the others.

    Blocks one after the other: a gather of their stack would need a second copy of it in transit.
    """

    def unit(specs: PyTree, params: PyTree) -> PyTree:
        def one(spec: P, leaf: jax.Array) -> jax.Array | tuple[()]:
            dim = dim_of(spec, "fsdp")
            return () if dim is None else _gather(leaf, dim, precision)

        return map_specs(one, specs, params)

    if not is_model(params):
        return unit(specs, params)
    of_one = unit_specs(specs)
    blocks = lax.map(functools.partial(unit, of_one["blocks"]), params["blocks"])
    return {**{name: unit(of_one[name], params[name]) for name in ("embed", "head")}, "blocks": blocks}


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def use_copy(diff: jax.Array, copy: jax.Array, dim: int | None, precision: Precision, sync: GradSync) -> jax.Array:
    """The copy of a parameter that was gathered before. Its gradient goes to `diff`, which is not looked at:
    reduce-scattered along `dim`, or whole (None)."""
    return copy


def _copy_forward(
    diff: jax.Array, copy: jax.Array, dim: int | None, precision: Precision, sync: GradSync
) -> tuple[jax.Array, None]:
    return copy, None


def _copy_backward(
    dim: int | None, precision: Precision, sync: GradSync, _: None, grad: jax.Array
) -> tuple[jax.Array, None]:
    if dim is None:
        return *_cast_backward(precision, None, grad), None
    return *_gather_backward(dim, precision, sync, None, grad), None


use_copy.defvjp(_copy_forward, _copy_backward)


def make_taps(params: PyTree, specs: PyTree) -> PyTree:
    """Zeros in the shape of the whole parameter in place of each shard over fsdp: what gradients are taken by where
    they stay whole. Other parameters as they are."""

    def one(spec: P, leaf: jax.Array) -> jax.Array:
        dim = dim_of(spec, "fsdp")
        if dim is None:
            return leaf
        shape = (*leaf.shape[:dim], leaf.shape[dim] * lax.axis_size("fsdp"), *leaf.shape[dim + 1 :])
        return to_varying(jnp.zeros(shape, leaf.dtype), varying_axes(leaf))

    return map_specs(one, specs, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def gather_tapped(tap: jax.Array, shard: jax.Array, dim: int, precision: Precision) -> jax.Array:
    """Like `gather_leaf`, but the gradient stays whole and goes to `tap`, a zero that is not looked at: for sums over
    microbatches that must come before the sum over devices."""
    return _gather(shard, dim, precision)


def _tapped_forward(tap: jax.Array, shard: jax.Array, dim: int, precision: Precision) -> tuple[jax.Array, jax.Array]:
    return _gather(shard, dim, precision), shard


def _tapped_backward(dim: int, precision: Precision, shard: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    return grad.astype(precision.reduce).astype(precision.param), jnp.zeros_like(shard)


gather_tapped.defvjp(_tapped_forward, _tapped_backward)
