"""Saving during a run: a save that fails is told at once when it is known, and the next one is tried all the same."""

from jaxdist.checkpoint import SaveFailed
from jaxdist.trainer.resume import record
from jaxdist.trainer.run import Run, note


def settle(run: Run) -> None:
    """Wait for a save under way, and tell if it failed."""
    try:
        run.checkpoints.wait()
    except SaveFailed as error:
        _tell(run, error)


def begin_save(run: Run, step: int, loss: float | None = None) -> None:
    """Save the state; training may go on meanwhile. loss: of an evaluation after the step. Raises FloatingPointError
    where the state is not finite."""
    settle(run)
    meta = record(run.config, run.source, passed=run.passed, forced=run.forced)
    try:
        run.checkpoints.save(step, run.state, meta, loss=loss)
    except SaveFailed as error:
        _tell(run, error)


def _tell(run: Run, error: SaveFailed) -> None:
    run.console.line(f"warning: {error}; the next one will be tried all the same")
    _note(run, error, "went on")


def _note(run: Run, error: SaveFailed, action: str) -> None:
    note(run.folder, run.console, {"step": error.step, "what": str(error), "action": action})


def all_saved(run: Run) -> bool:
    """At the end of a run: whether the last save has landed. If not, it is said in one line."""
    try:
        run.checkpoints.wait()
    except SaveFailed as error:
        _note(run, error, "ended")
    failed = run.checkpoints.failed
    if failed is None:
        return True
    newest = run.checkpoints.latest()
    there = "there is no checkpoint" if newest is None else f"the newest checkpoint is of step {newest}"
    run.console.line(f"failed: {failed}; {there}")
    return False
