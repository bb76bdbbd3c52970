"""Arrays in files, of which parts are read when they are asked for, and whose files must not change meanwhile.

They are read, not mapped into memory. A page of a map that a shorter file does not have any more ends the process with
SIGBUS, without a word; and what is written over a page is trained on under the hash of what was there before.
"""

import math
import os
import weakref
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.errors import RunStopped


class FileChanged(RunStopped):
    """A data file is not what it was when it was opened. What was read of it before is good.

    The status is 75, not 2: whether the content is another, or only its time, is found by the hash at the next start,
    which goes on with the same data and refuses others.
    """

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(
            f"data file {str(path)!r} was changed while it was in use: {what}; make it what it was: the same command"
            " goes on from the last checkpoint, and refuses other data"
        )


class _Watched:
    """An open file, with its size and time when it was opened. It is closed when nobody holds it any more."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        self.first = os.fstat(self.file)

    def check(self) -> None:
        """Raise `FileChanged` unless the file has the size and time that it had."""
        now = os.fstat(self.file)
        if now.st_size != self.first.st_size:
            raise FileChanged(self.path, f"{now.st_size} bytes, {self.first.st_size} before")
        if now.st_mtime_ns != self.first.st_mtime_ns:
            when = datetime.fromtimestamp(now.st_mtime)
            raise FileChanged(self.path, f"written at {when:%Y-%m-%d %H:%M:%S}")

    def fill(self, part: memoryview, place: int) -> None:
        """Read the bytes from `place` on into a part of an array."""
        done = 0
        while done < len(part):
            try:
                count = os.preadv(self.file, [part[done:]], place + done)
            except OSError as error:
                raise FileChanged(self.path, f"it cannot be read any more ({error.strerror})") from error
            if not count:
                self.check()
                raise FileChanged(self.path, f"it ends before byte {place + len(part)}")
            done += count


class FileArray:
    """An array [n, ...] in a file, or a part of its rows; read-only. Everything that reads raises `FileChanged`.

    - dtype: with its byte order.
    - shape: None: all of the file from `offset` on, as one row of numbers.
    - offset: where it begins in the file, in bytes.
    """

    def __init__(self, path: Path, dtype: np.dtype, *, shape: tuple[int, ...] | None = None, offset: int = 0) -> None:
        self._watched, self.dtype, self._offset = _Watched(path), dtype, offset
        whole = (self._watched.first.st_size - offset) // dtype.itemsize
        self.shape = (whole,) if shape is None else shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.size * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def part(self, start: int, stop: int) -> "FileArray":
        """The rows [start, stop), not read."""
        found = object.__new__(FileArray)
        found._watched, found.dtype = self._watched, self.dtype
        found._offset, found.shape = self._offset + start * self._row_bytes, (stop - start, *self.shape[1:])
        return found

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The rows [start, start + length) for each of `starts`: [len(starts), length, ...]."""
        assert not starts.size or (starts.min() >= 0 and starts.max() + length <= len(self)), (starts, length)
        found = np.empty((starts.size, length, *self.shape[1:]), self.dtype)
        view, step = memoryview(found.reshape(-1).view(np.uint8)), length * self._row_bytes
        for i, start in enumerate(starts.tolist()):
            self._watched.fill(view[i * step : (i + 1) * step], self._offset + start * self._row_bytes)
        self._watched.check()  # afterwards: what was written before the check, and not before the reading, is seen
        return found

    def pieces(self, nbytes: int) -> Iterator[np.ndarray]:
        """All rows in order, in pieces of about `nbytes`."""
        rows = max(1, nbytes // max(1, self._row_bytes))
        for start in range(0, len(self), rows):
            yield self[start : start + rows]

    def __getitem__(self, rows: int | slice | np.ndarray) -> np.ndarray:
        """A row; neighbouring rows; or the rows with these numbers, from 0."""
        if isinstance(rows, np.ndarray):
            return self.windows(rows, 1)[:, 0]
        if isinstance(rows, int):
            return self.windows(np.array([range(len(self))[rows]]), 1)[0, 0]
        start, stop, step = rows.indices(len(self))
        assert step == 1, "a slice of neighbouring rows"
        return self.windows(np.array([start]), max(0, stop - start))[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


Ids = np.ndarray | FileArray  # 1-D, in memory or in a file
