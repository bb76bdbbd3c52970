"""The state and the step of replicas of a small GPT, in a layout."""

from typing import Any

import jax
from jax.sharding import NamedSharding
from layouts import SEQ, Case, initial, make_batch, model_config

from jaxdist.config.sections.local import LocalConfig
from jaxdist.init import state_target
from jaxdist.local_sgd.state import local_target, outer_optimizer, spread_out
from jaxdist.local_sgd.step import LocalStep, make_local_step
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.optim.update import only_trained
from jaxdist.parallel.options import StepOptions
from jaxdist.precision.policy import POLICIES
from jaxdist.specs import BATCH_SPEC
from jaxdist.state import TrainState, place_params

ROWS = 32


def local_parts(
    case: Case, local: LocalConfig, tx: Any, policy: str = "fp64", **more: Any
) -> tuple[TrainState, LocalStep]:
    """(state at step 0, step)."""
    mesh = make_mesh(data=case.mesh[0], fsdp=case.mesh[1], tensor=case.mesh[2], pipe=case.pipe, expert=case.expert)
    config = model_config(case)
    model = gpt(config, max_length=SEQ, param_dtype=POLICIES[policy].param)
    options = StepOptions(
        strategy=case.strategy,
        schedule=case.schedule,
        microbatches=case.microbatches,
        precision=policy,
        remat=case.remat,
        prefetch=case.prefetch,
        **more,
    )
    target = state_target(model, tx, mesh, options)
    one = place_params(initial(config, policy), only_trained(tx, options.freeze, model.update_rules), target)
    outer = outer_optimizer(local)
    frozen = options.freeze
    state = spread_out(one, local_target(target, outer, local, frozen=frozen), outer, local, frozen=frozen)
    return state, make_local_step(model, tx, mesh, local, options)


def placed(step: int, state: TrainState) -> Any:
    return jax.device_put(make_batch(ROWS, step), NamedSharding(state.step.sharding.mesh, BATCH_SPEC))
