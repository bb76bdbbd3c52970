"""ZeRO (Rajbhandari et al. 2020, section 5) as two questions.

Are parameters all-gathered once a step, or at each use? Are gradients reduce-scattered once a step, or at each use?

|       | gather     | reduce-scatter | whole on every device during a step            |
|-------|------------|----------------|------------------------------------------------|
| zero1 | once       | once           | a copy of the parameters, and of the gradients |
| zero2 | once       | at each use    | a copy of the parameters                       |
| zero3 | at each use| at each use    | one unit: a block, the embedding, the head     |

Parameters, gradients and optimizer state are sharded over `fsdp`, `expert` and `context` in all three; what a layer
has split over `expert` itself, over the two others. With `data` > 1 the shards of gradients are then all-reduced over
`data` (hybrid sharding).
"""

import functools

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import active_axes
from jaxdist.mesh import AnyMesh
from jaxdist.parallel.options import StrategyOptions
from jaxdist.parallel.strategies._moves import Moves
from jaxdist.parallel.strategy import Strategy, begin_varying, cast_leaf, connect, gather_once, value_of, zero_probes
from jaxdist.specs import (
    SHARD_AXES,
    PyTree,
    is_model,
    map_specs,
    named_leaves,
    shard_of,
    spec_axes,
    spec_structure,
    split_over,
)


def sharded(options: StrategyOptions, moves: Moves) -> Strategy:
    """A strategy whose parameters are shards (`specs.shard_of`)."""
    gather_each, reduce_each = moves

    def begin(params: PyTree, specs: PyTree, stacked: str | None) -> tuple[PyTree, PyTree]:
        shards, nothing = begin_varying(params, specs, stacked)
        diff = shards if reduce_each else zero_probes(shards, specs)
        if not gather_each:
            whole = gather_once(shards, specs, options, stacked)
            return diff, jax.tree.map(by_rows, whole) if options.grad_sync.deterministic else whole
        if reduce_each:
            return diff, nothing
        return diff, map_specs(lambda spec, leaf: () if shard_of(spec) is None else leaf, specs, shards)

    def gather(diff: PyTree, captured: PyTree, specs: PyTree) -> PyTree:
        usable = []
        for name, spec, leaf, copy in named_leaves(specs, diff, captured):
            with jax.named_scope(name):
                if (place := shard_of(spec)) is None:
                    usable.append(cast_leaf(leaf, options))
                    continue
                if gather_each:
                    shard = value_of(leaf) if reduce_each else copy
                    received = shard.astype(options.precision.received)
                    copy = lax.all_gather(received, active_axes(place.axes), axis=place.dim, tiled=True)
                    copy = by_rows(copy) if options.grad_sync.deterministic else copy
                usable.append(connect(copy, leaf, place if reduce_each else None, options))
        return jax.tree.unflatten(spec_structure(specs), usable)

    place = functools.partial(place_sharded, min_shard_bytes=options.min_shard_bytes)
    reduce = options.finish if reduce_each else options.finish_whole
    drops = gather_each and options.reshard_after_forward
    return Strategy(place, begin, gather, reduce, drops=drops, leafwise=reduce_each)


def by_rows(whole: jax.Array) -> jax.Array:
    """The array, in memory row by row. One that is gathered along another dim than 0 stays as the gather leaves it, and
    a sum over it adds in that order."""
    return with_layout_constraint(whole, Layout(tuple(range(whole.ndim))))


def place_sharded(shapes: PyTree, specs: PyTree, mesh: AnyMesh, *, min_shard_bytes: int) -> PyTree:
    """Specs with `SHARD_AXES` on a dim of every parameter that is large enough and divisible; others stay whole. What a
    layer has split over `expert` itself, as the kernels of experts, is split over the other axes."""

    def split(spec: P, leaf: jax.ShapeDtypeStruct, *, columns: bool = False) -> P:
        axes = tuple(axis for axis in SHARD_AXES if axis not in spec_axes(spec))
        return split_over(spec, leaf, axes=axes, mesh=mesh, min_bytes=min_shard_bytes, columns=columns)

    if not is_model(specs):
        return map_specs(split, specs, shapes)
    # Columns of the embedding can be looked up without being gathered.
    return {
        name: map_specs(functools.partial(split, columns=name == "embed"), specs[name], shapes[name]) for name in specs
    }
