"""Gradients of blocks that are summed while the backward pass still computes (DDP: Li et al. 2020, section 3.2.3).

The sum of one block's gradients can travel while the next block is computed. Two kinds of blocks are left to the end of
the step:
- blocks that do not fill a bucket: they are cheaper fused with others. With prefetching, sums of shards of smaller
  blocks travel too, since the step has something to hide them behind.
- all blocks of a step with several backward passes: a sum for each microbatch would send as many times the bytes.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from optax import MaskedNode

from jaxdist.collectives import active_axes, to_varying, varying_axes
from jaxdist.parallel.options import StrategyOptions
from jaxdist.parallel.strategy import Strategy
from jaxdist.specs import SHARD_AXES, STACKED, PyTree, claimed_axes, map_specs, only, spec_leaves


def reducing_in_backward(strategy: Strategy, options: StrategyOptions) -> Strategy:
    """The strategy with a `reduce_block`, if it can have one. `reduce` then leaves out the sums of `reduce_block`.

    The parameters are those of a model with blocks, and a step has one backward pass.
    """
    feedback = options.grad_sync.wire_dtype == "int8"  # needs the residual, which only `reduce` is given
    if not strategy.leafwise or feedback:
        return strategy
    fills = functools.partial(_fills_buckets, options=options)

    def reduce_block(grads: PyTree, specs: PyTree) -> PyTree:
        def stacked() -> PyTree:
            return jax.tree.map(lambda leaf: leaf[None], grads)

        shapes = jax.eval_shape(stacked)
        specs = map_specs(lambda spec, leaf: leaf if isinstance(leaf, MaskedNode) else spec, specs, shapes)
        now = fills(shapes, specs)
        if not any(jax.tree.leaves(now)):
            return grads
        sums, _ = strategy.reduce(only(now, stacked()), (), only(now, specs))

        def one(leaf: jax.Array, total: Any) -> jax.Array:
            return leaf if _left(total) else to_varying(total[0].astype(leaf.dtype), varying_axes(leaf))

        return jax.tree.map(one, grads, sums)

    def reduce(grads: PyTree, residual: PyTree, specs: PyTree) -> tuple[PyTree, PyTree]:
        late: PyTree = jax.tree.map(lambda _: True, grads)
        late |= {STACKED: jax.tree.map(lambda now: not now, fills(grads[STACKED], specs[STACKED]))}
        sums, residual = strategy.reduce(only(late, grads), residual, only(late, specs))
        return jax.tree.map(lambda leaf, total: leaf if _left(total) else total, grads, sums), residual

    return strategy._replace(reduce=reduce, reduce_block=reduce_block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def reduced_behind(tree: PyTree, reduce: Callable[[PyTree], PyTree]) -> PyTree:
    """The tree; its gradient goes through `reduce`, which keeps shapes and types."""
    return tree


reduced_behind.defvjp(lambda tree, _: (tree, None), lambda reduce, _, grads: (reduce(grads),))


def _fills_buckets(blocks: PyTree, specs: PyTree, *, options: StrategyOptions) -> PyTree:
    """For each leaf of stacked blocks, whether its gradient is summed during the backward pass.

    That is where the gradients of one block that are summed over the same axes fill a bucket together; or where they
    are shards, and prefetching has a block's computation to hide them behind.
    """
    size: Counter[tuple[str, ...]] = Counter()
    for spec, leaf in zip(spec_leaves(specs), jax.tree.leaves(blocks), strict=True):
        size[_axes(spec)] += leaf.size // leaf.shape[0] * jnp.dtype(options.precision.reduce).itemsize
    full = summed_in_backward(size, options, shards=active_axes(SHARD_AXES))
    return map_specs(lambda spec, _: _axes(spec) in full, specs, blocks)


def summed_in_backward(
    size: Mapping[tuple[str, ...], int], options: StrategyOptions, *, shards: Sequence[str]
) -> set[tuple[str, ...]]:
    """The axes over which a block's gradients are summed during the backward pass.

    size: bytes of one block's gradients, by the axes over which they are summed. shards: those of `SHARD_AXES` that
    are on.
    """
    least = options.grad_sync.bucket_mb * 2**20
    beside = lambda axes: options.prefetch and shards and not set(shards) & set(axes)  # noqa: E731
    return {axes for axes, nbytes in size.items() if axes and (nbytes >= least or beside(axes))}


def _axes(spec: P) -> tuple[str, ...]:
    return active_axes(claimed_axes(spec))


def _left(total: Any) -> bool:
    """Whether `only` left this leaf out of the sums."""
    return isinstance(total, MaskedNode)
