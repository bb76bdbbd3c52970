"""Data parallel (DDP; Li et al. 2020): every device has all parameters, gradients are all-reduced in buckets."""

import functools

import jax

from jaxdist.parallel.strategy import (
    PyTree,
    Strategy,
    StrategyOptions,
    begin_at_rest,
    cast_leaf,
    finish,
    place_whole,
)


def ddp(options: StrategyOptions) -> Strategy:
    """diff: the parameters. gather: cast. reduce: all-reduce."""

    def gather(diff: PyTree, held: PyTree, specs: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: cast_leaf(leaf, options.precision), diff)

    return Strategy(place_whole, begin_at_rest, gather, functools.partial(finish, options=options))
