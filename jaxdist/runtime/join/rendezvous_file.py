"""Meeting by a file that all processes share (`file://PATH`): process 0 writes its address there, the others wait.

A file of an earlier job does no harm: it leads to nobody, or to a process that does not know its key, and process 0
replaces it. It is gone as soon as all have come.
"""

import contextlib
import json
import os
import secrets
import socket
import time
from pathlib import Path

from jaxdist.config.json_reader import parse_json
from jaxdist.errors import UserError
from jaxdist.runtime.connection import format_address, host_address, local_address_towards, open_connection
from jaxdist.runtime.join.roll_call import PROTOCOL, Meeting

NO_NETWORK = "192.0.2.1"  # an address kept for documentation (RFC 5737): nothing is ever sent to it


def own_address() -> str:
    """The address at which other hosts reach this one: that of its name, unless that is a loopback address; else that
    from which it would reach a network; else 127.0.0.1."""
    named = host_address()
    if named is not None and not named.startswith("127."):
        return named
    with contextlib.suppress(OSError):  # no network at all
        return local_address_towards(NO_NETWORK, 9)
    return "127.0.0.1"


def read_meeting(path: Path) -> Meeting | None:
    """The meeting that process 0 has written; None where nothing is there yet, or nothing that it could have
    written."""
    try:
        said = parse_json(path.read_bytes()[:4096])
        return Meeting(str(said["host"]), int(said["port"]), str(said["key"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def announce(path: Path, server: socket.socket, job: str) -> Meeting:
    """Write where `server` listens, for the others to find it. Raises `UserError` if the file cannot be written, or
    another process 0 waits there already."""
    if (found := read_meeting(path)) and _waits(found):
        where = format_address(found.host, found.port)
        raise UserError(
            f"--init-method: by {str(path)!r} another process 0 gathers its job already, at {where}; give"
            " each job a file, and each process a rank, of its own"
        )
    host, port = server.getsockname()[:2]
    meeting = Meeting(host, port, f"{job}/{secrets.token_hex(16)}")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(meeting._asdict() | {"written": time.time()}, file)
        draft.replace(path)
    except OSError as error:
        raise UserError(f"--init-method: {str(path)!r} cannot be written: {error.strerror}; give another") from error
    return meeting


def _waits(meeting: Meeting) -> bool:
    """Whether a process 0 takes roll at this address: it answers to a call with a wrong key."""
    try:
        with contextlib.closing(open_connection(meeting.host, meeting.port, 1.0)) as connection:
            connection.send({"jaxdist": PROTOCOL, "key": ""})
            return [said.get("status") for said in connection.receive(1.0)] == ["other"]
    except OSError:
        return False


def remove_meeting(path: Path, meeting: Meeting) -> None:
    """Take the file away, unless it is another job's by now."""
    if read_meeting(path) == meeting:
        with contextlib.suppress(OSError):  # gone, or not ours to remove: its key is of no use to anybody
            path.unlink()
