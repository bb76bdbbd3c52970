"""Data parallel (DDP; Li et al. 2020): every device has all parameters, gradients are all-reduced in buckets."""

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.errors import UserError
from jaxdist.parallel.strategy import (
    PyTree,
    Strategy,
    StrategyOptions,
    begin_at_rest,
    cast_leaf,
    place_whole,
)
from jaxdist.specs import dim_of, map_named


def ddp(options: StrategyOptions) -> Strategy:
    """diff: the parameters. gather: cast. reduce: all-reduce."""

    def gather_unit(diff: PyTree, held: PyTree, specs: PyTree) -> PyTree:
        def one(spec: P, leaf: jax.Array) -> jax.Array:
            if dim_of(spec, "fsdp") is not None:
                raise UserError("strategy: 'ddp' was given shards over fsdp; give init_state the same strategy")
            return cast_leaf(leaf, options)

        return map_named(one, specs, diff)

    return Strategy(place_whole, begin_at_rest, gather_unit, options.finish)
