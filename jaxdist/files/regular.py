"""Files of a run directory, opened so that nothing outside of it is read, changed or waited for.

A run directory may come from elsewhere, or share its files with a copy made of hard links (`cp -al run fork`). So no
link is followed, what is no regular file is refused (a pipe would block), and a file with a second name is not changed
in place.
"""

import errno
import itertools
import os
import stat
from pathlib import Path

DAMAGED = ".damaged"  # in the names of files and folders that were moved aside
LINK, OTHER = "it is a symbolic link", "it is no regular file"


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file. flags: of `os.open`.

    Raises OSError, with `LINK` or `OTHER` as its text, for anything else, and does not wait for it.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and Path(path).is_symlink():
            raise OSError(errno.ELOOP, LINK, str(path)) from error
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a pipe that nobody reads, a socket; a folder
            raise OSError(error.errno, OTHER, str(path)) from error
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, OTHER, str(path))


def identity_of(path: str | Path) -> tuple[int, int] | None:
    """What tells a file or folder from every other of its name, None where there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def remove_empty(*folders: Path) -> None:
    """Remove these folders, the innermost first, up to the first one that something is in."""
    for folder in folders:
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            break


def open_new(path: str | Path) -> int:
    """A descriptor that writes a new file, in place of the one that is there. Other names of that one keep it."""
    Path(path).unlink(missing_ok=True)
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def open_to_append(path: str | Path) -> int:
    """A descriptor that appends to a file. Where the file has another name, too, that name keeps the old content: this
    one gets a copy."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    descriptor = open_regular(path, flags)
    if os.fstat(descriptor).st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    replace_file(path, read_regular(path))
    return open_regular(path, flags)


def read_regular(path: str | Path) -> bytes:
    """The content of a regular file. Raises OSError as `open_regular` does."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def name_aside(path: Path) -> Path:
    """A free name beside a damaged file or folder, under which it is kept: `6.damaged`, then `6.damaged-2`."""
    names = (f"{path.name}{DAMAGED}" + (f"-{count}" if count > 1 else "") for count in itertools.count(1))
    return next(found for found in map(path.with_name, names) if not os.path.lexists(found))


def replace_file(path: str | Path, data: bytes) -> None:
    """Write `path` so that a reader, or a crash at any moment, sees either the old content or the new, whole. Other
    names of the old file keep the old content."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(open_new(temporary), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if str(error.filename) == str(temporary):  # which is nothing that a user knows
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
