"""Plain text as bytes: the standard library of the running Python, a file, or a folder. 256 ids, no tokenizer."""

import sysconfig
from pathlib import Path

import numpy as np

from jaxdist.config.entries import SourceFacts
from jaxdist.config.schema import DataConfig
from jaxdist.data.files import left_out, named_text, read_text, text_files
from jaxdist.data.source import Source, fingerprint, held_out_files, readable, source_of_ids, split_tail
from jaxdist.errors import UserError

FACTS = SourceFacts(
    reads_files=True, words=("stdlib",), path="an existing file or folder of text, or stdlib", val_path=""
)
_BINARY = (
    "; other files are read by data.source=parquet, arrayrecord or images, and the bytes of any file by"
    " data.source=tokens data.token_dtype=uint8"
)


def text(config: DataConfig) -> Source:
    """Bytes of text as uint8 ids.

    `data.path`:
    - `stdlib`: every `*.py` file of the running interpreter's standard library, without tests, installed packages and
      generated files: about 11 MB. (A file or folder of that name is `./stdlib`.)
    - a folder: every file under it in order of relative path, except hidden ones (a leading dot), symbolic links (they
      may leave the folder, or bring the same text to both sides), empty files and binary ones (a NUL byte in the first
      8 KiB, or the byte order mark of UTF-16). The header of a run counts the binary ones.
    - a file: its bytes. A binary one is refused.

    A byte order mark is not read. A folder is split by file (`held_out_files`), a single file by position (its end is
    held out). Files are joined without a separator and held in memory. Raises `UserError`: missing, unreadable, empty,
    or shorter than a window on either side.
    """
    contents, binary = contents_of(config)
    names = list(contents)
    if len(names) == 1:
        sides = split_tail(np.frombuffer(contents[names[0]], np.uint8), config.held_out)
        files = (1, 1)
    else:
        held = dict(zip(names, held_out_files(names, config.held_out), strict=True))
        both = (b"".join(contents[name] for name in names if held[name] is side) for side in (False, True))
        train, held_out = (np.frombuffer(side, np.uint8) for side in both)
        sides, files = (train, held_out), (len(names) - sum(held.values()), sum(held.values()))
    digest = fingerprint((name, len(contents[name]), [contents[name]]) for name in names)
    whole = "files; give more files of like size, or one file, whose end is held out"
    source = source_of_ids(config, "text", "bytes", sides, vocab=256, files=files, sha256=digest, whole=whole)
    if binary:
        source.info["lines"] = [*left_out(len(binary)), *source.info.get("lines", ())]
    return source


def contents_of(config: DataConfig) -> tuple[dict[str, bytes], list[str]]:
    """The contents of the files of `data.path`, by name and sorted by it; and the names of those that are left out for
    being binary. Raises `UserError`, as `text` does."""
    library = config.path == "stdlib"
    root = Path(sysconfig.get_paths()["stdlib"] if library else config.path).expanduser()
    with readable("data.path", root):
        found = _read(root, library=library)
    contents = {name: content for name, content in found.items() if content}
    if not contents:
        raise UserError(
            f"data.path: no text in {str(root)!r}: every file in it is empty, hidden, binary or a symbolic link, "
            "or there is none; give a file, a folder of text files, or stdlib"
        )
    return contents, [name for name, content in found.items() if content is None]


def _read(path: Path, *, library: bool) -> dict[str, bytes | None]:
    """Contents of a file, or of the files in a folder, None of binary ones, by relative POSIX path and sorted by it. No
    file is skipped for an error."""
    contents: dict[str, bytes | None] = {}
    if library or path.is_dir():
        for file in text_files(path, library=library):
            with readable("data.path", file):
                contents[file.relative_to(path).as_posix()] = read_text(file)
        return contents
    if not path.exists():
        raise UserError(f"data.path: {str(path)!r} does not exist; give a file, a folder of text files, or stdlib")
    if not path.is_file():
        raise UserError(f"data.path: {str(path)!r} is neither a regular file nor a folder")
    content = named_text(path, key="data.path", instead=_BINARY)
    if not content:
        raise UserError(f"data.path: {str(path)!r} is empty; give a file with text in it")
    return {path.name: content}
