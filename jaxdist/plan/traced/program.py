"""The traced program of a train step, as the readers of this folder read it."""

from typing import Any

from jaxdist.jaxpr.evaluate import without_dead_code
from jaxdist.specs import PyTree
from jaxdist.state import TrainState
from jaxdist.train_step import TrainStep


def traced_program(step: TrainStep, state: TrainState, batch: PyTree) -> Any:
    """The closed jaxpr of `step(state, batch)`, `without_dead_code`."""
    return without_dead_code(step.trace(state, batch).jaxpr)
