"""How the two ends of a connection show each other that they know the job's token, without sending it.

The caller sends a random number, the listener another one. Each then sends an HMAC-SHA256 of both numbers under the
token, the caller first: to a stranger who calls, the listener says nothing that is made of the token. The HMAC is also
of the role, so that nobody passes for one end with what the other end has said, and of the channel, so that what is
said on one is of no use on another. Keys for the messages that follow are made in the same way, one for each direction:
a message that was changed, left out or sent again on the way is not read. Nothing is encrypted.

The token may be empty on addresses that only programs of one machine reach. Then any of these passes for a process of
the job.
"""

import hmac
import re
import secrets
from collections.abc import Generator, Sequence
from typing import NamedTuple

from jaxdist.errors import UserError
from jaxdist.runtime.network.job_token import TOKEN
from jaxdist.runtime.network.messages import JsonObject, Shape, has_shape, string, whole

PROTOCOL = 3  # of this module and of all messages; the first one carries it as "jaxdist"
SAME_TOKEN = f"{TOKEN} or --token-file must be the same for all processes of a job"
SAME_VERSION = "install the same version of jaxdist for all processes of a job"


def _is_nonce(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


_HELLO: Shape = {"jaxdist": whole(), "nonce": _is_nonce}
_NONCE: Shape = {"nonce": _is_nonce}
_PROOF: Shape = {"proof": string}
_REFUSED: Shape = {"jaxdist": whole(), "refused": string}


class Door(NamedTuple):
    """What both ends of a connection know. shapes: of all messages of the channel, in both directions."""

    channel: str
    token: str
    shapes: Sequence[Shape]


class Keys(NamedTuple):
    """The keys of the messages of a connection in its two directions."""

    caller: bytes
    listener: bytes


class RefusedError(UserError):
    """The other end has another token or another version of jaxdist."""


class Foreign(OSError):
    """What answers at an address is not jaxdist's, or of another channel."""


class Stranger(Exception):
    """A caller that cannot be let in. The message is why; `answer` is what it is told."""

    def __init__(self, why: str, answer: str = "") -> None:
        super().__init__(why)
        self.answer: JsonObject = {"jaxdist": PROTOCOL, "refused": answer} if answer else {}


def _prove(door: Door, what: str, nonces: tuple[str, str]) -> bytes:
    said = "\0".join(("jaxdist", str(PROTOCOL), door.channel, what, *nonces))
    return hmac.digest(door.token.encode(errors="surrogateescape"), said.encode(), "sha256")


def _keys(door: Door, nonces: tuple[str, str]) -> Keys:
    return Keys(_prove(door, "key of the caller", nonces), _prove(door, "key of the listener", nonces))


def _same(door: Door, what: str, nonces: tuple[str, str], said: JsonObject) -> bool:
    return hmac.compare_digest(_prove(door, what, nonces).hex().encode(), str(said["proof"]).encode())


def call(door: Door, where: str) -> Generator[JsonObject, JsonObject, Keys]:
    """The caller's part: yields what to say, is sent what the other end answers, returns the keys. Raises `Foreign`,
    or `RefusedError` for another token or version."""
    own = secrets.token_hex(16)
    said = yield {"jaxdist": PROTOCOL, "nonce": own}
    _check_answer(door, said, _NONCE, where)
    nonces = own, str(said["nonce"])
    said = yield {"proof": _prove(door, "caller", nonces).hex()}
    _check_answer(door, said, _PROOF, where)
    if not _same(door, "listener", nonces, said):
        raise RefusedError(f"{door.channel}: what answers at {where} does not know this job's token; {SAME_TOKEN}")
    return _keys(door, nonces)


def _check_answer(door: Door, said: JsonObject, shape: Shape, where: str) -> None:
    if has_shape(said, [_REFUSED]):
        if said["jaxdist"] != PROTOCOL:
            raise RefusedError(
                f"{door.channel}: another version of jaxdist runs at {where} (protocol {said['jaxdist']}, here"
                f" {PROTOCOL}); {SAME_VERSION}"
            )
        raise RefusedError(f"{door.channel}: {where} does not take this process's token; {SAME_TOKEN}")
    if not has_shape(said, [shape]):
        raise Foreign(f"what answers at {where} is not jaxdist's {door.channel}")


def listen_to(door: Door) -> Generator[JsonObject, JsonObject, tuple[JsonObject, Keys]]:
    """The listener's part: yields {} first, then what to answer, and returns the last answer with the keys. Raises
    `Stranger`."""
    said = yield {}
    if not isinstance(said.get("jaxdist"), int):
        raise Stranger("it is not jaxdist's")
    if not has_shape(said, [_HELLO]) or said["jaxdist"] != PROTOCOL:
        raise Stranger(f"another version of jaxdist; {SAME_VERSION}", "version")
    nonces = str(said["nonce"]), secrets.token_hex(16)
    said = yield {"nonce": nonces[1]}
    if not has_shape(said, [_PROOF]):
        raise Stranger("it is not jaxdist's")
    if not _same(door, "caller", nonces, said):
        raise Stranger(f"it does not know this job's token; if it is a process of this job: {SAME_TOKEN}", "token")
    return {"proof": _prove(door, "listener", nonces).hex()}, _keys(door, nonces)
