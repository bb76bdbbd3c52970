"""Samples in arrays: the row i of every array is a part of sample i. What `images` and `digits` share."""

from collections.abc import Iterator, Mapping

import numpy as np

from jaxdist.data.file_array import Ids
from jaxdist.data.loader import ROUNDS, permute
from jaxdist.data.samples import Samples, as_dtype, sample_leaves
from jaxdist.data.source import CHUNK_BYTES, fingerprint, split_tail
from jaxdist.errors import UserError

Arrays = Mapping[str, Ids]


def samples_of(arrays: Arrays, *, key: str) -> Samples:
    """The samples of arrays [n, ...]. key: what messages begin with."""
    leaves = sample_leaves({name: array[0] for name, array in arrays.items()}, where=key)

    def read(numbers: np.ndarray) -> dict[str, np.ndarray]:
        rows = {name: array[numbers] for name, array in arrays.items()}
        return {name: as_dtype(row, leaves[name].dtype, where=f"{key}: {name}") for name, row in rows.items()}

    return Samples(len(next(iter(arrays.values()))), leaves, read)


def split_at_random(whole: Samples, fraction: float) -> tuple[Samples, Samples]:
    """All but a fraction of the samples, and that fraction: in an order that depends on the number of samples only,
    because neighbours are often alike, or of one label."""
    if whole.size < 2:
        raise UserError("data.path: holds one sample, and one is held out; give more, or data.val_path")
    keys = np.random.SeedSequence(whole.size).generate_state(ROUNDS, np.uint64)
    order = permute(np.arange(whole.size), whole.size, keys)
    parts = [np.sort(part) for part in split_tail(order, fraction)]  # in order as they lie on the disk

    def side(part: np.ndarray) -> Samples:
        return Samples(part.size, whole.leaves, lambda numbers: whole.read(part[numbers]))

    return side(parts[0]), side(parts[1])


def majority(train: np.ndarray, held_out: np.ndarray) -> dict[str, float]:
    """The accuracy of always saying the most frequent label of those to train on."""
    return {"majority": float((held_out == np.bincount(train).argmax()).mean())}


def fingerprint_of(sides: Mapping[str, Arrays]) -> str:
    """The SHA-256 of arrays: sides, names, dtypes, shapes and contents."""
    return fingerprint(
        (f"{side} {name} {array.dtype.str} {array.shape}", array.nbytes, _pieces(array))
        for side, found in sides.items()
        for name, array in found.items()
    )


def _pieces(array: Ids) -> Iterator[bytes]:
    rows = max(1, CHUNK_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        yield np.ascontiguousarray(array[start : start + rows]).tobytes()
