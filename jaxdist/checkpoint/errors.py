"""What goes wrong in a save, and in reading what was saved, in one line."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from jaxdist.checkpoint.barrier import FailedElsewhere
from jaxdist.errors import UserError

FAILURES = (OSError, ValueError, FailedElsewhere)  # of the file system, by Python and by tensorstore


class SaveFailed(Exception):
    """A checkpoint that is not there: step, and why, in one line."""

    def __init__(self, step: int, error: Exception | None) -> None:
        if isinstance(error, FailedElsewhere) and isinstance(error.__context__, OSError | ValueError):
            error = error.__context__  # orbax met the others while it raised
        known = None if isinstance(error, FailedElsewhere) else error
        self.step, self.why = step, "another process could not" if known is None else why(known)
        super().__init__(f"checkpoint of step {step} was not saved: {self.why}")


def why(error: Exception) -> str:
    """What the system said, if that is known; else the beginning of what orbax makes of it, which can be kilobytes."""
    code = error.errno if isinstance(error, OSError) else None
    if found := re.search(r"os_error_code='(\d+)'", str(error)):
        code = int(found[1])
    text = " ".join(str(error).split())
    return os.strerror(code) if code else f"{type(error).__name__}: {text[:200]}"


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise `UserError` for what orbax cannot read, or make sense of: of another version, or made so."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{what} cannot be read: {why(error)}; use another one"
        raise UserError("".join(c if c.isprintable() else "?" for c in text)) from error
