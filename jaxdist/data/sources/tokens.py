"""Token ids in flat binary files as nanoGPT writes them: no header, uint8, uint16 or uint32, little-endian."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxdist.config.entries import SourceFacts
from jaxdist.config.schema import DataConfig
from jaxdist.data.file_array import FileArray
from jaxdist.data.manifest import MAX_ID, ManifestEntry, checked_pieces, document_starts, entry_of
from jaxdist.data.source import CHUNK_BYTES, Source, fingerprint, readable, source_of_ids, split_starts, tail_size
from jaxdist.errors import UserError

FACTS = SourceFacts(
    reads_files=True,
    path="an existing file of token ids, or a folder with train.bin",
    val_path="an existing file of token ids, or null",
)

_USUAL_DTYPE = "uint16"  # what nanoGPT writes


def tokens(config: DataConfig) -> Source:
    """Ids of `data.path`, which stay in the file and are read where a batch needs them.

    `data.path`: a file, or a folder that holds `train.bin`. Held out is the file `data.val_path`; without it `val.bin`
    beside `train.bin`; without that the last `data.held_out` of the training file.

    What `manifest.json` beside a file says of it (`jaxdist.data.manifest`) holds: the type of the ids, their number,
    that they are bytes; and the file's SHA-256 and its largest id are compared. Without a manifest, `data.token_dtype`
    is the type, and vocab = 1 + the largest id. With `data.packing` documents, document starts come from `train.index`
    and `val.index`. Both files are read once in full, for fingerprint and vocab: about a second per GB.

    Raises `UserError`: missing, unreadable, empty, damaged, not a whole number of ids, ids above 2**31 - 1 or outside
    the manifest's vocabulary, shorter than a window; a `data.token_dtype` that the manifest contradicts; no document
    starts.
    """
    with readable("data.path", Path(config.path)):
        train_file, val_file = _files(config)
        first = _open(train_file, config.token_dtype, _USUAL_DTYPE, key="data.path")
        whole = {"train": first}
        if val_file is not None:
            whole["held_out"] = _open(val_file, config.token_dtype, first.ids.dtype.name, key="data.val_path")
        last = whole.get("held_out", first)
        if last.ids.dtype != first.ids.dtype:
            raise UserError(
                f"data.val_path: {str(val_file)!r} holds {last.ids.dtype.name} ids, {str(train_file)!r} "
                f"{first.ids.dtype.name}; use files of one type"
            )
        digest = fingerprint(
            (role, file.ids.nbytes, checked_pieces(file.pieces(), file.path, file.entry))
            for role, file in whole.items()
        )
        if val_file is None:
            cut, size = first.ids.size - tail_size(first.ids.size, config.held_out), first.ids.size
            sides = first.ids.part(0, cut), first.ids.part(cut, size)
        else:
            sides = first.ids, last.ids
        documents = None
        if config.packing == "documents":
            if val_file is None:
                documents = split_starts(_starts(first), sides[0].size)
            else:
                documents = _starts(first), _starts(last)
            # They are a part of the fingerprint, since weights depend on them.
            starts = ((f"documents {i}", each.nbytes, [each.tobytes()]) for i, each in enumerate(documents))
            digest = fingerprint([("ids", len(digest), [digest.encode()]), *starts])
    return source_of_ids(
        config,
        "tokens",
        "bytes" if first.entry is not None and first.entry.tokenizer == "bytes" else "tokens",
        sides,
        vocab=max(file.vocab() for file in whole.values()),
        files=(1, 1),
        sha256=digest,
        documents=documents,
    )


@dataclass
class _File:
    """A file of ids, and what its manifest says. largest: the largest id, once `pieces` has been read."""

    path: Path
    ids: FileArray
    entry: ManifestEntry | None
    largest: int = 0

    def pieces(self) -> Iterator[memoryview]:
        """The content of the file."""
        for piece in self.ids.pieces(CHUNK_BYTES):
            self.largest = max(self.largest, int(piece.max()))
            yield piece.view(np.uint8).data

    def vocab(self) -> int:
        """1 + the largest id there may be. Raises `UserError` for one above what the manifest says, or any limit."""
        if self.entry is not None and self.largest >= self.entry.vocab:
            raise UserError(
                f"data.path: {str(self.path)!r} holds the id {self.largest}, and {str(self.entry.manifest)!r} says"
                f" vocab {self.entry.vocab}; allowed: ids below it; prepare the data again with the tokenizer it is for"
            )
        if self.largest > MAX_ID:
            raise UserError(
                f"data.path: {str(self.path)!r} holds the id {self.largest}, above the limit {MAX_ID}; data.token_dtype"
                f" is {self.ids.dtype.name}: is that what the file was written as?"
            )
        return self.largest + 1 if self.entry is None else self.entry.vocab


def _open(file: Path, wanted: str | None, usual: str, *, key: str) -> _File:
    """The ids of a file, mapped read-only, of the type that the manifest says, or else `wanted`, or else `usual`."""
    if not file.is_file():
        raise UserError(f"{key}: {str(file)!r} is not a regular file; give a file of token ids")
    entry = entry_of(file)
    if entry is not None and wanted not in (None, entry.dtype):
        raise UserError(
            f"data.token_dtype: {wanted!r}, but {str(entry.manifest)!r} says that the ids are {entry.dtype}; allowed: "
            f"null, {entry.dtype}"
        )
    dtype = np.dtype(entry.dtype if entry is not None else wanted or usual).newbyteorder("<")
    size = file.stat().st_size
    if size == 0:
        raise UserError(f"{key}: {str(file)!r} is empty; give a file with token ids in it")
    with file.open("rb") as opened:
        if opened.read(6).startswith((b"\x93NUMPY", b"PK\x03\x04")):
            raise UserError(
                f"{key}: {str(file)!r} is a NumPy file, whose header would be read as ids; give one with ids alone, as"
                " array.tofile(file) writes them"
            )
    if size % dtype.itemsize:
        raise UserError(
            f"{key}: {str(file)!r} has {size} bytes, not a multiple of {dtype.itemsize}, one {dtype.name} id "
            "(data.token_dtype); the file is cut off or of another type"
        )
    return _File(file, FileArray(file, dtype), entry)


def _starts(file: _File) -> np.ndarray:
    starts = document_starts(file.path, file.ids.size, file.entry)
    if starts is None:
        raise UserError(
            f"data.packing: 'documents' needs the document starts of {str(file.path)!r}, and there is no .index beside "
            "it; write the data with `jaxdist data`, or use data.packing=none"
        )
    return starts


def _files(config: DataConfig) -> tuple[Path, Path | None]:
    """The training file, and the file of held-out ids if there is one."""
    path = Path(config.path).expanduser()
    train = path / "train.bin" if path.is_dir() else path
    if not train.exists():
        hint = "the folder must hold it" if path.is_dir() else "give a file of ids, or a folder that holds train.bin"
        raise UserError(f"data.path: {str(train)!r} does not exist; {hint}")
    if config.val_path is None:
        beside = train.with_name("val.bin")
        entry = entry_of(train)
        if train.name == "train.bin" and entry is not None and "val.bin" in entry.files and not beside.exists():
            raise UserError(f"data.path: {str(beside)!r} is in manifest.json and does not exist; copy it again")
        return train, beside if train.name == "train.bin" and beside.exists() else None
    val = Path(config.val_path).expanduser()
    if not val.exists():
        raise UserError(f"data.val_path: {str(val)!r} does not exist; give a file of token ids, or null for a part")
    if val.samefile(train):
        raise UserError(f"data.val_path: {str(val)!r} is the training file; give another, or null for its end")
    return train, val
