"""The ledgers of the outer steps of replicas that train by themselves. The ledger of their step is that of the inner
one."""

from jaxdist.jaxpr.evaluate import without_dead_code
from jaxdist.local_sgd.step import LocalStep
from jaxdist.plan.traced.ledger import Ledger, ledger_of
from jaxdist.specs import PyTree
from jaxdist.state import TrainState
from jaxdist.train_step import TrainStep

PHASE = "once an outer step"  # in place of "once a step"


def outer_ledgers(step: TrainStep, state: TrainState, batch: PyTree, *, devices_per_host: int = 8) -> list[Ledger]:
    """The ledger of each fragment's outer step, which runs once in `step.local.every` steps.

    state, batch: as of `ledger`.
    """
    assert isinstance(step, LocalStep)
    metrics = step.inner_metrics(state, batch)
    traced = [step.outer(index, state).trace(state, metrics) for index in range(step.local.fragments)]
    found = [ledger_of(without_dead_code(each.jaxpr), state, devices_per_host=devices_per_host) for each in traced]
    return [each._replace(collectives=tuple(one._replace(phase=PHASE) for one in each.collectives)) for each in found]


def sent_by_outer(step: TrainStep, state: TrainState, batch: PyTree) -> float:
    """Bytes that a device sends in outer steps, as a mean over all steps."""
    assert isinstance(step, LocalStep)
    return sum(each.wire_bytes for each in outer_ledgers(step, state, batch)) / step.local.every
