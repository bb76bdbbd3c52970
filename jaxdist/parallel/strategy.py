"""The type of a strategy, and the pieces that strategies are made of.

Every piece works on one parameter or one tree, and reads PartitionSpecs: `specs.shard_of` tells a shard.
Casts and gathers are `custom_vjp`s with an explicit reduce dtype. A plain cast followed by an all-gather would
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
from jaxdist.config.rules.grad_sync import refuse_in_conditions
from jaxdist.mesh import BATCH_LIKE, AnyMesh
from jaxdist.parallel.options import StrategyOptions
from jaxdist.specs import PyTree, Shard, has_shards, map_named, map_specs, shard_of, unit_specs


class Strategy(NamedTuple):
    """How parameters are stored, reach the computation, and come back as gradients.

    place: (shapes, layer specs, mesh) -> specs of parameters, gradients and optimizer state.
    begin: (stored parameters, specs, stacked) -> (diff, captured), once a step. The schedule differentiates diff, and
    not captured. stacked: the key of a model's stacked blocks, or None.
    gather: (diff of a unit, captured of a unit, unit specs) -> the unit as layers use it. Runs inside remat; its
    backward pass may reduce-scatter, and rounds to `Precision.reduce`, the dtype of prefetched gradients.
    reduce: (gradients with respect to diff, residual, specs) -> (gradients like the stored parameters, residual), once
    a step. The residual is what lossy sums carry from step to step (`grad_sync`), or ().
    drops: whether gathered units are too large to be kept for the backward pass, which gathers them again. Trained
    parameters are then shards in diff, and `gather` can be given parts of these.
    leafwise: whether `reduce` sums each leaf by itself, in its own shape, and can be given some of the leaves.
    reduce_block: (gradients of one block's diff, specs of the stack) -> the same, summed; `reduce` then leaves those
    sums out. None: the backward pass has no sums but those of `gather`. See `wrappers.reduce_in_backward`.

    Example, plain data parallelism without casts:

        Strategy(
            place=lambda shapes, specs, mesh: specs,
            begin=lambda params, specs, stacked: (to_varying(params, BATCH_LIKE), capture_nothing(params)),
            gather=lambda diff, captured, specs: diff,
            reduce=options.finish,
        )

    A name stands for one of `jaxdist.parallel.strategies`, or your own:

    >>> from jaxdist.parallel.strategies.zero3 import zero3
    >>> strategy = zero3(jaxdist.StepOptions())
    >>> isinstance(strategy, jaxdist.Strategy), strategy.drops
    (True, True)
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
    return strategy.drops and has_shards(specs)


def capture_nothing(tree: PyTree) -> PyTree:
    """The captured tree of a strategy without one: an empty tuple for every leaf."""
    return jax.tree.map(lambda _: (), tree)


def begin_varying(params: PyTree, specs: PyTree, stacked: str | None) -> tuple[PyTree, PyTree]:
    """A `Strategy.begin`: diff is the stored parameters, typed varying over every batch-like axis; captured is nothing.

    Without the cast `jax.grad` would already have summed the gradients over these axes (see `collectives.varying`).
    """
    return to_varying(params, BATCH_LIKE), capture_nothing(params)


class Frozen(NamedTuple):
    """A parameter without a gradient, in place of a leaf of diff."""

    value: jax.Array


def value_of(leaf: jax.Array | Frozen) -> jax.Array:
    """The value of a leaf of diff, cut off from its gradient. `connect` gives it one again."""
    return leaf.value if isinstance(leaf, Frozen) else lax.stop_gradient(leaf)


def connect(value: jax.Array, leaf: jax.Array | Frozen, shard: Shard | None, options: StrategyOptions) -> jax.Array:
    """The value, whose gradient goes to a leaf of diff, in the parameters' dtype by way of the reduce dtype.

    shard: how the gradient is reduce-scattered; None: it stays whole. A frozen leaf gets none.

    Cast and gather of a parameter stay outside: inside a custom_vjp a remat policy would not see the all_gather, and
    would keep what it should drop (`blocks.remat`).
    """
    return value if isinstance(leaf, Frozen) else _connect(value, leaf, shard, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _connect(value: jax.Array, leaf: jax.Array, shard: Shard | None, options: StrategyOptions) -> jax.Array:
    return value


def _connect_backward(
    shard: Shard | None, options: StrategyOptions, _: None, grad: jax.Array
) -> tuple[None, jax.Array]:
    grad = grad.astype(options.precision.reduce)
    if shard is not None:
        # A ppermute waits for all devices of the mesh: in a condition that not all stages take, for ever.
        if options.pipeline_cond and options.grad_sync.algorithm != "native" and active_axes("pipe"):
            refuse_in_conditions(options.grad_sync.algorithm)
        grad = reduce_scatter(grad, shard.axes, dim=shard.dim, **options.grad_sync.reduction)
    return None, grad.astype(options.precision.param)


_connect.defvjp(lambda value, *_: (value, None), _connect_backward)


def cast_leaf(leaf: jax.Array | Frozen, options: StrategyOptions) -> jax.Array:
    """A whole parameter in the dtype that layers receive."""
    return connect(value_of(leaf).astype(options.precision.received), leaf, None, options)


def gather_once(params: PyTree, specs: PyTree, options: StrategyOptions, stacked: str | None) -> PyTree:
    """Whole copies of shards, in the dtype that layers receive; () for other parameters.

    Stacked blocks are gathered one after the other: a gather of the stack would need a second copy of it in transit.
    """

    def unit(specs: PyTree, params: PyTree) -> PyTree:
        def one(spec: P, leaf: jax.Array) -> jax.Array | tuple[()]:
            if (shard := shard_of(spec)) is None:
                return ()
            received = leaf.astype(options.precision.received)
            return all_gather(received, shard.axes, dim=shard.dim, **options.grad_sync.gathering)

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


def zero_probes(params: PyTree, specs: PyTree) -> PyTree:
    """Zeros of the whole shape in place of each shard. Gradients with respect to them are whole, too."""

    def one(spec: P, leaf: jax.Array) -> jax.Array:
        if (shard := shard_of(spec)) is None:
            return leaf
        shape = list(leaf.shape)
        shape[shard.dim] *= lax.axis_size(shard.axes)
        return to_varying(jnp.zeros(shape, leaf.dtype), varying_axes(leaf))

    return map_specs(one, specs, params)
