"""The text files of a folder."""

import codecs
import os
from pathlib import Path

from jaxdist.errors import UserError

# Installed packages, test suites and files written by the build differ between machines with the same Python.
# pydoc_data is one generated file of 0.75 MB, which alone would be most of the held-out text.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"}
_BUILD_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "config-")
_PROBE_BYTES = 8192


def read_text(file: Path) -> bytes | None:
    """The content of a file, without a byte order mark; None if it is binary, that is, has a NUL byte in its first
    8 KiB, or begins with the byte order mark of UTF-16."""
    with file.open("rb") as stream:
        head = stream.read(_PROBE_BYTES)
        binary = b"\0" in head or _is_utf16(head)
        return None if binary else (head + stream.read()).removeprefix(codecs.BOM_UTF8)


def _is_utf16(head: bytes) -> bool:
    """Whether a file that begins so is text in UTF-16. Of such text in Japanese, no byte need be NUL."""
    # UTF-32's mark begins with that of UTF-16.
    return head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and not head.startswith(codecs.BOM_UTF32_LE)


def named_text(file: Path, *, key: str, instead: str = "") -> bytes:
    """`read_text` of a file that the user named in `key`. Raises `UserError` for a binary one.

    instead: what reads a binary file.
    """
    content = read_text(file)
    if content is not None:
        return content
    with file.open("rb") as stream:
        if _is_utf16(stream.read(4)):
            raise UserError(
                f"{key}: {str(file)!r} is text in UTF-16; allowed: UTF-8; convert: iconv -f UTF-16 -t UTF-8 OLD > NEW"
            )
    raise UserError(
        f"{key}: {str(file)!r} is binary; allowed: text in UTF-8, without NUL bytes in its first 8 KiB{instead}"
    )


def left_out(binary: int) -> list[str]:
    """The line that says how many binary files were left out; [] for none."""
    return [f"{binary:,} binary file{'s' * (binary > 1)} left out"] if binary else []


def text_files(root: Path, *, library: bool = False) -> list[Path]:
    """The regular files under `root`, in the order of their relative paths, but hidden ones and links.

    library: the Python files of the standard library instead. Raises `OSError` for a folder that cannot be listed.
    """

    def wanted(name: str) -> bool:
        if library:
            return name not in _NOT_LIBRARY and not name.startswith(_BUILD_PREFIXES)
        return not name.startswith(".")

    def stop(error: OSError) -> None:
        raise error  # os.walk would leave out a folder it cannot list

    found = []
    for folder, subfolders, files in os.walk(root, onerror=stop):
        subfolders[:] = [name for name in subfolders if wanted(name)]  # the ones os.walk goes into, if not links
        for name in files:
            file = Path(folder, name)
            if wanted(name) and (name.endswith(".py") or not library) and not file.is_symlink() and file.is_file():
                found.append(file)
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())
