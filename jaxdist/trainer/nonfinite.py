"""Non-finite steps and loss spikes in a run: how they are found, reported, and rolled back."""

import statistics
from collections import deque
from typing import Any

from jaxdist.errors import UserError
from jaxdist.model import ModelDef
from jaxdist.precision.loss_scale import released
from jaxdist.trainer.failures.diagnose import Finding, bad_leaf, make_diagnosis, unknown_ids
from jaxdist.trainer.run import TrainingRun, Work
from jaxdist.trainer.saving import settle

MAX_ROLLBACKS = 3  # to one checkpoint; the next ends the run
_FEWEST, _RECENT = 16, 64  # number of losses that a spike is judged by


class NonFinite(FloatingPointError):
    """A step that the run cannot take.

    - step: its number, from 1.
    - guarded: whether the state is still the one before the step, so that the step can be repeated.
    - mend: what to do about it, where nothing more is known; the end of the text.
    """

    def __init__(self, step: int, text: str, *, guarded: bool, mend: str = "") -> None:
        super().__init__(f"{text}; {mend}" if mend else text)
        self.step, self.guarded, self._text = step, guarded, text

    def by(self, cause: str) -> "NonFinite":
        """The same step, with what is to blame in place of `mend`."""
        return NonFinite(self.step, self._text, guarded=self.guarded, mend=cause)


def lower_rate(rates: Any) -> str:
    """What to try: the key of a configuration, or where that does not say the rates (None), what an optimizer has."""
    return "a lower learning rate" if rates is None else "a lower optimizer.lr"


class Spikes:
    """A limit on the loss: `factor` times the median of the recent losses, where all of these are above 0: a loss that
    may be negative has no such scale. A factor of 0 is no limit."""

    def __init__(self, factor: float) -> None:
        self._factor, self._losses = factor, deque[float](maxlen=_RECENT)

    def check(self, step: int, loss: float) -> None:
        """Raise `NonFinite` if this loss is above the limit."""
        if self._factor and len(self._losses) >= _FEWEST and min(self._losses) > 0:
            usual = statistics.median(self._losses)
            if loss > self._factor * usual:
                times = f"{loss / usual:.3g} times the median of the last {len(self._losses)}"
                raise NonFinite(
                    step, f"loss of step {step} is {loss:.4g}, {times}, more than train.loss_spike", guarded=False
                )
        self._losses.append(loss)


def blame_data(run: TrainingRun, error: NonFinite, work: Work) -> NonFinite:
    """The error, which names the data if the batch of the step was not finite itself."""
    number, mesh = error.step - 1 + run.progress.passed, run.plan.mesh
    if not error.guarded or (name := bad_leaf(work.batch(number), mesh)) is None:
        return error
    where = f" in {name!r}" if name else ""
    return error.by(f"the batch of step {error.step} holds NaN or inf{where}; mend the data, or leave those rows out")


def look_into(run: TrainingRun, error: NonFinite, work: Work) -> Finding | None:
    """Run the failing step again and say on the console where it went wrong. Consumes the run's state. Not of a user's
    own loss, which has no blocks to look into, and not of replicas that train by themselves."""
    progress, parts, console = run.progress, run.plan.parts, run.outputs.console
    if not error.guarded or not isinstance(parts.model, ModelDef) or parts.replicas is not None:
        return None
    console.line(f"looking into step {error.step} ...")
    state = progress.state._replace(opt_state=())
    progress.state = state._replace(params=())  # makes room for the diagnosis
    diagnose = make_diagnosis(parts.model, run.plan.mesh, options=parts.options)
    batch = work.batch(error.step - 1 + progress.passed)
    finding = diagnose(state, batch)
    unknown = unknown_ids(batch, getattr(run.plan.config.model, "vocab", None))
    console.line(f"found: {unknown or finding or 'nothing: run again, all of it is finite'}")
    return finding


def roll_back(run: TrainingRun, error: NonFinite, work: Work) -> str:
    """Go back to the newest checkpoint, past the batches since. Returns "", or why that cannot be."""
    outputs, progress = run.outputs, run.progress
    settle(outputs)
    try:
        latest = outputs.checkpoints.newest_intact(outputs.report_damage)
    except UserError as damage:
        return str(damage)
    if latest is None:
        return "there is no checkpoint yet to go back to; set checkpoint.every lower"
    progress.rollbacks[latest] = progress.rollbacks.get(latest, 0) + 1
    if progress.rollbacks[latest] > MAX_ROLLBACKS:
        return f"{MAX_ROLLBACKS} times from the checkpoint of step {latest} on; try {lower_rate(work.rates)}"
    progress.state = progress.state._replace(params=(), opt_state=())  # there is no room for two states
    state = outputs.checkpoints.restore(latest, run.plan.parts.target)
    progress.state, progress.first_step = state._replace(guard=released(state.guard)), latest
    progress.meta = outputs.checkpoints.meta(latest)
    progress.passed += error.step - latest
    for writer in (outputs.metrics, outputs.samples):
        if writer is not None:
            writer.rewind(latest)
    outputs.sinks.rewind(latest)
    skipped = f"the batches of steps {latest + 1} to {error.step} are passed over"
    outputs.console.line(f"rolled back to step {latest}; {skipped}")
    return ""
