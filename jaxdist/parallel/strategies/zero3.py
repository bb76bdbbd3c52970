"""ZeRO-3 = FSDP (Rajbhandari et al. 2020; Zhao et al. 2023): parameters, gradients and optimizer state rest as shards
over `fsdp`. Each unit (a block, the embedding, the head) is all-gathered before use, forward and backward, and its
gradient is reduce-scattered; with `data` > 1 the shards are then all-reduced over `data` (hybrid sharding)."""

import functools

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.parallel.strategy import (
    PyTree,
    Strategy,
    StrategyOptions,
    begin_at_rest,
    cast_leaf,
    finish,
    gather_leaf,
    place_sharded,
)
from jaxdist.specs import dim_of, map_specs


def zero3(options: StrategyOptions) -> Strategy:
    """diff: the shards. gather: cast and all-gather; its backward reduce-scatters. reduce: finish."""

    def gather(diff: PyTree, held: PyTree, specs: PyTree) -> PyTree:
        def one(spec: P, leaf: jax.Array) -> jax.Array:
            dim = dim_of(spec, "fsdp")
            if dim is None:
                return cast_leaf(leaf, options.precision)
            return gather_leaf(leaf, dim, options.precision, options.algorithm)

        return map_specs(one, specs, diff)

    return Strategy(
        functools.partial(place_sharded, min_shard_bytes=options.min_shard_bytes),
        begin_at_rest,
        gather,
        functools.partial(finish, options=options),
    )
