"""The token of a job: a secret that its processes share, by which they know each other."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from jaxdist.errors import UserError

TOKEN, TOKEN_FILE = "JAXDIST_TOKEN", "JAXDIST_TOKEN_FILE"  # the token itself; the file that holds it, which wins
_LEAST, _MOST = 16, 4096  # characters; of a shorter one, who intercepts a connection could try all
MAKE = "python3 -c 'import secrets; print(secrets.token_hex(32))'"


def new_token() -> str:
    """A token, for processes that inherit it."""
    return secrets.token_hex(32)


def read_token(environ: Mapping[str, str]) -> str:
    """The token that the environment gives, or "". Raises `UserError`, in which it is not shown."""
    token, name = environ.get(TOKEN, ""), TOKEN
    if path := environ.get(TOKEN_FILE):
        name = f"--token-file: {path!r}"
        try:
            with Path(path).open(encoding="utf-8", errors="surrogateescape") as file:
                mode, token = os.fstat(file.fileno()).st_mode, file.read(_MOST + 2)
        except (OSError, ValueError) as error:  # a NUL character
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"{name} cannot be read: {reason}; make one by: {MAKE}") from error
        if mode & 0o007:
            raise UserError(
                f"{name} is open to all users of this machine; allowed: not to others"
                f" (chmod 600; in Kubernetes, defaultMode: 0400); or set {TOKEN} instead"
            )
    elif not token:
        return ""
    token = token.strip()
    if not _LEAST <= len(token) <= _MOST:
        raise UserError(f"{name} holds {len(token)} characters; allowed: {_LEAST} to {_MOST}; make one by: {MAKE}")
    return token
