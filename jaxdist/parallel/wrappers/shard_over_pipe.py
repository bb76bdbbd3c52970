"""Embedding and head on a pipeline: one stage uses them, and all of them keep a part.

Without this every stage would keep whole copies of both, with their optimizer state. At rest their parameters are split
over `pipe` as well, after what the strategy does; they are gathered at the start of a step, and their gradients, which
stages hold parts of as summands, are reduce-scattered at its end. Both stand outside of the schedule, whose conditions
not all stages take.
"""

import functools

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import all_gather, reduce_scatter
from jaxdist.mesh import AnyMesh
from jaxdist.parallel.options import StrategyOptions
from jaxdist.parallel.strategy import Strategy
from jaxdist.specs import STACKED, PyTree, dim_of, is_model, map_named, map_specs, split_over


def sharding_over_pipe(strategy: Strategy, options: StrategyOptions) -> Strategy:
    """The strategy, with the units of a model that are not stacked split over `pipe` at rest. It sees them as without:
    the axis is the last of its dim's entry, so that what is gathered over it is a shard over `fsdp`; and specs that
    name it keep `finish` from summing over it."""
    split = functools.partial(split_over, axis="pipe", min_bytes=options.min_shard_bytes)

    def place(shapes: PyTree, specs: PyTree, mesh: AnyMesh) -> PyTree:
        placed = strategy.place(shapes, specs, mesh)
        if not is_model(placed) or options.sync.wire_dtype == "int8":  # its residual has the shape of what is summed
            return placed
        return placed | map_specs(functools.partial(split, mesh=mesh), _others(placed), _others(shapes))

    def begin(params: PyTree, specs: PyTree, stacked: str | None) -> tuple[PyTree, PyTree]:
        if stacked is not None:
            params = params | map_named(_gather, _others(specs), _others(params))
        return strategy.begin(params, specs, stacked)

    def reduce(grads: PyTree, residual: PyTree, specs: PyTree) -> tuple[PyTree, PyTree]:
        sums, residual = strategy.reduce(grads, residual, specs)
        if is_model(specs):
            sums = sums | map_named(scatter, _others(specs), _others(sums))
        return sums, residual

    def scatter(spec: P, leaf: jax.Array) -> jax.Array:
        if (dim := dim_of(spec, "pipe")) is None:
            return leaf
        return reduce_scatter(leaf.astype(options.precision.reduce), "pipe", dim=dim, **options.sync.reduction)

    return strategy._replace(place=place, begin=begin, reduce=reduce)


def _gather(spec: P, leaf: jax.Array) -> jax.Array:
    dim = dim_of(spec, "pipe")
    return leaf if dim is None else all_gather(leaf, "pipe", dim=dim)


def _others(tree: PyTree) -> PyTree:
    """The units that are not stacked."""
    return {name: unit for name, unit in tree.items() if name != STACKED}
