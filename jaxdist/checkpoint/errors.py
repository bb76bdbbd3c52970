"""Failures to save and to read checkpoints, each in one line."""

import functools
import logging
import os
import re
import sys
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxdist.checkpoint.barrier import FailedElsewhere
from jaxdist.errors import UserError

_MEND = "model and optimizer must be the checkpoint's"
_OTHER_TREE = re.compile(r"tree structures do not match:\s*([\w.]+)")  # orbax's words, before the part that differs
FAILURES = (OSError, ValueError, FailedElsewhere)  # tensorstore raises ValueError for the file system's


class SaveFailed(Exception):
    """The checkpoint of `step` could not be saved. `why` says why, in one line."""

    def __init__(self, step: int, error: Exception | None) -> None:
        if isinstance(error, FailedElsewhere) and isinstance(error.__context__, OSError | ValueError):
            error = error.__context__  # orbax met the others while it raised
        known = None if isinstance(error, FailedElsewhere) else error
        self.step, self.why = step, "another process could not" if known is None else why(known)
        super().__init__(f"checkpoint of step {step} was not saved: {self.why}")


def why(error: Exception) -> str:
    """The operating system's message, if there is one; else the beginning of orbax's, which can be kilobytes."""
    code = error.errno if isinstance(error, OSError) else None
    if found := re.search(r"os_error_code='(\d+)'", str(error)):
        code = int(found[1])
    text = " ".join(str(error).split())
    return os.strerror(code) if code else f"{type(error).__name__}: {text[:200]}"


@functools.cache  # once
def tell_in_one_line() -> None:
    """From now on a save that fails is told by the line of its `SaveFailed`, without hundreds of tracebacks beside it.

    Left out are, on process 0, which says that line, the tracebacks of `FAILURES` that orbax logs, whose messages stay;
    and what writes report that were under way when orbax gave up: its event loop is closed. All else is shown.
    """
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not _is_late_write(unraisable):
            before(unraisable)

    sys.unraisablehook = hook
    logging.getLogger("absl").addFilter(_without_traceback)


def _is_late_write(unraisable: Any) -> bool:
    """Whether this is what tensorstore's threads report to an event loop of orbax that is closed: no Python called."""
    if unraisable.object is not None or str(unraisable.exc_value) != "Event loop is closed":
        return False
    frames = traceback.extract_tb(unraisable.exc_traceback)
    return [frame.name for frame in frames] == ["call_soon_threadsafe", "_check_closed"]


def _without_traceback(record: logging.LogRecord) -> bool:
    """A filter for what orbax logs: a failure keeps its message, with the reason in one line, and no traceback."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    orbax = f"{os.sep}orbax{os.sep}" in record.pathname
    if orbax and isinstance(error, FAILURES) and jax.process_index() == 0:
        record.msg, record.args, record.exc_info = f"{record.getMessage().splitlines()[0]:.200}: {why(error)}", (), None
    return True


def only_in(saved: Collection[str], asked: Collection[str]) -> str:
    """What to do about the first leaf of a state that is only in the checkpoint, or only in what is to be restored.

    saved, asked: the names of the leaves of both.
    """
    only = sorted({*saved} ^ {*asked})
    average = [name for name in only if name.startswith("opt_state.ema")]
    name = (average or only)[0]
    checkpoint = name in saved
    mend = _MEND
    if name.partition(".")[0] == "model_state":
        mend = "give init_state (or state_target) a model_state= with the checkpoint's leaves, or none if it has none"
    if name.startswith("opt_state.model_state."):
        mend = "an older version saved it, which kept no average of a model_state; leave ema out, or start another run"
    if average:
        mend = (
            f"train.ema must be the checkpoint's: {'give it a decay, such as 0.999' if checkpoint else 'leave it out'}"
        )
    return f"{name} is only in {'the checkpoint' if checkpoint else 'this configuration'}; {mend}"


@contextmanager
def reading(what: str) -> Iterator[None]:
    """A context that raises `UserError` for files that orbax cannot read: damaged, hostile or of another version."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # Orbax hides tensorstore's error, as of a shard that is missing, behind a bare Exception.
        found = error.__cause__ if type(error) is Exception else error
        if not isinstance(found, OSError | ValueError | KeyError | TypeError):
            raise
        if other := _OTHER_TREE.search(str(found)):  # of lists, as of optax.chain, that differ in length
            raise UserError(f"{what}: {other[1]} has other parts than here; {_MEND}") from error
        raise UserError(f"{what} cannot be read: {why(found)}; use another one") from error
