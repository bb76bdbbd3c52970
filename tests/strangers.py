"""Strangers on the network: what calls a listening socket of a job without its token, and what misuses it with one."""

import contextlib
import copy
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jaxdist.runtime.network.connection import Connection, open_connection
from jaxdist.runtime.network.handshake import PROTOCOL, Door, call

T = TypeVar("T")
TOKEN = "0123456789abcdef" * 4
NONCE = "ab" * 16


def while_polling(make: Callable[[], T], poll: Callable[[], object]) -> T:
    """What `make` returns, or raises: it calls a listener that `poll` serves meanwhile."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.append(make())
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        poll()
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]


def say(where: Any, *pieces: bytes) -> list[bytes]:
    """Call, say some pieces, each after an answer to the one before, and hang up: what was answered to each."""
    answers = []
    with socket.create_connection(where) as stream:
        stream.settimeout(3.0)
        for piece in pieces:
            with contextlib.suppress(OSError):  # it is hung up on meanwhile
                stream.sendall(piece)
            try:
                answers.append(stream.recv(1 << 16))
            except TimeoutError:
                answers.append(b"nothing")
            except OSError:
                answers.append(b"")
    return answers


def line(**message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


HELLO = line(jaxdist=PROTOCOL, nonce=NONCE)
WRONG: tuple[Any, ...] = (None, True, -1, 1.5, 10**400, "", "x", "\ud800", [], [[]], {}, {"a": 1})

# What a stranger says, and goes. After each of them the listener hangs up.
NOISE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "not text": b"\xff\xfe\n",
    "half a surrogate pair as bytes": b'{"jaxdist": 3, "nonce": "\xed\xa0\x80"}\n',
    "half a surrogate pair": line(hello=1, token="\ud800"),
    "deep": b"[" * 900 + b"\n",
    "deep and long": b"[" * 100_000 + b"\n",
    "endless": b"x" * (2 << 20),
    "no object": b"[]\n",
    "two at once": HELLO + HELLO,
    "a host of the version before": line(jaxdist=2, status="hello", node=1, nnodes=2, procs=1, launcher="x"),
    "a process of the version before": line(jaxdist=1, key="k", rank=1, processes=2, host="h", pid=1),
    "a later version": line(jaxdist=99, nonce=NONCE),
    "one field more": line(jaxdist=PROTOCOL, nonce=NONCE, more=1),
    **{f"jaxdist={wrong!r:.20}": line(jaxdist=wrong, nonce=NONCE) for wrong in WRONG},
    **{f"nonce={wrong!r:.20}": line(jaxdist=PROTOCOL, nonce=wrong) for wrong in WRONG},
}
PROOFS = {  # the same for the second line
    "forged": line(proof="0" * 64),
    "another message": line(status="ended", statuses={"2": 0}, killed=[], cause=None, stopped=False),
    **{f"proof={wrong!r:.20}": line(proof=wrong) for wrong in WRONG},
}


def attack(where: Any) -> None:
    """Say all of that, one after the other, and leave half a hello."""
    for noise in NOISE.values():
        assert say(where, noise)[-1] in (b"", *REFUSALS), noise[:80]
    for proof in PROOFS.values():
        answers = say(where, HELLO, proof)
        assert json.loads(answers[0]).keys() == {"nonce"} and answers[1] in (b"", *REFUSALS), proof[:80]
    with socket.create_connection(where) as stream:
        stream.sendall(HELLO[:20])


REFUSALS = (line(jaxdist=PROTOCOL, refused="version"), line(jaxdist=PROTOCOL, refused="token"))


def transcript(where: Any, door: Door) -> list[bytes]:
    """The two lines of a caller that knows the token, which has been let in."""
    calling = call(door, "there")
    said = [line(**next(calling))]
    with socket.create_connection(where) as stream:
        stream.settimeout(3.0)
        stream.sendall(said[0])
        said.append(line(**calling.send(json.loads(stream.recv(1 << 16)))))
        stream.sendall(said[1])
        with contextlib.suppress(StopIteration):
            calling.send(json.loads(stream.recv(1 << 16)))
            raise AssertionError("not let in")
    return said


@contextlib.contextmanager
def mirror() -> Iterator[Any]:
    """The address of a listener that says to each caller what it has said itself."""

    def serve() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                with server.accept()[0] as stream:
                    while said := stream.recv(1 << 16):
                        answer = json.loads(said)
                        answer.pop("jaxdist", None)
                        stream.sendall(line(**answer))

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def silent(where: Any, count: int) -> Iterator[None]:
    """A context in which so many connections are there that say nothing."""
    with contextlib.ExitStack() as held:
        for _ in range(count):
            stream = held.enter_context(socket.socket())
            stream.setblocking(False)
            stream.connect_ex(where)
        yield


def mutations(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A message with one field less, one more, and with wrong values in each field, and in each place inside it."""
    yield message | {"more": 1}
    for name, value in message.items():
        yield {key: each for key, each in message.items() if key != name}
        for wrong in (*WRONG, "\ud800" * 9):
            if type(wrong) is not type(value):
                yield message | {name: wrong}
        if isinstance(value, list):
            yield message | {name: value[:-1]}
            yield message | {name: [*value, None]}
            for place in range(len(value)):
                changed = copy.deepcopy(value)
                changed[place] = {"a": [1]}
                yield message | {name: changed}
        if isinstance(value, dict):
            yield message | {name: value | {"x": [1]}}


def admitted(where: Any, door: Door, poll: Callable[[], object]) -> Connection:
    """A connection of somebody who knows the token, who may say anything on it."""
    return while_polling(lambda: open_connection(*where, 5.0, door), poll)
