"""The entries that a step is made of, from the registries: the schedule, and the strategy with its wrappers."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxdist import registry
from jaxdist.mesh import AnyMesh
from jaxdist.model import ModelDef, specs_of_params
from jaxdist.parallel.options import StepOptions, StrategyOptions
from jaxdist.parallel.schedule import Schedule, UserLoss
from jaxdist.parallel.strategy import Strategy
from jaxdist.parallel.wrappers.shard_over_pipe import sharding_over_pipe
from jaxdist.specs import named_leaves, shard_of, spec_leaves


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
    strategy = sharding_over_pipe(strategy, options)
    if once:
        from jaxdist.parallel.wrappers.reduce_in_backward import reducing_in_backward

        strategy = reducing_in_backward(strategy, options)
    if options.freeze:
        from jaxdist.parallel.wrappers.freeze import freezing

        strategy = freezing(strategy, options.freeze)
    return strategy


def check_placed(
    state: Any, model: ModelDef | UserLoss, strategy: Strategy, mesh: AnyMesh, options: StepOptions
) -> None:
    """Raise `UserError` for a `TrainState` with blocks in another order than the model's; and if the strategy shards
    parameters, and all of these are whole: a step would train with them, and save no memory. Where the `rules` of
    `init_state` say so, all may be whole."""
    from jaxdist.config.wrong_calls import refuse_order, refuse_whole  # which an import of the step need not load

    orders = [getattr(each, "rows", ()) for each in (state.model_state, getattr(model, "arranged", None))]
    if isinstance(model, ModelDef) and orders[0] != orders[1]:
        refuse_order(*orders)
    params, found = state.params, spec_leaves(specs_of_params(model, state.params))
    # With rules specs are written out, P(None, None); without, those of a tree of somebody's own begin as P().
    if any(shard_of(spec) or (len(spec) and not isinstance(model, ModelDef)) for spec in found):
        return
    whole = model.specs if isinstance(model, ModelDef) else jax.tree.map(lambda _: P(), params)
    for name, spec in named_leaves(strategy.place(params, whole, mesh)):
        if shard_of(spec):
            refuse_whole(name, spec, options, own=not isinstance(model, ModelDef))
