"""The entries that a step is made of, from the registries: the schedule, and the strategy with its wrappers."""

from typing import Any

from jaxdist import registry
from jaxdist.parallel.options import StepOptions, StrategyOptions
from jaxdist.parallel.schedule import Schedule
from jaxdist.parallel.strategy import Strategy
from jaxdist.parallel.wrappers.reduce_in_backward import reducing_in_backward
from jaxdist.parallel.wrappers.shard_over_pipe import sharding_over_pipe


def get_schedule(name: Any) -> Schedule:
    """The schedule in `parallel/schedules/<name>.py`, or at a dotted path. Raises `UserError` for what is none."""
    taken: dict[str, Any] = {"seed": 1.0, "reduce_dtype": None}
    return registry.function("jaxdist.parallel.schedules", name, *[None] * 4, **taken, key="parallel.schedule")


def get_strategy(options: StepOptions, *, once: bool = False) -> Strategy:
    """The strategy of a step, for training and evaluation alike. Raises `UserError` for an unknown name.

    From the inside out:
    1. the strategy: `parallel/strategies/<name>.py`, or a dotted path
    2. `keep_fp32`: some parameters reach layers in fp32
    3. `shard_over_pipe`: embedding and head are sharded over the stages of a pipeline
    4. `reduce_in_backward`: sums of gradients travel during the backward pass
    5. `freeze`: some parameters have no gradient, so that nothing above sees one of theirs

    once: whether the parameters are those of a model with blocks, and a step has one backward pass; 4 needs both.
    """

    def make(options: StrategyOptions) -> Strategy:
        return registry.make(
            "jaxdist.parallel.strategies", options.strategy, Strategy, options, key="parallel.strategy"
        )

    # What only some options need is imported where they are read.
    if options.precision.keep_fp32:
        from jaxdist.parallel.wrappers.keep_fp32 import keeping_fp32

        strategy = keeping_fp32(make, options)
    else:
        strategy = make(options)
    strategy = reducing_in_backward(sharding_over_pipe(strategy, options), options, once=once)
    if options.freeze:
        from jaxdist.parallel.wrappers.freeze import freezing

        strategy = freezing(strategy, options.freeze)
    return strategy
