"""A path that a user has given: made from its text once, so that what the system refuses is one line everywhere."""

from pathlib import Path

from jaxdist.errors import UserError

_SHOWN = 80  # characters of a path in a message
_INSIDE = "x" * 64  # a name that a file inside may have; no such file is expected


def user_path(where: str | Path, *, key: str) -> Path:
    """The path of a text, with ~ expanded, whether something is there or not.

    key: the configuration key or option that messages name. Raises `UserError` where the system takes no such path: one
    that is too long, below a folder that may not be read, or with the ~ of a user that is unknown.
    """
    try:
        path = Path(where).expanduser()
        (path / _INSIDE).stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, RuntimeError, TypeError, ValueError) as error:  # ValueError: a character of code 0
        shown = repr(str(where) if len(str(where)) <= _SHOWN else f"{str(where)[: _SHOWN - 3]}...")
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise UserError(f"{key}: {shown}: {reason}; give a path that this system takes") from None
    return path
