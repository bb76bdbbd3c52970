"""ZeRO-2 (Rajbhandari et al. 2020, section 5.2): like ZeRO-1, but gradients too are never whole beyond one unit.

Parameters are all-gathered once a step and stay whole until its end. The gradient of each unit (a block, the embedding,
the head) is reduce-scattered as the backward pass produces it, once a microbatch; with `data` > 1 the shards are then
all-reduced over `data`.

In deterministic mode gradients stay whole until the end of the step, as in ZeRO-1: a sum over microbatches that comes
after a sum over devices would depend on the number of devices.
"""

import functools

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.config.entries import StrategyFacts
from jaxdist.parallel.strategies.zero1 import zero1
from jaxdist.parallel.strategy import (
    Strategy,
    StrategyOptions,
    begin_at_rest,
    cast_leaf,
    connect,
    gather_once,
    place_sharded,
)
from jaxdist.specs import PyTree, dim_of, map_named

FACTS = StrategyFacts(sharded=True, next="zero3")


def zero2(options: StrategyOptions) -> Strategy:
    """diff: the shards. held: whole copies in the compute dtype. gather: the copy; its backward reduce-scatters.
    reduce: finish."""
    if options.sync.deterministic:
        return zero1(options)
    place = functools.partial(place_sharded, min_shard_bytes=options.min_shard_bytes)

    def begin(params: PyTree, specs: PyTree, stacked: str | None) -> tuple[PyTree, PyTree]:
        params, _ = begin_at_rest(params, specs, stacked)
        return params, gather_once(params, specs, options.precision, stacked)

    def gather_unit(diff: PyTree, held: PyTree, specs: PyTree) -> PyTree:
        def one(spec: P, leaf: jax.Array, copy: jax.Array) -> jax.Array:
            dim = dim_of(spec, "fsdp")
            if dim is None:
                return cast_leaf(leaf, options)
            return connect(copy, leaf, dim, options)

        return map_named(one, specs, diff, held)

    return Strategy(place, begin, gather_unit, options.finish, leafwise=True)
