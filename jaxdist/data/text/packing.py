"""Documents in rows of a fixed length: one a row, or as many as fit.

Legend: n documents, S seq_len. A row has S + 1 ids: S inputs, and the S targets one id later.
"""

from array import array
from typing import NamedTuple

import jax
import numpy as np

from jaxdist.data.samples import Samples

OPEN_ROWS = 1024  # rows that may still get a document
_FEWEST = 2  # ids of a document: an input and a target


class Documents(NamedTuple):
    """Documents one after the other. ids: uint32. counts: bool, of each id. starts: int64 [n + 1], where each document
    starts, and where the last one ends."""

    ids: np.ndarray
    counts: np.ndarray
    starts: np.ndarray

    def of(self, chosen: np.ndarray) -> "Documents":
        """Those of them that are chosen (bool [n])."""
        lengths = np.diff(self.starts)
        here = np.repeat(chosen, lengths)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[chosen])])
        return Documents(self.ids[here], self.counts[here], starts)


class Collected:
    """Documents that are being read: five bytes a token."""

    def __init__(self) -> None:
        self._ids, self._counts, self._starts = array("I"), bytearray(), array("q", [0])

    def add(self, ids: np.ndarray, counts: np.ndarray) -> None:
        self._ids.frombytes(ids.astype(np.uint32).tobytes())
        self._counts += counts.astype(np.uint8).tobytes()
        self._starts.append(len(self._counts))

    def documents(self) -> Documents:
        views = (np.frombuffer(self._ids, np.uint32), np.frombuffer(self._counts, bool))
        return Documents(*views, np.frombuffer(self._starts, np.int64))


def first_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """The row of each document (int64 [n]), in the order of the documents: the first row that has room for it.

    Of more than `OPEN_ROWS` rows that are not full, the fullest gets no more. Lengths are at most `room`.
    """
    rows = np.zeros(lengths.shape, np.int64)
    number, free = np.zeros(OPEN_ROWS + 1, np.int64), np.zeros(OPEN_ROWS + 1, np.int64)  # of open rows, by number
    open_rows = made = 0
    for i, length in enumerate(lengths.tolist()):
        fits = free[:open_rows] >= length
        place = int(fits.argmax()) if open_rows else 0
        if not open_rows or not fits[place]:
            place, number[open_rows], free[open_rows] = open_rows, made, room
            open_rows, made = open_rows + 1, made + 1
        free[place] -= length
        rows[i] = number[place]
        closed = place if free[place] < _FEWEST else int(free[:open_rows].argmin()) if open_rows > OPEN_ROWS else None
        if closed is not None:
            for each in (number, free):
                each[closed : open_rows - 1] = each[closed + 1 : open_rows].copy()
            open_rows -= 1
    return rows


def in_rows(documents: Documents, *, seq_len: int, packed: bool, apart: bool = False) -> Samples:
    """Rows as samples: inputs and targets int32 [S], weights float32 [S], 1 where a target counts. Ids after the
    documents of a row are 0.

    apart: adds the leaf documents, int32 [S]: for each input the position at which its document starts.

    The first token of a document is no target: what stands before it is another document. Documents have at most S + 1
    ids.
    """
    lengths = np.diff(documents.starts)
    rows = first_fit(lengths, seq_len + 1) if packed else np.arange(lengths.size)
    order = np.argsort(rows, kind="stable")  # of the documents, by row
    count = int(rows.max(initial=-1)) + 1
    first = np.searchsorted(rows[order], np.arange(count + 1))  # of a row, in that order

    def rows_of(numbers: np.ndarray) -> dict[str, np.ndarray]:
        ids = np.zeros((numbers.size, seq_len + 1), np.int32)
        weights = np.zeros(ids.shape, np.float32)
        starts_of = np.zeros(ids.shape, np.int32)
        for row, number in enumerate(numbers.tolist()):
            at = 0
            for each in order[first[number] : first[number + 1]].tolist():
                start, stop = int(documents.starts[each]), int(documents.starts[each + 1])
                ids[row, at : at + stop - start] = documents.ids[start:stop]
                weights[row, at + 1 : at + stop - start] = documents.counts[start + 1 : stop]
                starts_of[row, at:] = at
                at += stop - start
            starts_of[row, at:] = at
        read = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": weights[:, 1:]}
        return read | {"documents": starts_of[:, :-1]} if apart else read

    like: dict[str, type] = {"inputs": np.int32, "targets": np.int32, "weights": np.float32}
    like |= {"documents": np.int32} if apart else {}
    return Samples(count, {name: jax.ShapeDtypeStruct((seq_len,), dtype) for name, dtype in like.items()}, rows_of)
