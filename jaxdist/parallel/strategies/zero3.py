"""ZeRO-3 = FSDP (Rajbhandari et al. 2020; Zhao et al. 2023): parameters, gradients and optimizer state rest as shards
over `fsdp`. Each unit (a block, the embedding, the head) is all-gathered before use, a block also for its backward
pass, and its gradient is reduce-scattered; with `data` > 1 the shards are then all-reduced over `data` (hybrid
sharding).

In deterministic mode gradients stay whole on each device until the end of the step: a sum over microbatches that comes
after a sum over devices would depend on the number of devices.
"""

import functools

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.config.entries import StrategyFacts
from jaxdist.parallel.strategy import (
    Strategy,
    StrategyOptions,
    begin_at_rest,
    cast_leaf,
    connect,
    gather,
    make_taps,
    place_sharded,
    value_of,
)
from jaxdist.specs import PyTree, dim_of, map_named, map_specs

FACTS = StrategyFacts(sharded=True, regathers=True)


def zero3(options: StrategyOptions) -> Strategy:
    """diff: the shards. gather: cast and all-gather; its backward reduce-scatters. reduce: finish."""
    place = functools.partial(place_sharded, min_shard_bytes=options.min_shard_bytes)

    def gather_unit(diff: PyTree, held: PyTree, specs: PyTree) -> PyTree:
        def one(spec: P, leaf: jax.Array) -> jax.Array:
            dim = dim_of(spec, "fsdp")
            if dim is None:
                return cast_leaf(leaf, options)
            return connect(gather(value_of(leaf), dim, options.precision), leaf, dim, options)

        return map_named(one, specs, diff)

    if options.sync.deterministic:
        return _reduced_late(options, place)
    drops = options.reshard_after_forward
    return Strategy(place, begin_at_rest, gather_unit, options.finish, drops=drops, leafwise=True)


def _reduced_late(options: StrategyOptions, place: functools.partial[PyTree]) -> Strategy:
    """diff: whole zeros for what rests as shards, by which gradients are taken. held: the shards. gather: cast and
    all-gather. reduce: reduce-scatter, then finish."""

    def begin(params: PyTree, specs: PyTree, stacked: str | None) -> tuple[PyTree, PyTree]:
        params, _ = begin_at_rest(params, specs, stacked)
        return make_taps(params, specs), map_specs(
            lambda spec, leaf: () if dim_of(spec, "fsdp") is None else leaf, specs, params
        )

    def gather_unit(diff: PyTree, held: PyTree, specs: PyTree) -> PyTree:
        def one(spec: P, leaf: jax.Array, shard: jax.Array) -> jax.Array:
            dim = dim_of(spec, "fsdp")
            if dim is None:
                return cast_leaf(leaf, options)
            return connect(gather(shard, dim, options.precision), leaf, None, options)

        return map_named(one, specs, diff, held)

    return Strategy(place, begin, gather_unit, options.finish_whole, drops=options.reshard_after_forward)
