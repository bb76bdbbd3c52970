"""The folders of a run and of its logs, by names that cannot lead out of them. Imported before JAX is."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from jaxdist.errors import UserError

RUN_DIR = "JAXDIST_RUN_DIR"  # set by a launcher, so that a restarted run finds its checkpoints
STOP_NOTE = "JAXDIST_STOP_NOTE"  # set by a launcher: a file that a run makes when it was asked to stop
NAME_LENGTH = 64


def safe_name(text: str) -> str:
    """`text` as the name of one file or folder: letters, digits, dots, dashes and underscores, a letter or digit first,
    at most 64 characters."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", text)[:NAME_LENGTH]
    return name if re.match("[A-Za-z0-9]", name) else ("run" + name)[:NAME_LENGTH]


def new_run_directory(config_path: str) -> Path:
    """A new folder under runs/, named after the configuration and the time."""
    return Path("runs") / f"{safe_name(Path(config_path).stem)}-{datetime.now():%Y%m%d-%H%M%S}"


def _option(command: Sequence[str], name: str) -> str | None:
    """The last value of an option in a command, as argparse finds it."""
    found = None
    for argument, after in zip(command, [*command[1:], None], strict=True):
        if argument == name and after is not None:
            found = after
        elif argument.startswith(f"{name}="):
            found = argument.partition("=")[2]
    return found


def given_run_directory(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The run directory that a training command is told to use: its --run-dir, or JAXDIST_RUN_DIR."""
    return _option(command, "--run-dir") or environ.get(RUN_DIR) or None


def run_directory_of(command: Sequence[str], environ: Mapping[str, str]) -> Path:
    """The run directory that a training command will use: the one that is given, or a new one."""
    given = given_run_directory(command, environ)
    return Path(given) if given else new_run_directory(_option(command, "--config") or "run.yaml")


def latest_step(run: Path) -> int:
    """The step of the newest finished checkpoint of a run, -1 where there is none."""
    try:
        names = [entry.name for entry in (run / "checkpoints").iterdir()]
    except OSError:
        return -1
    return max((int(name) for name in names if re.fullmatch("[0-9]{1,18}", name)), default=-1)


def make_log_folder(folder: Path, option: str) -> None:
    """Make the folder of the logs. Raises `UserError` if that is not possible, or if the folder is a link, which could
    lead anywhere."""
    shown = repr(str(folder))
    if "\0" in str(folder):
        raise UserError(f"{option}: {shown} is no path; give a folder")
    if folder.is_symlink():
        raise UserError(f"{option}: {shown} is a symbolic link; give the folder that it leads to")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}: {shown} cannot be made: {error.strerror}; give another folder") from error


def open_log(path: Path, option: str) -> int:
    """A descriptor that appends to a log. Raises `UserError`; a link is not followed."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        reason = "it is a symbolic link" if path.is_symlink() else error.strerror
        raise UserError(f"{option}: {str(path)!r} cannot be written: {reason}; give another folder") from error


def leave_stop_note(environ: Mapping[str, str]) -> None:
    """Tell the launcher, where there is one, that this process ends because the run was asked to stop. Status 75 alone
    does not say so: a run that has lost a process has it, too, and the launcher starts that again."""
    path = environ.get(STOP_NOTE)
    if not path:
        return
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644))
    except OSError as error:
        print(f"warning: {path!r}: {error.strerror}; the launcher may start this run again", file=sys.stderr)
