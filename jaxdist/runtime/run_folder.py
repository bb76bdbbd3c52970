"""The folders of a run and of its logs, by names that cannot lead out of them. Imported before JAX is."""

import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from jaxdist.errors import UserError
from jaxdist.files.launcher_notes import RUN_DIR, STOP_NOTE
from jaxdist.files.regular import open_to_append
from jaxdist.files.user_path import user_path

ELASTIC_LOG = "elastic.jsonl"  # in the folder of an elastic run
NAME_LENGTH = 64
# The folders of a run directory that a run writes into. W&B makes links in its own.
WRITTEN = ("checkpoints", "logs", "stacks", "profile", "tensorboard")


def safe_name(text: str) -> str:
    """`text` as the name of one file or folder: letters, digits, dots, dashes and underscores, a letter or digit first,
    at most 64 characters."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", text)[:NAME_LENGTH]
    return name if re.match("[A-Za-z0-9]", name) else ("run" + name)[:NAME_LENGTH]


def new_run_directory(config_path: str, *, make: bool = False) -> Path:
    """A new folder under runs/, named after the configuration and the time. make: it is made, and so nobody else's."""
    name = f"{safe_name(Path(config_path).stem)}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(1):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        if not make:
            break
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            continue
    return folder


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


def run_directory_of(command: Sequence[str], environ: Mapping[str, str], *, make: bool = False) -> Path:
    """The run directory that a training command will use: the one that is given, or a new one. make: it is made."""
    given = given_run_directory(command, environ)
    after = command[list(command).index("train") + 1 :] if "train" in command else ()
    named = next((word for word in after if not word.startswith("-") and "=" not in word), "run.yaml")
    if given:
        return user_path(given, key="--run-dir")
    return new_run_directory(_option(command, "--config") or named, make=make)


def refuse_strangers(folder: Path) -> None:
    """Raise `UserError` for what is neither a file nor a folder where a run writes. A link in a run directory from
    elsewhere could lead to any file, and a pipe would make the run wait for ever."""
    for place in (folder, *(folder / name for name in WRITTEN)):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if path.is_symlink():
                raise UserError(
                    f"--run-dir: {str(path)!r} is a link to {str(path.readlink())!r}, and a run writes"
                    " there; remove it; to use another disk, give a --run-dir on it"
                )
            if path.exists() and not path.is_file() and not path.is_dir():
                raise UserError(
                    f"--run-dir: {str(path)!r} is a pipe, a socket or a device, and a run writes there; remove it"
                )


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
        made = str(error.filename or folder)  # perhaps one above, which is the one that the user gave
        raise UserError(f"{option}: {made!r} cannot be made: {error.strerror}; give another folder") from error


def open_log(path: Path, option: str) -> int:
    """A descriptor that appends to a log, by `open_to_append`. Raises `UserError`."""
    try:
        return open_to_append(path)
    except OSError as error:
        raise UserError(f"{option}: {str(path)!r} cannot be written: {error.strerror}; give another folder") from error


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
