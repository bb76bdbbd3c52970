"""Meeting by a file that all processes share (`file://PATH`): process 0 writes its address there, the others wait.

A file of an earlier job does no harm: it leads to nobody, or to a process that does not know its secret, and process 0
replaces it. It is gone as soon as all have come. Only the user may read it, so that its secret is a token of the job
where there is no other.
"""

import contextlib
import os
import secrets
import socket
import time
from pathlib import Path

from jaxdist.errors import UserError
from jaxdist.runtime.join.roll_call import Meeting
from jaxdist.runtime.network.addresses import format_address, host_address, local_address_towards
from jaxdist.runtime.network.connection import open_connection
from jaxdist.runtime.network.handshake import RefusedError
from jaxdist.runtime.network.job_token import new_token
from jaxdist.runtime.network.messages import Shape, has_shape, number, read_line, string, whole, write_line

NO_NETWORK = "192.0.2.1"  # an address kept for documentation (RFC 5737): nothing is ever sent to it
_CONTENT: Shape = {"host": string, "port": whole(1, 65535), "key": string, "secret": string, "written": number}


def own_address() -> str:
    """The address at which other hosts reach this one: that of its name, unless that is a loopback address; else that
    from which it would reach a network; else 127.0.0.1."""
    named = host_address()
    if named is not None and not named.startswith("127."):
        return named
    with contextlib.suppress(OSError):  # no network at all
        return local_address_towards(NO_NETWORK, 9)
    return "127.0.0.1"


def read_meeting(path: Path, token: str) -> Meeting | None:
    """The meeting that process 0 has written; None where nothing is there yet, or nothing that it could have written.
    Its token is the job's and the file's own together: who cannot read the file is a stranger."""
    try:
        with path.open("rb") as file:
            said = read_line(file.read(4096))
    except OSError:
        return None
    if said is None or not has_shape(said, [_CONTENT]):
        return None
    return Meeting(said["host"], said["port"], said["key"], token + said["secret"])


def announce(path: Path, server: socket.socket, job: str, token: str) -> Meeting:
    """Write where `server` listens, for the others to find it. Raises `UserError` if the file cannot be written, or
    another process 0 waits there already."""
    if (found := read_meeting(path, token)) and _waits(found):
        where = format_address(found.host, found.port)
        raise UserError(
            f"--init-method: by {str(path)!r} another process 0 gathers its job already, at {where}; give"
            " each job a file, and each process a rank, of its own"
        )
    host, port = server.getsockname()[:2]
    content = {"host": host, "port": port, "key": job, "secret": new_token(), "written": time.time()}
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(write_line(content))
        draft.replace(path)
    except OSError as error:
        raise UserError(f"--init-method: {str(path)!r} cannot be written: {error.strerror}; give another") from error
    return Meeting(host, port, job, token + content["secret"])


def _waits(meeting: Meeting) -> bool:
    """Whether a process 0 takes roll at this address."""
    try:
        open_connection(meeting.host, meeting.port, 1.0, meeting.door()).close()
    except OSError:
        return False
    except RefusedError:  # of a job with another token
        pass
    return True


def remove_meeting(path: Path, meeting: Meeting, token: str) -> None:
    """Take the file away, unless it is another job's by now."""
    if read_meeting(path, token) == meeting:
        with contextlib.suppress(OSError):  # gone, or not ours to remove: its secret is of no use to anybody
            path.unlink()
