"""Connections between processes of a job: who is let in, what is read, and how many may call."""

import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import strangers
from strangers import TOKEN, admitted, mirror, mutations, transcript, while_polling

from jaxdist.errors import UserError
from jaxdist.launcher import hosts
from jaxdist.runtime.join import roll_call
from jaxdist.runtime.network import connection as connections
from jaxdist.runtime.network.addresses import listen
from jaxdist.runtime.network.connection import Connection, Connections, check_token, open_connection
from jaxdist.runtime.network.handshake import PROTOCOL, Door, Foreign
from jaxdist.runtime.network.job_token import TOKEN as VARIABLE
from jaxdist.runtime.network.job_token import TOKEN_FILE, new_token, read_token
from jaxdist.runtime.network.messages import has_shape, read_line, string, whole
from jaxdist.runtime.watch import channel
from jaxdist.runtime.watch.blame import Beat, Blame
from jaxdist.runtime.watch.progress import PHASES

DOOR = Door("test", TOKEN, ({"n": whole(), "text": string},))


@pytest.fixture
def hub() -> Iterator[Connections]:
    with contextlib.closing(Connections(listen("127.0.0.1", 0), DOOR)) as made:
        yield made


def address(hub: Connections) -> Any:
    assert hub._server is not None
    return hub._server.getsockname()


def polls(hub: Connections) -> Any:
    return lambda: hub.poll(0.01)


def heard(hub: Connections, seconds: float = 5.0) -> list[Any]:
    """The next messages, from whomever."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if news := hub.poll(0.01):
            return [said for _, messages in news for said in messages]
    return []


def check_works(hub: Connections) -> None:
    caller = admitted(address(hub), DOOR, polls(hub))
    caller.send({"n": 1, "text": "a"})
    assert heard(hub) == [{"n": 1, "text": "a"}]
    caller.close()


def test_strangers_get_nowhere(hub: Connections, capfd: pytest.CaptureFixture[str]) -> None:
    while_polling(lambda: strangers.attack(address(hub)), lambda: [hub.poll(0.01), hub.all and pytest.fail("let in")])
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1 and told[0].startswith("test: 127.0.0.1:") and "is hung up on: it " in told[0]
    check_works(hub)


def test_what_one_has_said_is_of_no_use_to_another(hub: Connections) -> None:
    where = address(hub)
    said = while_polling(lambda: transcript(where, DOOR), polls(hub))
    assert all(TOKEN.encode() not in each for each in said)
    answers = while_polling(lambda: strangers.say(where, *said), polls(hub))
    assert "nonce" in json.loads(answers[0]) and json.loads(answers[1]) == {"jaxdist": PROTOCOL, "refused": "token"}
    said = while_polling(lambda: transcript(where, DOOR), polls(hub))
    hub.poll(0.01)  # both have hung up
    assert not hub.all
    for other in (DOOR._replace(channel="other"), DOOR._replace(token=TOKEN[::-1])):
        with pytest.raises(UserError, match=r"does not take this process's token; JAXDIST_TOKEN or --token-file must"):
            admitted(where, other, polls(hub))
    with mirror() as where, pytest.raises(UserError, match=rf"127\.0\.0\.1:{where[1]} does not know this job's token"):
        open_connection(*where, 5.0, DOOR)


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[Any]:
    """The address of something that says the same to whoever calls."""

    def serve() -> None:
        with server.accept()[0] as stream:
            stream.recv(4096)
            stream.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()
        thread.join()


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (strangers.line(jaxdist=99, refused="version"), UserError, r"another version of jaxdist .* \(protocol 99,"),
        (strangers.line(jaxdist=PROTOCOL, refused=1), Foreign, "is not jaxdist's test"),
        (b"HTTP/1.1 400 Bad Request\r\n", Foreign, "is not jaxdist's test"),
        (b"\0" * 3000, Foreign, "is not jaxdist's test"),
        (strangers.line(nonce="ab" * 15), Foreign, "is not jaxdist's test"),
    ],
    ids=range(5),
)
def test_another_version_and_something_else(answer: bytes, error: type[Exception], text: str) -> None:
    with answering(answer) as where, pytest.raises(error, match=text) as found:
        open_connection(*where, 5.0, DOOR)
    assert "\n" not in str(found.value)


def test_something_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(Foreign, match=r"has not said in 0.2 s who"):
        open_connection(*server.getsockname(), 0.2, DOOR)


def test_messages_that_were_changed_on_the_way() -> None:
    """Sent again, left out, changed, sent back; or said by one who has not the keys."""
    sent = [b"", b"", b""]
    for kept in (lambda: sent[0] * 2, lambda: sent[1], lambda: sent[0][:-3] + b"8}\n", lambda: b'{"n": 1}\n'):
        (own, far), (there, end) = socket.socketpair(), socket.socketpair()
        caller, listener = Connection(own), Connection(end)
        door = DOOR._replace(shapes=({"n": whole()},))
        caller.admit(door, b"c", b"l")
        listener.admit(door, b"l", b"c")
        for n in range(2):
            caller.send({"n": n})
            sent[n] = far.recv(4096)
        there.sendall(kept())
        said = listener.receive(1.0)
        assert said == ([{"n": 0}] if kept() == sent[0] * 2 else []) and not listener.open
        far.sendall(sent[0])
        assert caller.receive(1.0) == [] and not caller.open
        far.close()
        there.close()


def test_silent_strangers_give_way(hub: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the queue holds; then those who are known and those who say who they are come through. Their time
    ends."""
    monkeypatch.setattr(connections, "YOUNG_S", 0.05)
    hub._most = 20
    with strangers.silent(address(hub), 300):
        check_works(hub)
        assert len(hub._strangers) <= 20
        monkeypatch.setattr(connections, "STRANGER_S", 0.05)
        hub.poll(0.1)
        hub.poll(0.1)
    check_works(hub)


def test_no_descriptors_left(hub: Connections, capfd: pytest.CaptureFixture[str]) -> None:
    """The oldest stranger makes room; where there is none, the listener waits, and does not spin."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit(most: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))

    with strangers.silent(address(hub), 300):
        with Path("/dev/null").open() as probe:
            top = probe.fileno()
        try:
            limit(top + 5)
            for _ in range(5):
                hub.poll(0.01)
            assert 0 < len(hub._strangers) <= 5
            limit(3)
            for stranger in list(hub._strangers):
                hub.drop(stranger)
            begun, used = time.monotonic(), time.process_time()
            for _ in range(5):
                hub.poll(0.0)
            assert time.monotonic() - begun >= 5 * connections.FULL_S > 5 * (time.process_time() - used)
        finally:
            limit(before[0])
    assert "Too many open files" in capfd.readouterr().err
    check_works(hub)


MESSAGES = {
    "launcher": (
        {"status": "hello", "node": 1, "nnodes": 2, "procs": 1, "launcher": "a"},
        {"status": "refused", "text": "no"},
        {"status": "start", "attempt": 1, "place": [1, 2, 1, 2, "127.0.0.1", 29501, "job-1"]},
        {"status": "failed"},
        {"status": "ended", "statuses": {"1": 0, "2": -9}, "killed": [2], "cause": None, "stopped": False},
        {"status": "over", "exit": 75},
    ),
    "roll call": ({"key": "k", "rank": 1, "processes": 2, "host": "h", "pid": 7}, {"status": "go", "text": ""}),
    "watch": (
        {"hello": 1},
        {"beat": list(Beat(1, 2, "data", 0.5, 0.0))},
        {"failed": "KeyError: x", "status": 1, "symptom": False},
        {"facts": {"a": "1"}, "number": 1},
        {"agreed": None},
        {"pace": 10, "seconds": dict.fromkeys(PHASES, 0.5)},
        {"verdict": list(Blame("gone", (1,), "gone: rank 1", 75))},
        {"bye": True},
    ),
}
SHAPES = {"launcher": hosts._MESSAGES, "roll call": (roll_call._HELLO, roll_call._ANSWER), "watch": channel._MESSAGES}


@pytest.mark.parametrize("name", SHAPES)
def test_every_field_of_every_message_is_checked(name: str) -> None:
    for message in json.loads(json.dumps(MESSAGES[name])):
        assert has_shape(message, SHAPES[name]), message
        for wrong in mutations(message):
            # "" and "x" are texts, a null that is allowed is one: what else passes is of the same type
            assert not has_shape(wrong, SHAPES[name]) or "agreed" in wrong or "cause" in wrong or "exit" in wrong, wrong


def test_a_foreign_message_of_one_who_is_known(hub: Connections, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever it is, it ends this connection only, with one line."""
    bad = [*mutations({"n": 1, "text": "a"}), {"n": -1, "text": "a"}, {"n": float("nan"), "text": ""}, {}]
    for message in bad:
        caller = admitted(address(hub), DOOR, polls(hub))
        caller.send(message)
        assert heard(hub) == [] and not hub.all
        told = capfd.readouterr().err
        assert told.count("\n") == 1 and "it has sent what is no message of jaxdist's; install the same version" in told
        caller.close()
    caller = admitted(address(hub), DOOR, polls(hub))
    caller.send({"n": 1, "text": "\ud800 \U0001f600 \udcff"})
    assert heard(hub) == [{"n": 1, "text": "? \U0001f600 ?"}]
    caller.stream.sendall(b"[" * 50_000 + b"\n")
    assert heard(hub, 0.5) == [] and not hub.all
    caller.close()
    check_works(hub)


def test_lines() -> None:
    assert read_line(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    assert read_line(b'{"\\ud800": ["\\udfff"]}') == {"?": ["?"]}
    for bad in (
        b"",
        b"[]",
        b"[" * 900_000,
        b'{"a": "\xed\xa0\x80"}',
        b"9" * 5000,
        b'{"a": 1}}',
        '{"a": 1}'.encode("utf-16"),
    ):
        assert read_line(bad) is None


def test_a_token_is_needed_where_other_machines_reach() -> None:
    for host in ("127.0.0.1", "127.8.0.1", "::1"):
        check_token(host, DOOR._replace(token=""))
    for host in ("10.0.0.1", "192.0.2.1", "fe80::1%eth0", "0.0.0.0", "::"):
        check_token(host, DOOR)
        with pytest.raises(UserError, match=r"^test: .* the job has no token; JAXDIST_TOKEN or --token-file must be"):
            check_token(host, DOOR._replace(token=""))
    with pytest.raises(UserError, match=r"^test: 192\.0\.2\.1 can be reached by other machines"):  # before it connects
        open_connection("192.0.2.1", 9, 0.1, DOOR._replace(token=""))


def test_tokens(tmp_path: Path) -> None:
    assert read_token({}) == read_token({VARIABLE: "", TOKEN_FILE: ""}) == ""
    assert new_token() != new_token() and len(read_token({VARIABLE: new_token()})) == 64
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    assert read_token({VARIABLE: "x" * 16, TOKEN_FILE: str(path)}) == TOKEN
    path.chmod(0o644)
    with pytest.raises(UserError, match=r"^--token-file: '.*token' is open to all users .* \(chmod 600;"):
        read_token({TOKEN_FILE: str(path)})
    for bad in ("secret", "x" * 4097, "   "):
        with pytest.raises(UserError, match=r"^JAXDIST_TOKEN holds \d+ characters; allowed: 16 to 4096; make") as error:
            read_token({VARIABLE: bad})
        assert "secret" not in str(error.value).partition("make")[0]
    for missing in (tmp_path / "none", tmp_path, "a\0b"):
        with pytest.raises(UserError, match=r"^--token-file: .* cannot be read: "):
            read_token({TOKEN_FILE: str(missing)})
