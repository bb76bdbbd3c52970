"""Failures to save and to read checkpoints, each in one line."""

import operator
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdist.checkpoint.barrier import FailedElsewhere
from jaxdist.errors import UserError

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


def check_save(step: Any, meta: Any, latest: int | None) -> tuple[int, dict[str, Any]]:
    """The number and the record of a checkpoint to save, as orbax takes them. Raises `UserError` for what it does not.

    latest: the newest step that is saved.
    """
    if not hasattr(step, "__index__") or (number := operator.index(step)) < 0:
        raise UserError(f"step: {step!r:.60}; allowed: an integer >= 0; give int(state.step)")
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
    if not (own := folder / str(step)).is_dir():
        names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
        there = ", ".join(sorted(filter(str.isdecimal, names), key=int))
        allowed = f"{there}; give one of these" if there else "none, as nothing is saved there; save a step first"
        raise UserError(f"step: {step} has no checkpoint in {folder}; allowed: {allowed}")
    return own


def only_in(saved: Collection[str], asked: Collection[str]) -> str:
    """What to do about the first leaf of a state that is only in the checkpoint, or only in what is to be restored.

    saved, asked: the names of the leaves of both.
    """
    only = sorted({*saved} ^ {*asked})
    average = [name for name in only if name.startswith("opt_state.ema")]
    name = (average or only)[0]
    checkpoint = name in saved
    mend = "model and optimizer must be the checkpoint's"
    if name.partition(".")[0] == "model_state":
        mend = "give init_state (or state_target) a model_state= with the checkpoint's leaves, or none if it has none"
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
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{what} cannot be read: {why(error)}; use another one") from error
