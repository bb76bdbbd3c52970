"""The answer of a strategy to the two questions of `_sharded`."""

from typing import NamedTuple


class Moves(NamedTuple):
    """When a strategy moves its shards, which a file of this folder says by `sends`. For ddp there are none.

    gather_each: whether a unit is all-gathered where it is used, for the backward pass again; else all units at the
    start of a step.
    reduce_each: whether the gradient of a unit is reduce-scattered as the backward pass makes it, once a microbatch;
    else all gradients at the end of a step.
    """

    gather_each: bool
    reduce_each: bool
