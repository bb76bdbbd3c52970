"""Record files of documents as one array of ids, for the sources `parquet` and `arrayrecord`.

Everything is read at the start, for fingerprint and vocabulary, and stays in memory: a byte a character of text, one to
four bytes a token. Larger data belong into files of the source `tokens` (scripts/prepare_data.py), which are
read where they are needed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxdist.config.schema import DataConfig
from jaxdist.data.files import text_files
from jaxdist.data.manifest import MAX_ID, id_dtype
from jaxdist.data.source import Source, fingerprint, held_out_files, readable, source_of_ids, split_tail
from jaxdist.errors import UserError

# file -> its documents: the bytes of a text (uint8), or tokens of any other integer type.
Reader = Callable[[Path], Iterator[np.ndarray]]


def record_files(path: Path, suffixes: Sequence[str], *, key: str) -> list[Path]:
    """The file, or the files of a folder with one of these suffixes, by relative path, but hidden ones and links."""
    with readable(key, path):
        if path.is_dir():
            found = [file for file in text_files(path) if file.suffix in suffixes]
        elif path.is_file():
            return [path]
        else:
            raise UserError(f"{key}: {str(path)!r} does not exist; give a {suffixes[0]} file, or a folder of such")
    if not found:
        raise UserError(f"{key}: {str(path)!r} holds no {suffixes[0]} files; give such a file, or a folder of them")
    return found


def documents_source(config: DataConfig, name: str, suffixes: Sequence[str], read: Reader) -> Source:
    """The source of the records in `data.path`, a file or folder.

    The documents of `data.val_path` are held out. Without it, those whose content hashes below `data.held_out` are, so
    that the same text is never on both sides; of a single document, its end.
    """
    files = record_files(Path(config.path).expanduser(), suffixes, key="data.path")
    documents, unit = _read_all(files, read, key="data.path")
    held_files, every = files, documents  # every: in the order of the files, from which follows what is held out
    if config.val_path is not None:
        held_files = record_files(Path(config.val_path).expanduser(), suffixes, key="data.val_path")
        held, other = _read_all(held_files, read, key="data.val_path")
        if other != unit:
            raise UserError(f"data.val_path: {config.val_path!r} holds {other}, data.path {unit}; give one kind")
        sides, every = [documents, held], documents + held
    elif len(documents) > 1:
        chosen = held_out_files([_name(each) for each in documents], config.held_out)
        sides = [[each for each, out in zip(documents, chosen, strict=True) if out == side] for side in (False, True)]
    else:
        sides = [[part] for part in split_tail(documents[0], config.held_out)]
    largest, lowest = max(int(each.max()) for each in every), min(int(each.min()) for each in every)
    if lowest < 0 or largest > MAX_ID:
        raise UserError(
            f"data.path: {config.path!r} holds the id {lowest if lowest < 0 else largest}; allowed: 0 to {MAX_ID}"
        )
    dtype = id_dtype(largest)
    contents = (each.astype(dtype, copy=False) for each in every)
    digest = fingerprint((f"{i}", each.nbytes, [each.tobytes()]) for i, each in enumerate(contents))
    return source_of_ids(
        config,
        name,
        unit,
        [_joined(side, dtype) for side in sides],
        vocab=256 if unit == "bytes" else largest + 1,
        files=(len(files), len(held_files)),
        sha256=digest,
        documents=(_starts(sides[0]), _starts(sides[1])),
        whole="documents; give more, or data.val_path",
    )


def _read_all(files: Iterable[Path], read: Reader, *, key: str) -> tuple[list[np.ndarray], str]:
    """All documents that are not empty, and whether they are "bytes" or "tokens"."""
    documents, kinds = [], set()
    for file in files:
        with readable(key, file):
            for each in read(file):
                if each.ndim == 1 and each.size:
                    documents.append(each)
                    kinds.add("bytes" if each.dtype == np.uint8 else "tokens")
        if len(kinds) > 1:
            raise UserError(f"{key}: {str(file)!r} holds tokens, or texts, unlike the files before it; give one kind")
    if not documents:
        raise UserError(f"{key}: no text and no tokens in {', '.join(map(str, files))}; all records are empty")
    return documents, kinds.pop()


def _name(document: np.ndarray) -> bytes:
    """What is hashed to choose the side of a document: the same whatever integer type its tokens have."""
    return document.tobytes() if document.dtype == np.uint8 else document.astype("<u4").tobytes()


def _joined(documents: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    whole = np.concatenate([each.astype(dtype, copy=False) for each in documents])
    whole.flags.writeable = False
    return whole


def _starts(documents: Sequence[np.ndarray]) -> np.ndarray:
    return np.cumsum([0, *(each.size for each in documents[:-1])], dtype=np.int64)
