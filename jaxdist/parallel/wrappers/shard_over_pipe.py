"""Embedding and head of a pipeline: one stage computes with them, and every stage stores a part.

Without this every stage would store whole copies of both, with their optimizer state. Their parameters are sharded over
`pipe` as well, after the strategy has placed them. They are gathered at the start of a step. Their gradients are
summands on several stages, and are reduce-scattered at the end of the step. Both collectives stand outside the
schedule, because not all stages take its conditions.
"""

import functools

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import all_gather
from jaxdist.mesh import AnyMesh
from jaxdist.parallel.grad_sync import reduce_late
from jaxdist.parallel.options import StrategyOptions
from jaxdist.parallel.strategy import Strategy
from jaxdist.specs import STACKED, PyTree, Shard, dim_of, is_model, map_named, map_specs, split_over


def sharding_over_pipe(strategy: Strategy, options: StrategyOptions) -> Strategy:
    """The strategy; units of a model that are not stacked are sharded over `pipe` besides.

    `pipe` is the last axis of its dim's entry, so that a gather over it gives a shard over `fsdp`, as the strategy
    expects it. `finish` does not sum over `pipe` where a spec names it.
    """
    split = functools.partial(split_over, axes=("pipe",), min_bytes=options.min_shard_bytes)

    def place(shapes: PyTree, specs: PyTree, mesh: AnyMesh) -> PyTree:
        placed = strategy.place(shapes, specs, mesh)
        # The residual of int8 sums has the shape of what is summed, on every stage.
        if not is_model(placed) or options.grad_sync.wire_dtype == "int8":
            return placed
        return placed | map_specs(functools.partial(split, mesh=mesh), _others(placed), _others(shapes))

    def begin(params: PyTree, specs: PyTree, stacked: str | None) -> tuple[PyTree, PyTree]:
        if stacked is not None:
            params = params | map_named(_gather, _others(specs), _others(params))
        return strategy.begin(params, specs, stacked)

    def reduce(grads: PyTree, residual: PyTree, specs: PyTree) -> tuple[PyTree, PyTree]:
        sums, residual = strategy.reduce(grads, residual, specs)
        if is_model(specs):
            parts = _others(sums), _others(specs)
            sums = sums | reduce_late(*parts, _over_pipe, sync=options.grad_sync, reduce_dtype=options.precision.reduce)
        return sums, residual

    return strategy._replace(place=place, begin=begin, reduce=reduce)


def _gather(spec: P, leaf: jax.Array) -> jax.Array:
    shard = _over_pipe(spec)
    return leaf if shard is None else all_gather(leaf, shard.axes, dim=shard.dim)


def _over_pipe(spec: P) -> Shard | None:
    dim = dim_of(spec, "pipe")
    return None if dim is None else Shard(dim, ("pipe",))


def _others(tree: PyTree) -> PyTree:
    """The units that are not stacked."""
    return {name: unit for name, unit in tree.items() if name != STACKED}
