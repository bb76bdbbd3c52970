"""ZeRO-1 (Rajbhandari et al. 2020, section 5.1): optimizer state, and with it parameters, rest as shards over `fsdp`.

Parameters are all-gathered once a step and stay whole until its end, and so do their gradients, which are
reduce-scattered once, whatever the number of microbatches: the least communication for accumulation, at the price of a
whole copy of both. With `data` > 1 the shards of the gradients are then all-reduced over `data`.
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
    gather_once,
    make_taps,
    place_sharded,
)
from jaxdist.specs import PyTree, dim_of, map_named

FACTS = StrategyFacts(sharded=True, next="zero2")


def zero1(options: StrategyOptions) -> Strategy:
    """diff: whole zeros for what rests as shards, by which gradients are taken in the parameters' dtype. held: whole
    copies in the compute dtype. gather: the copy. reduce: reduce-scatter, then finish."""
    place = functools.partial(place_sharded, min_shard_bytes=options.min_shard_bytes)

    def begin(params: PyTree, specs: PyTree, stacked: str | None) -> tuple[PyTree, PyTree]:
        params, _ = begin_at_rest(params, specs, stacked)
        return make_taps(params, specs), gather_once(params, specs, options.precision, stacked)

    def gather_unit(diff: PyTree, held: PyTree, specs: PyTree) -> PyTree:
        def one(spec: P, leaf: jax.Array, copy: jax.Array) -> jax.Array:
            if dim_of(spec, "fsdp") is None:
                return cast_leaf(leaf, options)
            return connect(copy, leaf, None, options)

        return map_named(one, specs, diff, held)

    return Strategy(place, begin, gather_unit, options.finish_whole)
