"""A server: one of K parts of the parameters, the outer rule's memory of it, and pushes that are there but not applied.

A plain class: a Ray actor is made of it in `jaxdist.elastic.run`, a replay uses it as it is.
"""

import hashlib
import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.elastic.outer import Outer
from jaxdist.files.regular import read_regular, replace_file

SERVER_FILES = 3  # files of a server: another one may have saved a version less when it was killed
DIGEST = 32  # bytes of SHA-256 before the arrays of a file


class Server:
    """The part `index` of the parameters.

    Args:
        index: From 0.
        outer: How it moves.
        folder: Where it saves itself after every version; None: nowhere.
    """

    def __init__(self, index: int, outer: Outer, folder: str | None) -> None:
        self.outer, self.folder = outer, Path(folder) / str(index) if folder is not None else None
        self.flat, self.version = np.zeros(0, np.float32), 0
        self.slots = self.outer.slots(self.flat)
        self.staged: dict[str, np.ndarray] = {}

    def begin(self, flat: np.ndarray) -> None:
        """Take these parameters as version 0."""
        self.flat, self.version, self.slots, self.staged = flat, 0, self.outer.slots(flat), {}
        self.save()

    def read(self) -> np.ndarray:
        """The part, of the version that all earlier calls have made."""
        return self.flat

    def stage(self, worker: str, moved: np.ndarray) -> str:
        """Keep a push until it is committed or dropped. Returns what is wrong with it, in which case it is not kept."""
        if moved.shape != self.flat.shape or moved.dtype != self.flat.dtype:
            return f"{moved.dtype}{list(moved.shape)}, not {self.flat.dtype}{list(self.flat.shape)}"
        if not np.isfinite(moved).all():
            return "not finite"
        self.staged[worker] = moved
        return ""

    def drop(self, worker: str) -> None:
        """Forget a push that is not committed."""
        self.staged.pop(worker, None)

    def commit(self, workers: list[str]) -> int:
        """Apply the mean of these pushes, and save. Returns the version that this makes."""
        moved = mean([self.staged.pop(worker) for worker in workers])
        self.flat, self.slots = self.outer.apply(self.flat, self.slots, moved)
        self.version += 1
        self.save()
        return self.version

    def save(self) -> None:
        """Write the part and its memory, in one piece."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        file = io.BytesIO()
        arrays: dict[str, Any] = {"flat": self.flat} | {f"slot_{name}": slot for name, slot in self.slots.items()}
        np.savez(file, **arrays)
        data = file.getvalue()
        replace_file(self.folder / f"{self.version}.part", hashlib.sha256(data).digest() + data)
        for version in sorted(self.saved())[:-SERVER_FILES]:
            (self.folder / f"{version}.part").unlink()

    def saved(self) -> list[int]:
        """The versions of which there are files."""
        if self.folder is None:
            return []
        return [int(path.stem) for path in self.folder.glob("*.part") if path.stem.isdigit()]

    def intact(self) -> list[int]:
        """The versions whose files are what was written."""
        return [version for version in self.saved() if self._read(version) is not None]

    def _read(self, version: int) -> bytes | None:
        assert self.folder is not None
        data = read_regular(self.folder / f"{version}.part")
        return data[DIGEST:] if hashlib.sha256(data[DIGEST:]).digest() == data[:DIGEST] else None

    def restore(self, version: int) -> None:
        """Go back to a version that is saved. Later files are removed: these versions will be made again."""
        data = self._read(version)
        assert data is not None and self.folder is not None
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        self.flat = arrays.pop("flat")
        self.slots = {name.removeprefix("slot_"): slot for name, slot in arrays.items()}
        self.version, self.staged = version, {}
        for later in self.saved():
            if later > version:
                (self.folder / f"{later}.part").unlink()


def mean(pushes: list[np.ndarray]) -> np.ndarray:
    """The mean of arrays, added in this order."""
    if len(pushes) == 1:
        return pushes[0]
    total = pushes[0]
    for each in pushes[1:]:
        total = total + each
    return total / total.dtype.type(len(pushes))


def bounds(size: int, parts: int) -> list[tuple[int, int]]:
    """Where each of the parts begins and ends: their sizes differ by one at most."""
    cuts = [size * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(cuts))
