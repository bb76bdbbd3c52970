"""Tokenization of text into files of ids for the source `tokens`, behind `scripts/prepare_data.py`.

The output is a folder of `train.bin` and `val.bin` (ids), `train.index` and `val.index` (document starts), and
`manifest.json` (see `jaxdist.data.manifest`). It gets its name when it is complete.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.config.json_reader import parse_document
from jaxdist.data.files import left_out, named_text, read_text, text_files
from jaxdist.data.manifest import FORMAT, MANIFEST, id_dtype
from jaxdist.data.source import hash_fraction, readable, split_tail
from jaxdist.data.text.tokenizer import open_model, package, vocab_of
from jaxdist.errors import UserError, first_of
from jaxdist.files.user_path import user_path

_BATCH_DOCUMENTS, _BATCH_BYTES = 256, 1 << 24  # at most, tokenized together
_BY_DOCUMENT = "documents with int(SHA-256 of the text, first 8 bytes) / 2**64 < limit"
_BY_POSITION = "the last fraction of each document: all are the same text"


class Input(NamedTuple):
    """A file to read."""

    path: Path
    named: bool  # by the user; otherwise it was found in a folder
    size: int  # bytes


class Document(NamedTuple):
    """A text, and the place where it was found."""

    text: bytes
    where: str  # for messages
    nbytes: int  # in the input file


class DocumentEncoder(NamedTuple):
    """A function from texts to ids, and what the manifest says of it."""

    name: str
    vocab: int
    sha256: str | None  # of its file
    encode: Callable[[Sequence[Document], bytes], list[np.ndarray]]  # bytes: added to the end of each text


def input_files(inputs: Sequence[str | Path]) -> list[Input]:
    """All files of the inputs, in order. Of a folder, the files that the source `text` reads, by relative path."""
    found = []
    for name in inputs:
        path = user_path(name, key="INPUT")
        with readable("INPUT", path):
            if not path.exists():
                raise UserError(f"INPUT: {str(path)!r} does not exist; give text or .jsonl files or folders of them")
            folder = path.is_dir()
            inside = text_files(path) if folder else [path]
            found += [Input(file, not folder, file.stat().st_size) for file in inside]
    return found


def documents(files: Sequence[Input], field: str, binary: set[Path]) -> Iterator[Document]:
    """The documents: a file each, or a line of a `.jsonl` file (its text is under the key `field`). Binary files are
    empty, and added to `binary`; one that the user named is refused."""
    for file, named, size in files:
        with readable("INPUT", file):
            if file.suffix == ".jsonl":
                yield from _lines(file, field)
            else:
                text = named_text(file, key="INPUT", instead="; leave it out") if named else read_text(file)
                if text is None:
                    binary.add(file)
                yield Document(text or b"", str(file), size)


def _lines(file: Path, field: str) -> Iterator[Document]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            where = f"{file}, line {number}"
            try:
                record = parse_document(line) if line.strip() else {field: ""}
                text = record.get(field) if isinstance(record, dict) else None
                encoded = text.encode() if isinstance(text, str) else None  # half a surrogate pair is no text
            except ValueError as error:
                raise UserError(f"INPUT: {where}: is not a line of JSON with valid text ({error})") from error
            if encoded is None:
                raise UserError(f"INPUT: {where}: holds no text under {field!r}; name its key with --field")
            yield Document(encoded, where, len(line))


def bytes_tokenizer() -> DocumentEncoder:
    """The tokenizer whose ids are the bytes of a text."""

    def encode(batch: Sequence[Document], end: bytes) -> list[np.ndarray]:
        return [np.frombuffer(document.text + end, np.uint8) for document in batch]

    return DocumentEncoder("bytes", 256, None, encode)


def file_tokenizer(path: Path, end: str = "") -> DocumentEncoder:
    """The tokenizer in a JSON file of the package `tokenizers`, or in the folder of one. It adds no special tokens and
    cuts no text.

    Raises `UserError` where the package is not installed, the file holds no tokenizer, or `end` is none of the tokens
    that are added to it.
    """
    package(key="--tokenizer", where=str(path), instead=", or use --tokenizer bytes")
    path = path / "tokenizer.json" if path.is_dir() else path
    with readable("--tokenizer", path):
        content = path.read_bytes()
    model = open_model(content, key="--tokenizer", where=str(path))
    _check_added(model, end, path)

    def encode(batch: Sequence[Document], end: bytes) -> list[np.ndarray]:
        texts = []
        for document in batch:
            try:
                texts.append((document.text + end).decode())
            except UnicodeDecodeError as error:
                raise UserError(f"INPUT: {document.where}: is not UTF-8 ({error}); use --tokenizer bytes") from error
        try:
            found = model.encode_batch(texts, add_special_tokens=False)
        except Exception as error:  # the package raises no narrower one
            raise UserError(
                f"--tokenizer: {str(path)!r} cannot encode {batch[0].where} or a document after it"
                f" ({error}); use a tokenizer that has an unknown token, or bytes"
            ) from error
        return [np.array(one.ids, np.uint32) for one in found]

    vocab = vocab_of(model, key="--tokenizer", where=str(path))
    return DocumentEncoder(path.name, vocab, hashlib.sha256(content).hexdigest(), encode)


def _check_added(model: Any, end: str, path: Path) -> None:
    """Raise `UserError` unless the end of documents is "" or one of the tokens that are added to a tokenizer.

    Only those are one id after any text: others may merge with it, be unknown, or be spelled differently in the
    vocabulary, as a line break is.
    """
    added = [each.content for each in model.get_added_tokens_decoder().values() if not each.single_word]
    if end and end not in added:
        names = first_of(list(map(repr, added)), 5)
        raise UserError(
            f"--end: {end!r} is no added token of {str(path)!r}; allowed: {names or 'none, for it has none'}; or leave"
            " --end out, and write the ends into the texts"
        )


class _File:
    """A file that is being written, with its size and the hash of what was given: not of what a disk made of it."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.stream = stack.enter_context(path.open("wb"))
        self.size, self.digest = 0, hashlib.sha256()

    def add(self, values: np.ndarray) -> None:
        piece = values.tobytes()
        self.stream.write(piece)
        self.digest.update(piece)
        self.size += len(piece)

    def finish(self) -> dict[str, Any]:
        """Write to the disk itself. Returns the file's entry in the manifest."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        return {"bytes": self.size, "sha256": self.digest.hexdigest()}


class _Side:
    """The ids and document starts of one side, train or val, while they are written."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, stack: ExitStack) -> None:
        self.name, self.dtype = name, dtype
        self.ids, self.index = (_File(folder / f"{name}.{kind}", stack) for kind in ("bin", "index"))
        self.tokens = self.documents = 0

    def add(self, ids: np.ndarray) -> None:
        if ids.size:
            assert int(ids.max()) <= np.iinfo(self.dtype).max
            self.index.add(np.array([self.tokens], "<u8"))
            self.ids.add(ids.astype(self.dtype))
            self.tokens += ids.size
            self.documents += 1

    def finish(self) -> dict[str, Any]:
        """The entries of both files in the manifest."""
        counts = {"tokens": self.tokens, "documents": self.documents}
        return {f"{self.name}.bin": counts | self.ids.finish(), f"{self.name}.index": self.index.finish()}


class Preparation(NamedTuple):
    """The arguments of `prepare`, checked and read."""

    files: Sequence[Input]
    field: str
    tokenizer: DocumentEncoder
    end: bytes
    held_out: float
    binary: set[Path]  # files that are left out; filled while the others are read


def prepare(
    inputs: Sequence[str | Path],
    out: Path,
    *,
    tokenizer: str = "bytes",
    field: str = "text",
    end: str = "",
    held_out: float = 0.05,
) -> dict[str, Any]:
    """Write the ids of `inputs` (files, `.jsonl` files, folders) to the new folder `out`. Returns the manifest.

    - tokenizer: `bytes`, or a JSON file of the package `tokenizers`.
    - field: the key of the text in `.jsonl` files.
    - end: is added to the end of each document before it is tokenized: an added token of the tokenizer, or any text for
      bytes.
    - held_out: the share of val.bin. A document's side depends on its text alone, so the same text is never on both
      sides. If one side would be empty, the document nearest to the limit changes sides; if all documents are one text,
      its end is held out.

    Empty documents are left out. Raises `UserError` for inputs that cannot be read, are not text, or are too little.
    """
    if out.exists():
        raise UserError(f"--out: {str(out)!r} exists; give the name of a new folder, or remove it")
    if not 0 < held_out <= 0.5:
        raise UserError(f"--held-out: {held_out:g} is out of range; allowed: a number > 0 and <= 0.5")
    found = bytes_tokenizer() if tokenizer == "bytes" else file_tokenizer(Path(tokenizer).expanduser(), end)
    work = Preparation(input_files(inputs), field, found, end.encode(), held_out, set())
    partial = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        partial.mkdir(parents=True)  # one that is there may be another host's, at work
    except OSError as error:
        raise _cannot_write(out, error) from error
    try:
        manifest = _write_both(partial, work)
        with (partial / MANIFEST).open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(manifest, indent=2) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(out)
    except OSError as error:
        raise _cannot_write(out, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # not there any more if all went well
    return manifest


def _cannot_write(out: Path, error: OSError) -> UserError:
    return UserError(
        f"--out: cannot write {str(error.filename or out)!r}: {error.strerror}; check the disk and what is there"
    )


def _write_both(folder: Path, work: Preparation) -> dict[str, Any]:
    """Write both sides, by the rule that leaves neither of them empty. Returns the manifest."""
    limit: float | None = work.held_out
    files, low, high = _write(folder, work, limit)
    if low == high:
        limit = None
    elif not files["val.bin"]["tokens"]:
        limit = float(np.nextafter(low, 1))
    elif not files["train.bin"]["tokens"]:
        limit = high
    if limit != work.held_out:
        files, _, _ = _write(folder, work, limit)
    if not (files["train.bin"]["tokens"] and files["val.bin"]["tokens"]):
        names = ", ".join(str(file.path) for file in work.files[:3])
        raise UserError(
            f"INPUT: too little text for two sides in {names or 'no files'}; files in folders that are "
            "hidden, binary or links are left out"
        )
    by_position = {"rule": _BY_POSITION, "fraction": work.held_out}
    rule = by_position if limit is None else {"rule": _BY_DOCUMENT, "limit": limit}
    return {
        "format": FORMAT,
        "dtype": _dtype(work.tokenizer).name,
        "vocab": work.tokenizer.vocab,
        "tokenizer": work.tokenizer.name,
        "tokenizer_sha256": work.tokenizer.sha256,
        "end": work.end.decode(),
        "documents": files["train.bin"]["documents"] + files["val.bin"]["documents"],
        "held_out": rule,
        "binary_files_left_out": len(work.binary),
        "files": files,
    }


def _dtype(tokenizer: DocumentEncoder) -> np.dtype:
    return id_dtype(tokenizer.vocab - 1).newbyteorder("<")


def _write(folder: Path, work: Preparation, limit: float | None) -> tuple[dict[str, Any], float, float]:
    """Write both sides. Returns the files of the manifest, and the smallest and the largest hash of a document.

    limit: documents with a smaller hash are held out; None: the end of each document is.
    """
    low, high = 1.0, 0.0
    with ExitStack() as stack:
        train, val = (_Side(folder, name, _dtype(work.tokenizer), stack) for name in ("train", "val"))
        advance = _progress(sum(file.size for file in work.files), stack)
        for batch in _batches(documents(work.files, work.field, work.binary), advance):
            for document, ids in zip(batch, work.tokenizer.encode(batch, work.end), strict=True):
                place = hash_fraction(document.text)
                low, high = min(low, place), max(high, place)
                if limit is None:
                    kept, held = split_tail(ids, work.held_out)
                    train.add(kept)
                    val.add(held)
                else:
                    (val if place < limit else train).add(ids)
        return train.finish() | val.finish(), low, high


def _batches(found: Iterator[Document], advance: Callable[[int], None]) -> Iterator[list[Document]]:
    """Batches of the documents that are not empty."""
    batch: list[Document] = []
    for document in found:
        advance(document.nbytes)
        batch += [document] if document.text else []
        if len(batch) == _BATCH_DOCUMENTS or sum(len(each.text) for each in batch) > _BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _progress(total: int, stack: ExitStack) -> Callable[[int], None]:
    """Show a progress bar on standard error. Returns the function that advances it by a number of bytes."""
    from rich.console import Console  # slow to import
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
    task = bar.add_task("", total=total)
    return lambda count: bar.advance(task, count)


def summary(manifest: dict[str, Any], out: Path) -> list[str]:
    """The lines that say what was written, and how to train on it."""
    lines = [
        f"{name:<9}  {said['tokens']:,} tokens ({manifest['dtype']}), {said['documents']:,} documents, "
        f"sha256 {said['sha256'][:16]}"
        for name, said in manifest["files"].items()
        if "tokens" in said
    ]
    name, vocab = manifest["tokenizer"], manifest["vocab"]
    return [
        *lines,
        f"tokenizer  {name}, {vocab:,} ids",
        *left_out(manifest["binary_files_left_out"]),
        f"train with data.source=tokens data.path={out} model.vocab={vocab}",
    ]
