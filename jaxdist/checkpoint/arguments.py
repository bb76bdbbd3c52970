"""What calls of `Checkpoints` are given, each checked before anything is read or written."""

import operator
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdist.checkpoint.checksums import TEMPORARY
from jaxdist.checkpoint.retention import PROBE
from jaxdist.errors import UserError
from jaxdist.files.user_path import user_path
from jaxdist.processes import done_by_first, from_all
from jaxdist.state import TrainState

_VISIBLE_S = 10.0  # how long a network file system may take to show a new folder to other hosts


def folder_of_user(given: str | Path) -> Path:
    """The absolute path of a folder for checkpoints, with ~ expanded. Raises `UserError` where a file is there."""
    folder = user_path(given, key="folder")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{str(folder)!r} is a file where checkpoints belong; move it, or use another --run-dir")
    return folder.absolute()


def check_shared(folder: Path) -> None:
    """Raise `UserError`, on all processes, where some do not see the folder of process 0: saves would land without
    their shards. Every process must call it, once the folder is there."""
    if jax.process_count() == 1:
        return

    def make() -> list[str]:
        probe = folder / f"{PROBE}{TEMPORARY}-{secrets.token_hex(8)}"  # a new name, which no cache has missed before
        probe.mkdir()
        return [str(folder), probe.name]

    where, name = done_by_first(make)
    limit = time.monotonic() + _VISIBLE_S
    while not (seen := (folder / name).is_dir()) and time.monotonic() < limit:
        time.sleep(0.1)
    others = [(rank, own) for rank, (saw, own) in enumerate(from_all((seen, str(folder)))) if not saw]
    if jax.process_index() == 0:
        (folder / name).rmdir()
    if others:
        raise UserError(
            f"checkpoints: rank {others[0][0]} does not see what rank 0 has made in {where} (its own folder is"
            f" {others[0][1]}); allowed: one folder for all processes; give one on storage that all hosts share, as"
            " --run-dir with an absolute path"
        )


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


def check_save(step: Any, meta: Any, latest: int | None) -> tuple[int, dict[str, Any]]:
    """The number and the record of a checkpoint to save, as orbax takes them. Raises `UserError` for what it does not.

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
    return number, _as_json(meta, "meta")


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
