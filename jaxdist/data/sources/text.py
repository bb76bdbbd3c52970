"""Plain text as bytes: the standard library of the running Python, a file, or a folder. 256 ids, no tokenizer."""

import sysconfig
from pathlib import Path

import numpy as np

from jaxdist.config.entries import SourceFacts
from jaxdist.config.schema import DataConfig
from jaxdist.data.files import read_text, text_files
from jaxdist.data.source import Source, fingerprint, held_out_files, read_error, require_windows, split_tail
from jaxdist.errors import UserError

FACTS = SourceFacts(
    reads_files=True, words=("stdlib",), path="an existing file or folder of text, or stdlib", val_path=""
)


def text(config: DataConfig) -> Source:
    """Bytes of text as uint8 ids.

    `data.path`:
    - `stdlib`: every `*.py` file of the running interpreter's standard library, without tests, installed packages and
      generated files: about 11 MB. (A file or folder of that name is `./stdlib`.)
    - a folder: every file under it in order of relative path, except hidden ones (a leading dot), symbolic links (they
      may leave the folder, or bring the same text to both sides), empty files and binary ones (a NUL byte in the first
      8 KiB).
    - a file: its bytes, whatever they are.

    A folder is split by file (`held_out_files`), a single file by position (its end is held out). Files are joined
    without a separator and held in memory. Raises `UserError`: missing, unreadable, empty, or shorter than a window on
    either side.
    """
    library = config.path == "stdlib"
    root = Path(sysconfig.get_paths()["stdlib"] if library else config.path).expanduser()
    try:
        contents = _read_folder(root, library=True) if library else _read(root)
    except OSError as error:
        raise read_error("data.path", root, error) from error
    names = sorted(contents)
    if not names:
        raise UserError(
            f"data.path: no text in {str(root)!r}: every file in it is empty, hidden, binary or a symbolic link, "
            "or there is none; give a file, a folder of text files, or stdlib"
        )
    if len(names) == 1:
        train, held_out = split_tail(np.frombuffer(contents[names[0]], np.uint8), config.held_out)
        files, held_files = 1, 1
    else:
        chosen = held_out_files(names, config.held_out)
        sides = [
            b"".join(contents[n] for n, c in zip(names, chosen, strict=True) if c == side) for side in (False, True)
        ]
        train, held_out = (np.frombuffer(side, np.uint8) for side in sides)
        files, held_files = chosen.count(False), chosen.count(True)
    info = {
        "name": "text",
        "path": config.path,
        "unit": "bytes",
        "train": int(train.size),
        "held_out": int(held_out.size),
        "files": files,
        "held_out_files": held_files,
        "sha256": fingerprint((name, len(contents[name]), [contents[name]]) for name in names),
    }
    source = Source(train, held_out, 256, info)
    require_windows(source, seq_len=config.seq_len)
    return source


def _read(path: Path) -> dict[str, bytes]:
    """Contents of a file or of the text files in a folder, by relative path."""
    if path.is_dir():
        return _read_folder(path, library=False)
    if not path.exists():
        raise UserError(f"data.path: {str(path)!r} does not exist; give a file, a folder of text files, or stdlib")
    if not path.is_file():
        raise UserError(f"data.path: {str(path)!r} is neither a regular file nor a folder")
    content = path.read_bytes()
    if not content:
        raise UserError(f"data.path: {str(path)!r} is empty; give a file with text in it")
    return {path.name: content}


def _read_folder(root: Path, *, library: bool) -> dict[str, bytes]:
    """Contents of the non-empty text files under `root`, by relative POSIX path. No file is skipped for an error."""
    contents: dict[str, bytes] = {}
    for file in text_files(root, library=library):
        try:
            content = read_text(file)
        except OSError as error:
            raise read_error("data.path", file, error) from error
        if content:
            contents[file.relative_to(root).as_posix()] = content
    return contents
