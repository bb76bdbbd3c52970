"""Saving during a run. A save that fails is reported as soon as that is known; the run goes on to its last step."""

from pathlib import Path

from jaxdist.checkpoint import SaveFailed
from jaxdist.checkpoint.reader import FOLDER
from jaxdist.processes import done_by_first
from jaxdist.trainer.run import Outputs, TrainingRun


def settle(outputs: Outputs) -> None:
    """Wait for a save under way, and report it if it failed."""
    try:
        outputs.checkpoints.wait()
    except SaveFailed as error:
        _report(outputs, error)


def follow(run: TrainingRun) -> None:
    """Go on where the run directory is now, if it was moved. Every process must call it, with no save under way."""
    outputs = run.outputs
    was, claim = outputs.folder, outputs.claim
    now = Path(done_by_first(lambda: str(was if claim is None else claim.follow())))
    if now != was:
        outputs.folder = run.watch.folder = now
        for writer in (outputs.metrics, outputs.samples):
            if writer is not None:
                writer.path = now / writer.path.name
        outputs.checkpoints.move_to(now / FOLDER)
        outputs.warn({"what": f"the run directory was moved from {was} to {now}", "action": "stopped"})


def begin_save(run: TrainingRun, step: int, loss: float | None = None) -> None:
    """Begin to save the state; training may go on meanwhile. loss: of an evaluation after the step.

    Raises FloatingPointError where the state is not finite.
    """
    settle(run.outputs)
    follow(run)
    try:
        run.outputs.checkpoints.save(step, run.progress.state, run.record(step), loss=loss)
    except SaveFailed as error:
        _report(run.outputs, error)


def _report(outputs: Outputs, error: SaveFailed) -> None:
    outputs.console.line(f"warning: {error}; the next one will be tried all the same")
    outputs.note({"step": error.step, "what": str(error), "action": "went on"})


def all_saved(outputs: Outputs) -> bool:
    """Whether the last save of a run has landed. If not, the console says so in one line."""
    try:
        outputs.checkpoints.wait()
    except SaveFailed as error:
        outputs.note({"step": error.step, "what": str(error), "action": "ended"})
    failed = outputs.checkpoints.failed
    if failed is None:
        return True
    newest = outputs.checkpoints.latest()
    there = "there is no checkpoint" if newest is None else f"the newest checkpoint is of step {newest}"
    outputs.failed(f"{failed}; {there}")
    return False
