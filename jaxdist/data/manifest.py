"""The manifest and the index of document starts beside files of token ids. Both may be missing.

`jaxdist.data.prepare` writes manifest.json. The index of `train.bin` is `train.index`: the positions at which documents
start, uint64, little-endian, increasing from 0.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxdist.config.json_reader import read_json_file
from jaxdist.config.rules.fields import show
from jaxdist.data.source import file_pieces
from jaxdist.errors import UserError

Piece = TypeVar("Piece", bytes, memoryview)

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
        entry = _entry(path, read_json_file(path))
    except ValueError as error:
        raise UserError(
            f"data.path: {str(path)!r} is no manifest of format {FORMAT}: {error}; prepare the data again, or remove it"
            " to read the files without"
        ) from error
    return entry if file.name in entry.files else None


def _entry(path: Path, found: Any) -> ManifestEntry:
    """The content of a manifest, each field checked. Raises `ValueError`."""

    def check(holds: bool, name: str, value: Any, allowed: str) -> None:
        if not holds:
            raise ValueError(f"{name} is {show(value)}; allowed: {allowed}")

    check(isinstance(found, dict), "it", found, "a mapping")
    dtype, vocab, tokenizer, files = (found.get(name) for name in ("dtype", "vocab", "tokenizer", "files"))
    check(found.get("format") == FORMAT, "format", found.get("format"), f"{FORMAT}")
    check(dtype in ID_DTYPES, "dtype", dtype, ", ".join(ID_DTYPES))
    check(type(vocab) is int and 1 <= vocab <= MAX_ID + 1, "vocab", vocab, f"an integer from 1 to {MAX_ID + 1}")
    check(isinstance(tokenizer, str), "tokenizer", tokenizer, "text")
    check(isinstance(files, dict), "files", files, "a mapping")
    for name, each in files.items():
        size, sha256 = (each.get("bytes"), each.get("sha256")) if isinstance(each, dict) else (None, None)
        check(type(size) is int and size >= 0, f"bytes of {show(name)}", size, "an integer of 0 or more")
        hexadecimal = isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256) is not None
        check(hexadecimal, f"sha256 of {show(name)}", sha256, "64 hexadecimal digits")
    return ManifestEntry(path, dtype, vocab, tokenizer, files)


def checked_pieces(pieces: Iterable[Piece], file: Path, entry: ManifestEntry | None) -> Iterable[Piece]:
    """The pieces of a file's content. Raises `UserError` after the last one if the manifest has another hash."""
    said = None if entry is None else entry.files.get(file.name)
    if said is None:
        yield from pieces
        return
    size, digest = 0, hashlib.sha256()
    for piece in pieces:
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
    content = b"".join(checked_pieces(file_pieces(path), path, entry))
    starts = np.frombuffer(content[: len(content) // 8 * 8], "<u8").astype(np.int64)
    if len(content) % 8 or not starts.size or starts[0] != 0 or np.any(np.diff(starts) <= 0) or starts[-1] >= size:
        raise UserError(
            f"data.path: {str(path)!r} is no index of {file.name}: {len(content)} bytes; it holds uint64 positions, "
            f"increasing from 0, below {size}; prepare the data again, or use data.packing=none"
        )
    return starts
