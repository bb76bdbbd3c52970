"""What calls of `Checkpoints` are given, each checked before anything is read or written."""

import operator
import os
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdist.checkpoint.checksums import RECORD, TEMPORARY
from jaxdist.checkpoint.retention import PROBE
from jaxdist.errors import UserError, first_of
from jaxdist.files.launcher_notes import note_checkpoints
from jaxdist.files.user_path import user_path
from jaxdist.processes import done_by_first, from_all
from jaxdist.state import TrainState

# How long a network file system may take to show a new folder to other hosts. NFS remembers for up to 60 s, by its
# default options (acdirmax), that a parent of the folder was not there. Only a job that is refused waits for all of it.
_VISIBLE_S = 90.0
_NOTICE_S = 5.0  # who waits for longer says so
_SHOWN = 8  # ranks that a message names; of the others it says how many they are


def folder_of_user(given: str | Path) -> Path:
    """The absolute path of a folder for checkpoints, with ~ expanded, of which a launcher is told. Raises `UserError`
    where a file is there."""
    folder = user_path(given, key="folder")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{str(folder)!r} is a file where checkpoints belong; move it, or use another --run-dir")
    note_checkpoints(os.environ, folder.absolute())
    return folder.absolute()


def check_shared(folder: Path) -> bool:
    """Raise `UserError`, on all processes, where some do not see the folder of process 0: saves would land without
    their shards. Every process must call it, once the folder is there.

    Returns False where process 0 can make nothing in it, so that nobody knows: it may be there to be read only. To be
    called again before a save.
    """
    if jax.process_count() == 1:
        return True

    def make() -> list[str] | None:
        probe = folder / f"{PROBE}{TEMPORARY}-{secrets.token_hex(8)}"  # a new name, which no cache has missed before
        try:
            probe.mkdir()
        except OSError:  # read-only or full: a save says so, and what is there can be restored
            return None
        return [str(folder), probe.name]

    made = done_by_first(make)
    if made is None:
        return False
    where, name = made
    looks = from_all((_wait_to_see(folder / name), str(folder)))
    if jax.process_index() == 0:
        with suppress(OSError):  # the processes must go on together; `remove_leftovers` removes it at the next start
            (folder / name).rmdir()
    if blind := [rank for rank, (seen, _) in enumerate(looks) if not seen]:
        ranks = f"rank{'s' if len(blind) > 1 else ''} {first_of(list(map(str, blind)), _SHOWN)}"
        raise UserError(
            f"checkpoints: what rank 0 has made in {where} was not seen within {_VISIBLE_S:g} s by {ranks} (rank"
            f" {blind[0]} looked in {looks[blind[0]][1]}); allowed: one folder for all processes; give one on storage"
            " that all share, as --run-dir or the folder of `Checkpoints`"
        )
    return True


def _wait_to_see(probe: Path) -> bool:
    """Whether a folder that process 0 has made is there, now or within `_VISIBLE_S`."""
    begun, told = time.monotonic(), False
    # Not by Path.is_dir: it raises where the folder may not be entered or its host fails, and the others would wait.
    while not (seen := os.path.isdir(probe)) and (waited := time.monotonic() - begun) < _VISIBLE_S:  # noqa: PTH112
        if waited > _NOTICE_S and not told:
            what = f"waits up to {_VISIBLE_S:g} s to see what rank 0 has made in {probe.parent}"
            print(f"rank {jax.process_index()} {what}", file=sys.stderr, flush=True)
            told = True
        time.sleep(0.1)
    return seen


def whole_state(state: Any, name: str) -> TrainState:
    """The state. Raises `UserError`, which calls it `name`, unless it is a `TrainState`."""
    if not isinstance(state, TrainState):
        raise UserError(
            f"{name}: is a {type(state).__name__}; allowed: a TrainState, as jaxdist.init_state makes it; give the"
            " whole state"
        )
    return state


def _number(step: Any) -> int:
    """The number of a step. Raises `UserError` for what is none."""
    if not hasattr(step, "__index__") or (number := operator.index(step)) < 0:
        raise UserError(f"step: {step!r:.60}; allowed: an integer >= 0; give int(state.step)")
    return number


def check_save(step: Any, meta: Any, loss: Any, latest: int | None) -> tuple[int, dict[str, Any], float | None]:
    """The number, the record and the loss of a checkpoint to save, as orbax takes them. Raises `UserError` for what it
    does not.

    latest: the newest step that is saved.
    """
    number = _number(step)
    if latest is not None and number <= latest:
        raise UserError(
            f"step: {number} is not after step {latest}, which is saved; allowed: {latest + 1} or more; give a later"
            " one, or use another folder"
        )
    if not isinstance(meta, Mapping):
        raise UserError(f"meta: is a {type(meta).__name__}; allowed: a dict; give {{}} for an empty record")
    if RECORD in meta:
        raise UserError(f"meta: has the key {RECORD!r}, which is this package's own; give it another name")
    if loss is not None and (isinstance(loss, str | bytes | bool) or not hasattr(loss, "__float__") or np.ndim(loss)):
        raise UserError(f"loss: {loss!r:.60}; allowed: one number, such as float(loss); or None")
    return number, _as_json(meta, "meta"), None if loss is None else float(loss)


def _as_json(value: Any, where: str) -> Any:
    """A value as JSON holds it: scalars of jax and NumPy become numbers. Raises `UserError` for what is none."""
    if isinstance(value, Mapping):
        return {key: _as_json(each, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each, f"{where}[{i}]") for i, each in enumerate(value)]
    if isinstance(value, np.generic | np.ndarray | jax.Array) and not value.ndim:
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    mend = "give its .tolist()" if isinstance(value, np.ndarray | jax.Array) else "leave it out, or give a text"
    raise UserError(
        f"{where}: is a {type(value).__name__}; allowed: texts, numbers, null, and lists and dicts of these; {mend}"
    )


def folder_of_step(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint. Raises `UserError` where there is none, naming the steps that have one."""
    if not (own := folder / str(_number(step))).is_dir():
        names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
        there = ", ".join(sorted(filter(str.isdecimal, names), key=int))
        allowed = f"{there}; give one of these" if there else "none, as nothing is saved there; save a step first"
        raise UserError(f"step: {step} has no checkpoint in {folder}; allowed: {allowed}")
    return own
