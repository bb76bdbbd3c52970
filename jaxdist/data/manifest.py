"""The manifest and the index of document starts beside files of token ids. Both may be missing.

`jaxdist.data.prepare` writes manifest.json. The index of `train.bin` is `train.index`: the positions at which documents
start, uint64, little-endian, increasing from 0.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.data.source import file_pieces
from jaxdist.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1
ID_DTYPES = ("uint8", "uint16", "uint32")
MAX_ID = 2**31 - 1  # batches are int32


class ManifestEntry(NamedTuple):
    """The content of a manifest."""

    manifest: Path
    dtype: str  # of ID_DTYPES
    vocab: int  # ids are in [0, vocab)
    tokenizer: str  # "bytes", or the name of a file
    files: dict[str, Any]  # of all files: {"bytes": size, "sha256": hex}


def id_dtype(largest: int) -> np.dtype:
    """The smallest type that holds ids up to `largest`."""
    return next(np.dtype(name) for name in ID_DTYPES if largest <= np.iinfo(name).max)


def entry_of(file: Path) -> ManifestEntry | None:
    """The manifest beside `file`; None if there is none, or it does not name the file.

    Raises `UserError` for a manifest that cannot be understood.
    """
    path = file.with_name(MANIFEST)
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_bytes())
        entry = ManifestEntry(path, found["dtype"], int(found["vocab"]), str(found["tokenizer"]), dict(found["files"]))
        if found["format"] != FORMAT or entry.dtype not in ID_DTYPES:
            raise ValueError(f"format {found['format']!r}, dtype {entry.dtype!r}")
        for each in entry.files.values():
            int(each["bytes"]), str(each["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"data.path: {str(path)!r} is no manifest of format {FORMAT} ({type(error).__name__}: {error}); prepare "
            "the data again, or remove it to read the files without"
        ) from error
    return entry if file.name in entry.files else None


def checked_pieces(file: Path, entry: ManifestEntry | None) -> Iterable[bytes]:
    """The content of a file in pieces. Raises `UserError` after the last one if the manifest has another hash."""
    said = None if entry is None else entry.files.get(file.name)
    if said is None:
        yield from file_pieces(file)
        return
    size, digest = 0, hashlib.sha256()
    for piece in file_pieces(file):
        size += len(piece)
        digest.update(piece)
        yield piece
    if (size, digest.hexdigest()) != (said["bytes"], said["sha256"]):
        what = f"{size} bytes, not {said['bytes']}" if size != said["bytes"] else "another SHA-256"
        raise UserError(
            f"data.path: {str(file)!r} is not the file that {MANIFEST} beside it describes ({what}): damaged or "
            "replaced; copy it again, or prepare the data again"
        )


def document_starts(file: Path, size: int, entry: ManifestEntry | None) -> np.ndarray | None:
    """Positions (int64) at which the documents of a file of `size` ids start; None if there is no index.

    Raises `UserError` for an index that is damaged, or that the manifest names and is not there.
    """
    path = file.with_suffix(".index")
    if not path.exists() and (entry is None or path.name not in entry.files):
        return None
    if not path.exists():
        raise UserError(f"data.path: {str(path)!r} is in {MANIFEST} and does not exist; copy it, or prepare again")
    content = b"".join(checked_pieces(path, entry))
    starts = np.frombuffer(content[: len(content) // 8 * 8], "<u8").astype(np.int64)
    if len(content) % 8 or not starts.size or starts[0] != 0 or np.any(np.diff(starts) <= 0) or starts[-1] >= size:
        raise UserError(
            f"data.path: {str(path)!r} is no index of {file.name}: {len(content)} bytes; it holds uint64 positions, "
            f"increasing from 0, below {size}; prepare the data again, or use data.packing=none"
        )
    return starts
