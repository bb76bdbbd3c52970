"""Steps that are not finite, in a training run: what is said, what is written down, and how the run goes on."""

import functools
import math
import statistics
from collections import deque
from typing import Any

from jaxdist.data import Loader, MixedLoader, SampleLoader
from jaxdist.errors import UserError
from jaxdist.precision.loss_scale import released
from jaxdist.trainer.failures.diagnose import Finding
from jaxdist.trainer.run import Run, note, report_damage
from jaxdist.trainer.saving import settle

SAME = 3  # rollbacks to one checkpoint; the next ends the run
_FEWEST, _RECENT = 16, 64  # losses that a spike is judged by


class NonFinite(Exception):
    """A step that the run cannot take. step: its number, from 1. guarded: whether the state is still as it was before
    the step, so that the step can be looked into."""

    def __init__(self, step: int, text: str, *, guarded: bool) -> None:
        super().__init__(text)
        self.step, self.guarded = step, guarded


class Spikes:
    """Judges losses by the median of those before. factor: 0 for never."""

    def __init__(self, factor: float) -> None:
        self._factor, self._losses = factor, deque[float](maxlen=_RECENT)

    def check(self, step: int, loss: float) -> None:
        """Raise `NonFinite` if this loss is too large."""
        if self._factor and len(self._losses) >= _FEWEST:
            usual = statistics.median(self._losses)
            if loss > self._factor * usual:
                times = f"{loss / usual:.3g} times the median of the last {len(self._losses)}"
                raise NonFinite(
                    step, f"loss of step {step} is {loss:.4g}, {times}, more than train.loss_spike", guarded=False
                )
        self._losses.append(loss)


def skip_line(step: int, loss: float, norm: float, scale: float | None) -> str:
    """One line of a skipped step."""
    after = "" if scale is None else f"; loss scale now {scale:g}"
    return f"step {step} skipped: loss {loss:.4g}, gradient norm {norm:.4g}{after}"


def look_into(run: Run, error: NonFinite, loader: Loader | MixedLoader | SampleLoader) -> Finding | None:
    """Run the failing step again and say on the console where it went wrong. Consumes the run's state."""
    if not error.guarded:
        return None
    run.console.line(f"looking into step {error.step} ...")
    state, run.state = run.state._replace(opt_state=()), run.state._replace(params=(), opt_state=())  # room for it
    finding = run.diagnosis(run.mesh)(state, loader.batch(error.step - 1 + run.passed))
    run.console.line(f"found: {finding or 'nothing: run again, all of it is finite'}")
    return finding


def roll_back(run: Run, error: NonFinite) -> str:
    """Take the run back to its newest checkpoint, past the batches since. Returns "", or why that cannot be."""
    settle(run)
    try:
        latest = run.checkpoints.newest_intact(functools.partial(report_damage, run.folder, run.console))
    except UserError as damage:
        return str(damage)
    if latest is None:
        return "there is no checkpoint yet to go back to; set checkpoint.every lower"
    run.rollbacks[latest] = run.rollbacks.get(latest, 0) + 1
    if run.rollbacks[latest] > SAME:
        return f"{SAME} times from the checkpoint of step {latest} on; try a lower optimizer.lr"
    run.state = run.state._replace(params=(), opt_state=())  # no room for two
    state = run.checkpoints.restore(latest, run.target)
    run.state, run.first_step = state._replace(guard=released(state.guard)), latest
    run.passed += error.step - latest
    for writer in (run.metrics, run.samples):
        if writer is not None:
            writer.rewind(latest)
    run.console.line(f"rolled back to step {latest}; the batches of steps {latest + 1} to {error.step} are passed over")
    return ""


def write_down(run: Run, error: NonFinite, finding: Finding | None, action: str) -> None:
    """A line in incidents.jsonl."""
    record: dict[str, Any] = {"step": error.step, "what": str(error), "action": action, "batches_passed": run.passed}
    record["found"] = None if finding is None else finding._asdict()
    note(run.folder, run.console, record)


def is_bad(loss: float, norm: float) -> bool:
    """Whether a step was not finite, as the host sees it."""
    return not (math.isfinite(loss) and math.isfinite(norm))
