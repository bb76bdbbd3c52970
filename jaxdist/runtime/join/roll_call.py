"""The roll call before a job starts: process 0 waits for the others at its address, and names who is missing.

JAX's own service names nobody: it ends all processes with SIGABRT when one does not come or comes twice, and jax 0.10
crashes when its port is taken. So the processes first meet here, at the address and port at which the service starts
afterwards. A process sends one message that says who it is. Process 0 answers with messages that say who is missing,
and with a last one that says go, or why not. All know the job's token (`handshake`). The service that starts afterwards
has no authentication: keep the port inside the cluster.
"""

import ipaddress
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import NamedTuple

from jaxdist.errors import UserError
from jaxdist.runtime.network.addresses import format_address, host_name
from jaxdist.runtime.network.connection import Connection, Connections, open_connection, reach
from jaxdist.runtime.network.handshake import Door, Foreign, RefusedError
from jaxdist.runtime.network.messages import JsonObject, Shape, one_of, string, whole
from jaxdist.runtime.rank_names import name_ranks

TIMEOUT = "JAXDIST_JOIN_TIMEOUT"
TIMEOUT_S = 300.0  # until all processes have come, where the environment sets none
NOTICE_S = 15.0  # until a process that waits says so; then after four times as long, and so on
STATE_S = 1.0  # between two messages of process 0 that say who is missing
LINGER_S = 5.0  # for which a process 0 that has refused a process tells those who come later why
QUIET_S = 5.0  # process 0 said nothing for so long: it is stuck
RETRY_S, REFUSED_RETRY_S = 0.05, 0.5  # until the next try, after no connection and after one in vain
SERVICE_S = 30.0  # until JAX's service is there, after the roll call
_HELLO: Shape = {"key": string, "rank": whole(), "processes": whole(), "host": string, "pid": whole()}
_ANSWER: Shape = {"status": one_of("waiting", "go", "refused", "missing", "other"), "text": string}


class MissingPeers(RuntimeError):
    """Not all processes of the job have come in time. The message is one line that names the ranks."""


class Meeting(NamedTuple):
    """Where a process looks for process 0.

    Args:
        host: Its address.
        port: Its port.
        key: Of the job; a process 0 with another one is another job's.
        token: The secret of those who meet there.
    """

    host: str
    port: int
    key: str
    token: str

    def door(self) -> Door:
        """What process 0 and the others know of each other."""
        return Door("roll call", self.token, (_HELLO, _ANSWER))


def join_timeout(environ: Mapping[str, str]) -> float:
    """Seconds until all processes must have come. Raises `UserError`."""
    text = environ.get(TIMEOUT) or str(TIMEOUT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 86400:
        raise UserError(f"{TIMEOUT}: {text!r} in the environment; allowed: seconds, more than 0 and at most 86400")
    return seconds


def _answer(connection: Connection, status: str, text: str = "") -> None:
    connection.send({"status": status, "text": text[:2000]})


class _Desk:
    """Process 0 while it waits for the others."""

    def __init__(self, server: socket.socket, processes: int, meeting: Meeting) -> None:
        self.processes, self.key = processes, meeting.key
        self.connections = Connections(server, meeting.door())
        self.arrived: dict[int, Connection] = {}  # by rank
        self.names: dict[Connection, str] = {}  # of processes that have said who they are
        self.refusal = ""  # why this job cannot start
        self.told: set[int] = set()  # ranks that know the refusal

    def missing(self) -> set[int]:
        return set(range(1, self.processes)) - set(self.arrived)

    def answer_all(self, status: str, text: str = "") -> None:
        for connection in self.arrived.values():
            _answer(connection, status, text)

    def work(self, seconds: float) -> None:
        """Notice who comes and who goes, for at most `seconds`."""
        for connection, messages in self.connections.poll(seconds):
            if connection not in self.names:
                for hello in [said for said in messages if "rank" in said][:1]:
                    self.meet(connection, hello)
            if not connection.open:
                self.names.pop(connection, None)
                self.arrived = {rank: each for rank, each in self.arrived.items() if each is not connection}

    def meet(self, connection: Connection, hello: JsonObject) -> None:
        """Take in a process, or hang up on one of another job. Sets `refusal` where it cannot be of this one."""
        if hello["key"] != self.key:
            _answer(connection, "other")
            self.connections.drop(connection)
            return
        name, rank = f"process {hello['pid']} on {hello['host'][:64]!r}", int(hello["rank"])
        self.names[connection] = name
        text = self.why_not(hello, name)
        if text and not self.refusal:
            self.refusal, self.told = text, {*self.arrived, rank}
            self.answer_all("refused", text)
            _answer(connection, "refused", text)
        elif self.refusal:
            _answer(connection, "refused", self.refusal)
            self.told.add(rank)
        else:
            self.arrived[rank] = connection

    def why_not(self, hello: JsonObject, name: str) -> str:
        """Why this process cannot be of this job, or ""."""
        rank, processes = int(hello["rank"]), int(hello["processes"])
        if processes != self.processes:
            return (
                f"rank {rank} ({name}) was started for {processes} processes, rank 0 for {self.processes}; start all"
                " with the same number"
            )
        if rank >= self.processes:
            return f"rank {rank} ({name}) of a job of {self.processes} processes; allowed: 0 to {self.processes - 1}"
        if rank == 0 or rank in self.arrived:
            other = "this process" if rank == 0 else self.names[self.arrived[rank]]
            return f"rank {rank} is given twice: to {other} and to {name}; give each process a rank of its own"
        return ""

    def linger(self, seconds: float) -> None:
        """Tell the refusal to those who come later, too, for at most `seconds`. They would otherwise look for process 0
        until their time is up."""
        deadline = time.monotonic() + seconds
        while not self.told.issuperset(range(1, self.processes)) and (left := deadline - time.monotonic()) > 0:
            self.work(left)

    def close(self, seconds: float) -> None:
        """Wait at most `seconds` for the others to hang up first, then hang up. The side that closes first keeps its
        port busy for a while, and JAX's service needs this one."""
        deadline = time.monotonic() + seconds
        self.connections.stop_listening()
        while self.arrived and time.monotonic() < deadline:
            self.work(0.1)
        self.connections.close()


def take_roll(server: socket.socket, *, processes: int, meeting: Meeting, seconds: float) -> None:
    """Process 0's part: wait until each of the other ranks is here, tell all to go on, close `server`.

    Raises `MissingPeers` after `seconds`, `UserError` for a rank given twice or for another number of processes; those
    who are here hear of it too, and of the latter those who come within `LINGER_S`.
    """
    host, port = server.getsockname()[:2]
    where, loopback = format_address(host, port), ipaddress.ip_address(host.partition("%")[0]).is_loopback
    desk = _Desk(server, processes, meeting)
    begun = told = time.monotonic()
    notice = NOTICE_S
    try:
        while missing := desk.missing():
            now = time.monotonic()
            if now >= begun + seconds:
                text = f"{name_ranks(missing)} of {processes} did not come to {where} within {seconds:g} s"
                text += " (an address that only processes of the same host can reach)" if loopback else ""
                desk.answer_all("missing", text)
                raise MissingPeers(text)
            if now >= begun + notice:
                print(f"rank 0 waits for {name_ranks(missing)} of {processes} at {where}", file=sys.stderr, flush=True)
                notice *= 4
            if now >= told + STATE_S:
                told = now
                desk.answer_all("waiting", name_ranks(missing))
            desk.work(min(STATE_S, begun + seconds - now))
            if desk.refusal:
                desk.linger(LINGER_S)
                raise UserError(desk.refusal)
        desk.answer_all("go")
    finally:
        desk.close(2.0)


class _Caller:
    """A process other than 0 while it waits. `state` says why it cannot go on, as far as it knows."""

    def __init__(self, rank: int, processes: int, seconds: float) -> None:
        self.rank, self.processes, self.seconds = rank, processes, seconds
        self.deadline = time.monotonic() + seconds
        self.state = "process 0 has not been found"
        self.notice, self.pause = time.monotonic() + NOTICE_S, RETRY_S

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def wait(self, seconds: float) -> None:
        time.sleep(max(0.0, min(seconds, self.left())))
        if time.monotonic() > self.notice:
            print(f"rank {self.rank} of {self.processes} waits: {self.state}", file=sys.stderr, flush=True)
            self.notice += 3 * NOTICE_S

    def connect(self, meeting: Meeting) -> Connection | None:
        """A connection to process 0, or None where it is not there, or not this job's."""
        where = format_address(meeting.host, meeting.port)
        try:
            return open_connection(meeting.host, meeting.port, max(0.01, min(5.0, self.left())), meeting.door())
        except Foreign as error:
            self.state = f"{error}: no process 0 that waits for this one. Is a job running there already, or has rank 0"
            self.state += " gone on without this process?"
            self.pause = REFUSED_RETRY_S
        except OSError as error:
            self.pause = RETRY_S
            self.state = f"process 0 cannot be reached at {where} ({error.strerror or error})"
        return None

    def call(self, meeting: Meeting, connection: Connection) -> bool:
        """Whether process 0 says go. False: it is not there, or not this job's; try again."""
        where = format_address(meeting.host, meeting.port)
        self.state, self.pause = f"process 0 at {where} has hung up", REFUSED_RETRY_S
        hello = {"key": meeting.key, "rank": self.rank, "processes": self.processes}
        connection.send(hello | {"host": host_name(), "pid": os.getpid()})
        while connection.open and self.left() > 0:
            for said in connection.receive(self.left()):
                status, text = said.get("status"), str(said.get("text", ""))
                if status == "go":
                    return True
                if status == "refused":
                    raise UserError(text)
                if status == "missing":
                    raise MissingPeers(text)
                if status == "other":
                    self.state = f"at {where} a process 0 waits, but for another job (its name is not the same)"
                if status != "waiting":
                    return False
                self.state = f"process 0 at {where} waits for {text}"
                self.deadline = max(self.deadline, time.monotonic() + QUIET_S)  # it is process 0 that counts
        return False


def answer_roll(find: Callable[[], Meeting | None], *, rank: int, processes: int, seconds: float) -> tuple[str, int]:
    """The other processes' part: find process 0, wait until it says go, then until the service that it starts is there.
    Returns the IP address and port of process 0. Raises `MissingPeers` after `seconds`, `UserError` for what process 0
    refuses.

    Args:
        find: Says where process 0 is, or None while that is not known. It is asked again before each try.
        rank: The number of this process.
        processes: How many the job has.
        seconds: How long to wait, where process 0 does not say that it waits, too.
    """
    caller = _Caller(rank, processes, seconds)
    while caller.left() > 0:
        meeting = find()
        try:
            connection = caller.connect(meeting) if meeting else None
        except RefusedError:
            if find() == meeting:  # else a file that leads elsewhere by now
                raise
            connection = None
        if meeting and connection:
            with closing(connection), suppress(OSError):  # process 0 has hung up already
                host, port = connection.stream.getpeername()[:2]
                if caller.call(meeting, connection):
                    connection.close()
                    return _await_service(caller, host, port)
        caller.wait(caller.pause)
    raise MissingPeers(f"rank {rank} of {processes} has waited for {seconds:g} s: {caller.state}")


def _await_service(caller: _Caller, host: str, port: int) -> tuple[str, int]:
    """Wait for JAX's service: gRPC itself would wait for a second after it has come too early."""
    caller.deadline = max(caller.deadline, time.monotonic() + SERVICE_S)
    where = format_address(host, port)
    while caller.left() > 0:
        try:
            reach(host, port, min(5.0, caller.left())).close()
            return host, port
        except OSError as error:
            caller.state = f"process 0 cannot be reached at {where} ({error.strerror or error})"
        caller.wait(0.01)
    raise MissingPeers(f"rank {caller.rank} of {caller.processes}: all have come, then {caller.state}")
