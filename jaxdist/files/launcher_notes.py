"""What a launcher and its processes tell each other, by environment variables and files. Imported before JAX is."""

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from jaxdist.files.regular import open_to_append

RUN_DIR = "JAXDIST_RUN_DIR"  # set by a launcher, so that a restarted run finds its checkpoints
ATTEMPT = "JAXDIST_ATTEMPT"  # set by a launcher: of the job, from 1
STOP_NOTE = "JAXDIST_STOP_NOTE"  # set by a launcher: a file that a run makes when it was asked to stop


def latest_step(run: Path) -> int:
    """The step of the newest finished checkpoint of a run, or of a folder of `Checkpoints`; -1 where there is none."""
    names = []
    for folder in (run, run / "checkpoints"):
        with contextlib.suppress(OSError):
            names += [entry.name for entry in folder.iterdir()]
    return max((int(name) for name in names if re.fullmatch("[0-9]{1,18}", name)), default=-1)


def folders_note(stop_note: str | Path) -> Path:
    """The file beside a note of `STOP_NOTE` in which processes say where they keep checkpoints."""
    return Path(f"{stop_note}-folders")


def note_checkpoints(environ: Mapping[str, str], folder: Path) -> None:
    """Tell the launcher, where there is one, of a folder of checkpoints, as a loop of one's own has it: it counts
    restarts from the newest. A line is the newest step that is there, and the path."""
    given = environ.get(RUN_DIR)
    known = given is not None and folder in (Path(given).absolute(), Path(given).absolute() / "checkpoints")
    if not environ.get(STOP_NOTE) or known or environ.get("LOCAL_RANK", "0") != "0" or "\n" in str(folder):
        return
    try:
        with os.fdopen(open_to_append(folders_note(environ[STOP_NOTE])), "a", encoding="utf-8") as file:
            file.write(f"{latest_step(folder)} {folder}\n")
    except OSError as error:
        print(f"warning: the launcher is not told of {str(folder)!r}: {error.strerror}", file=sys.stderr)
