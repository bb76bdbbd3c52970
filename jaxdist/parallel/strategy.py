"""The type of a strategy, and the pieces that strategies are made of.

All pieces work on one leaf or one tree and are driven by PartitionSpecs: a leaf whose spec names `fsdp` rests as a
shard. Casts and gathers are `custom_vjp`s with an explicit reduce dtype: a plain cast followed by an all-gather would
transpose to a reduce-scatter in the compute dtype, and sum gradients in bf16.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import active_axes, all_gather, reduce_scatter, to_varying, varying_axes
from jaxdist.config.grad_sync import GradSync
from jaxdist.config.rules.grad_sync import refuse_in_conditions
from jaxdist.mesh import BATCH_LIKE, AnyMesh
from jaxdist.parallel.grad_sync import finish, reduce_late
from jaxdist.precision.policy import Precision
from jaxdist.specs import PyTree, dim_of, is_model, map_named, map_specs, spec_axes, spec_leaves, split_over, unit_specs


class Strategy(NamedTuple):
    """How parameters rest, meet the computation, and come back as gradients.

    place: (shapes, layer specs, mesh) -> specs at rest, for parameters, gradients and optimizer state alike.
    begin: (params at rest, specs, stacked) -> (diff, held), once a step; diff is what the schedule differentiates, held
    is not. stacked: the key of a model's stacked blocks, or None.
    gather: (diff unit, held unit, unit specs) -> usable unit, inside remat; its backward may reduce, and rounds to
    `Precision.reduce`, in which prefetched gradients rest.
    reduce: (grads with respect to diff, residual, specs) -> (grads at rest, residual), once a step. The residual is
    what lossy sums carry from step to step (see `sync`), or ().
    drops: whether what `gather` returns is too large to be kept for the backward pass, which gathers it again. It then
    takes trained parameters from diff, which holds shards, and can be given parts of these.
    leafwise: whether `reduce` sums each leaf by itself, in its own shape, so that it can be given some of the leaves.
    reduce_block: (gradient of one block's diff, specs of the stack) -> the same, with the sums that `reduce` then
    leaves out; None: no sums in the backward pass but those of `gather`. See `overlap`.
    """

    place: Callable[[PyTree, PyTree, AnyMesh], PyTree]
    begin: Callable[[PyTree, PyTree, str | None], tuple[PyTree, PyTree]]
    gather: Callable[[PyTree, PyTree, PyTree], PyTree]
    reduce: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
    drops: bool = False
    leafwise: bool = False
    reduce_block: Callable[[PyTree, PyTree], PyTree] | None = None


def regathers(strategy: Strategy, specs: PyTree) -> bool:
    """Whether the backward pass gathers parameters of this unit again."""
    return strategy.drops and any("fsdp" in spec_axes(spec) for spec in spec_leaves(specs))


class StrategyOptions(NamedTuple):
    """What every strategy is made from. min_shard_bytes: parameters smaller than this, counted for one block, stay
    whole. reshard_after_forward: zero3 gathers again for the backward pass instead of keeping what it gathered.
    prefetch: 1 communicates for one block while another computes, see `prefetch`. pipeline_cond: whether a pipeline's
    stage leaves out what is not its work, by conditions; or computes and discards it: no collective is in a condition.
    """

    precision: Precision
    sync: GradSync = GradSync()
    min_shard_bytes: int = 0
    reshard_after_forward: bool = True
    prefetch: int = 0
    pipeline_cond: bool = True

    @property
    def finish(self) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
        """The sums that are left at the end of a step, as `Strategy.reduce` wants them."""
        return functools.partial(finish, sync=self.sync, reduce_dtype=self.precision.reduce)

    def finish_whole(self, grads: PyTree, residual: PyTree, specs: PyTree) -> tuple[PyTree, PyTree]:
        """`finish` for gradients that are whole where parameters rest as shards: they are reduce-scattered first."""
        shards = reduce_late(grads, specs, sync=self.sync, reduce_dtype=self.precision.reduce)
        return self.finish(shards, residual, specs)


def place_whole(shapes: PyTree, specs: PyTree, mesh: AnyMesh) -> PyTree:
    """Every parameter rests as its layer declares it: a copy on every device of `data` and `fsdp`."""
    return specs


def place_sharded(shapes: PyTree, specs: PyTree, mesh: AnyMesh, *, min_shard_bytes: int) -> PyTree:
    """Add `fsdp` to one dim of every parameter that is large enough and divisible; the others stay whole. A model's
    embedding rests as columns, which `ends` looks up without gathering them."""
    split = functools.partial(split_over, axis="fsdp", mesh=mesh, min_bytes=min_shard_bytes)
    if not is_model(specs):
        return map_specs(split, specs, shapes)
    return {
        name: map_specs(functools.partial(split, columns=name == "embed"), specs[name], shapes[name]) for name in specs
    }


def hold_nothing(tree: PyTree) -> PyTree:
    """The held tree of a strategy that holds nothing: an empty tuple for every leaf."""
    return jax.tree.map(lambda _: (), tree)


def begin_at_rest(params: PyTree, specs: PyTree, stacked: str | None) -> tuple[PyTree, PyTree]:
    """diff is the resting parameters, cast to varying over every batch-like axis; nothing is held.

    Without the cast `jax.grad` would already have summed the gradients over these axes (see `collectives.varying`).
    """
    return to_varying(params, BATCH_LIKE), hold_nothing(params)


class Frozen(NamedTuple):
    """In place of a leaf of diff: a parameter without a gradient."""

    value: jax.Array


def value_of(leaf: jax.Array | Frozen) -> jax.Array:
    """What a leaf of diff holds, apart from its gradient: see `connect`."""
    return leaf.value if isinstance(leaf, Frozen) else lax.stop_gradient(leaf)


def connect(value: jax.Array, leaf: jax.Array | Frozen, dim: int | None, options: StrategyOptions) -> jax.Array:
    """`value`, whose gradient goes to `leaf` of diff, in the parameters' dtype by way of the reduce dtype:
    reduce-scattered over fsdp along `dim`, or whole (None). A frozen leaf gets none.

    What is done to a parameter (cast, gather) stays outside: inside a custom_vjp a remat policy would not see the
    all_gather, and keep what it should drop (see `remat`).
    """
    return value if isinstance(leaf, Frozen) else _connect(value, leaf, dim, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _connect(value: jax.Array, leaf: jax.Array, dim: int | None, options: StrategyOptions) -> jax.Array:
    return value


def _connect_forward(
    value: jax.Array, leaf: jax.Array, dim: int | None, options: StrategyOptions
) -> tuple[jax.Array, None]:
    return value, None


def _check_conditions(options: StrategyOptions) -> None:
    """Raise `UserError` where gradients would be summed by ppermutes in conditions that not all stages take: each waits
    for all devices of the mesh, for ever."""
    if options.pipeline_cond and options.sync.algorithm != "native" and active_axes("pipe"):
        refuse_in_conditions(options.sync.algorithm)


def _connect_backward(dim: int | None, options: StrategyOptions, _: None, grad: jax.Array) -> tuple[None, jax.Array]:
    grad = grad.astype(options.precision.reduce)
    if dim is not None:
        _check_conditions(options)
        grad = reduce_scatter(grad, "fsdp", dim=dim, **options.sync.reduction)
    return None, grad.astype(options.precision.param)


_connect.defvjp(_connect_forward, _connect_backward)


def gather(x: jax.Array, dim: int, precision: Precision) -> jax.Array:
    """A shard over fsdp -> the whole parameter in the dtype that layers receive."""
    return all_gather(x.astype(precision.received), "fsdp", dim=dim)


def cast_leaf(leaf: jax.Array | Frozen, options: StrategyOptions) -> jax.Array:
    """A whole parameter in the dtype that layers receive."""
    return connect(value_of(leaf).astype(options.precision.received), leaf, None, options)


def gather_once(params: PyTree, specs: PyTree, precision: Precision, stacked: str | None) -> PyTree:
    """Whole copies, in the dtype that layers receive, of parameters that rest as shards over fsdp; () for others.

    Stacked blocks one after the other: a gather of their stack would need a second copy of it in transit.
    """

    def unit(specs: PyTree, params: PyTree) -> PyTree:
        def one(spec: P, leaf: jax.Array) -> jax.Array | tuple[()]:
            dim = dim_of(spec, "fsdp")
            return () if dim is None else gather(leaf, dim, precision)

        return map_named(one, specs, params)

    if stacked is None:
        return unit(specs, params)
    of_one, whole = unit_specs(specs), {}
    for name in params:
        with jax.named_scope(name):
            run = functools.partial(unit, of_one[name])
            loop = name == stacked and jax.tree.leaves(params[name])
            whole[name] = lax.map(run, params[name]) if loop else run(params[name])
    return whole


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
