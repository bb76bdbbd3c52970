"""Checksums of a checkpoint: a SHA-256 of every file, written before the folder of a step gets its name.

Orbax has no checksum on array data: a flipped bit is restored without a word. The checksums are part of the commit
(`SealedFolder`), so that no step is complete without them. They find damage; they do not tell who wrote a checkpoint.
"""

import hashlib
import json
import math
import os
import re
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import orbax.checkpoint as ocp

from jaxdist.checkpoint.background import step_back
from jaxdist.checkpoint.barrier import SaveBarrier
from jaxdist.config.json_reader import parse_json
from jaxdist.errors import UserError, first_of
from jaxdist.files.regular import identity_of, open_regular, read_regular

CHECKSUMS = "checksums.json"
RECORD = "jaxdist"  # key of the `meta` item under which this package keeps its own
MODEL_ORDER = "in the model's order"  # what it says of stacked blocks; older versions saved another order, and say none
TEMPORARY = ".orbax-checkpoint-tmp"  # in the names of folders that are not complete
CHECKPOINT_FORMAT = 1  # of what is written; docs/checkpoints.md describes each
_PIECE = 1 << 20  # bytes that are read and hashed at a time


class Integrity(NamedTuple):
    """The result of `check_files`.

    - problem: "", or the damaged files in one line.
    - sealed: whether there were checksums. An older version wrote none; such a folder cannot be judged.
    """

    problem: str
    sealed: bool


def _files(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """(the regular files under a folder by relative name, names of all else). Links are never followed."""
    files, others = {}, []
    for place, folders, names in os.walk(folder):
        for name in names + [name for name in folders if (Path(place) / name).is_symlink()]:
            path = Path(place) / name
            relative = path.relative_to(folder).as_posix()
            if path.is_symlink() or not path.is_file():
                others.append(relative)
            elif relative != CHECKSUMS:
                files[relative] = path
    return files, sorted(others)


class Cancelled(Exception):
    """The check was cancelled: nobody waits for its result."""


def _digest(path: Path, cancel: Event) -> str:
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as file:
        while piece := file.read(_PIECE):
            if cancel.is_set():
                raise Cancelled(str(path))
            digest.update(piece)
    return digest.hexdigest()


def _for_each(function: Callable[[Path, Event], str], paths: list[Path], cancel: Event, *, urgent: bool) -> list[str]:
    """The results of `function(path, cancel)`, by several threads: hashlib releases the interpreter.

    The threads end with this call, also where it is interrupted. Raises `Cancelled` once `cancel` is set.
    """
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), initializer=None if urgent else step_back) as pool:
        try:
            return list(pool.map(function, paths, [cancel] * len(paths)))
        except BaseException:
            cancel.set()  # leaving the pool waits for its threads
            raise


def _text(step: int, files: dict[str, list[Any]]) -> str:
    """The content of `CHECKSUMS`, with its own checksum. The same files always give the same text."""
    listed = {"version": CHECKPOINT_FORMAT, "step": step, "files": files}
    own = hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()
    return json.dumps({**listed, "sha256": own}, sort_keys=True, indent=1) + "\n"


def seal(folder: Path, step: int) -> None:
    """Write the checksums of all files in a step's folder into it."""
    files, others = _files(folder)
    assert not others, f"{folder} holds what is no file: {others}"
    paths = dict(sorted(files.items()))
    digests = _for_each(_digest, list(paths.values()), Event(), urgent=False)  # training goes on
    listed = {name: [path.stat().st_size, digest] for (name, path), digest in zip(paths.items(), digests, strict=True)}
    with (folder / CHECKSUMS).open("w", encoding="utf-8") as file:
        file.write(_text(step, listed))
        file.flush()
        os.fsync(file.fileno())


def recorded(meta: dict[str, Any], loss: float | None) -> dict[str, Any]:
    """What a step's `meta` holds: the user's record, and that of this package beside it."""
    own: dict[str, Any] = {"checksums": CHECKPOINT_FORMAT, "blocks": MODEL_ORDER}
    return meta | {RECORD: own | ({} if loss is None else {"loss": loss})}


def own_meta(found: dict[str, Any]) -> dict[str, Any]:
    """The user's record in a step's `meta`."""
    return {key: value for key, value in found.items() if key != RECORD}


def record_of(folder: Path) -> dict[str, Any] | None:
    """The record of this package in a step's `meta`: {} from an older version, None if it cannot be read."""
    try:
        # Beside the record, `meta` holds what a loop of the user's own has put there: numbers of any size.
        found = parse_json(read_regular(folder / "meta" / "metadata"), any_number=True)
    except (OSError, ValueError):
        return None
    own = found.get(RECORD, {}) if isinstance(found, dict) else None
    return own if isinstance(own, dict) else None


def loss_of(folder: Path) -> float:
    """The evaluation loss with which a step was saved; NaN where there was none."""
    loss = (record_of(folder) or {}).get("loss")
    return float(loss) if isinstance(loss, int | float) else math.nan


def newer_format(folder: Path) -> int | None:
    """The format of a step's folder if it is that of a later version, else None."""
    try:
        listed = parse_json(read_regular(folder / CHECKSUMS))
    except (OSError, ValueError):
        listed = None
    found = (record_of(folder) or {}).get("checksums"), listed.get("version") if isinstance(listed, dict) else None
    return max((each for each in found if type(each) is int and each > CHECKPOINT_FORMAT), default=None)


def _listed(folder: Path, step: int) -> dict[str, list[Any]] | str:
    """The files that `CHECKSUMS` lists, {name: [bytes, digest]}; or a text that says what is wrong with it."""
    try:
        text = read_regular(folder / CHECKSUMS).decode()
        found = parse_json(text)
    except (OSError, ValueError):
        return "cannot be read"
    files = found.get("files") if isinstance(found, dict) else None
    if (
        not isinstance(files, dict)
        or found.get("version") != CHECKPOINT_FORMAT
        or _text(found.get("step", -1), files) != text
    ):
        return "changed"
    if found["step"] != step:
        return f"of step {found['step']!r}"
    for name, entry in files.items():
        if re.search(r"(^|/)(\.{0,2})(/|$)|[\\\x00-\x1f\x7f]", name):
            return f"names {name!r}, which is no place inside the folder"
        if not (isinstance(entry, list) and [type(each) for each in entry] == [int, str]):
            return "changed"
    return files


def check_files(folder: Path, step: int, cancel: Event | None = None) -> Integrity:
    """Compare a step's folder with its checksums.

    Only files inside the folder are opened, whatever is listed. Raises `UserError` for the format of a later version,
    and `Cancelled`, in about a millisecond, once `cancel` is set.
    """
    if (newer := newer_format(folder)) is not None:  # before anything else is judged
        raise UserError(
            f"checkpoint of step {step} is of format {newer}, and this version of jaxdist reads {CHECKPOINT_FORMAT} and"
            " older; use the version that saved it, or another --run-dir"
        )
    if os.path.lexists(folder / CHECKSUMS) and not stat.S_ISREG(os.lstat(folder / CHECKSUMS).st_mode):
        return Integrity(f"{CHECKSUMS} is no file", sealed=True)
    if not (folder / CHECKSUMS).exists():
        record = record_of(folder)
        missing = record is None or "checksums" in record
        return Integrity(f"{CHECKSUMS} is missing" if missing else "", sealed=missing)
    listed = _listed(folder, step)
    if isinstance(listed, str):
        return Integrity(f"{CHECKSUMS} {listed}", sealed=True)
    files, others = _files(folder)
    wrong = dict.fromkeys(others, "is no file")
    wrong |= dict.fromkeys(listed.keys() - files.keys() - wrong.keys(), "is missing")
    wrong |= dict.fromkeys(files.keys() - listed.keys(), "does not belong there")

    def damage(path: Path, cancel: Event) -> str:
        wanted, digest = listed[path.relative_to(folder).as_posix()]
        size = os.lstat(path).st_size
        if size != wanted:
            return f"has {size} bytes instead of {wanted}"
        try:
            return "" if _digest(path, cancel) == digest else "changed"
        except OSError as error:
            return f"cannot be read: {error.strerror}"

    both = sorted(files.keys() & listed.keys())
    found = _for_each(damage, [files[name] for name in both], cancel or Event(), urgent=True)
    wrong |= {name: what for name, what in zip(both, found, strict=True) if what}
    texts = [f"{name} {what}" for name, what in sorted(wrong.items())]
    return Integrity(first_of(texts, 5), sealed=True)


def verify(folder: Path) -> list[str]:
    """The problem of a step's folder, in a list; an empty list if there is none, or there are no checksums. Raises
    `UserError` for the format of a later version."""
    problem = check_files(folder, int(folder.name)).problem
    return [problem] if problem else []


class Landed(NamedTuple):
    """A save that is complete: which folder it made, and when, by `time.monotonic`."""

    folder: tuple[int, int] | None
    at: float


class SealedFolder(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """The temporary folder of a save, as a class that orbax instantiates.

    Its commit has two steps. When every process has written, and orbax its last file, process 0 adds the checksums;
    only then the folder gets the name of its step. After it, what is old may go.
    """

    saves: SaveBarrier
    landed: Callable[[Landed], None]

    @classmethod
    def of(cls, saves: SaveBarrier, landed: Callable[[Landed], None]) -> type["SealedFolder"]:
        """The class for the saves of one `Checkpoints`. landed: is called when a folder has its name."""
        return type(cls.__name__, (cls,), {"saves": saves, "landed": staticmethod(landed)})

    @classmethod
    def from_final(cls, final_path: Any, **options: Any) -> Any:
        """The temporary folder of a step. The folders of items inside it are orbax's own."""
        if TEMPORARY in final_path.parent.name:
            return ocp.path.atomicity.AtomicRenameTemporaryPath.from_final(final_path, **options)
        temporary = super().from_final(final_path).get()
        return cls(temporary, temporary.with_name(temporary.name + "-sealing"), **options)

    def get_final(self) -> Any:
        """The complete folder of the step."""
        between = super().get_final()
        return between.with_name(between.name.partition(TEMPORARY)[0])

    async def create(self) -> Any:
        """Make the temporary folder, on process 0."""
        self.saves.enter("making its folder")
        made = await super().create()
        self.saves.enter("copying")
        return made

    async def finalize(self) -> None:
        """Commit: on process 0, in a thread of orbax, while training goes on."""
        with self.saves.failing_everywhere():
            await super().finalize()
            between, final = Path(super().get_final()), Path(self.get_final())
            seal(between, int(final.name))
            own = identity_of(between)
            between.rename(final)
            self.landed(Landed(own, time.monotonic()))
