"""The roll call before a job starts: process 0 waits for the others at its address, and names who is missing.

JAX's own service names nobody: it ends all processes with SIGABRT when one does not come or comes twice, and jax 0.10
crashes when its port is taken. So the processes first meet here, over plain TCP, at the address and port at which the
service starts afterwards. A process sends one line of JSON that says who it is; process 0 answers with lines that say
who is missing, and with a last one that says go, or why not. There is no secret in it, and no more trust than in the
service itself, which has no authentication: keep the port inside the cluster.
"""

import contextlib
import errno
import ipaddress
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from jaxdist.errors import UserError

TIMEOUT = "JAXDIST_JOIN_TIMEOUT"
TIMEOUT_S = 300.0  # until all processes have come, where the environment sets none
NOTICE_S = 15.0  # until a process that waits says so; then after four times as long, and so on
STATE_S = 1.0  # between two lines of process 0 that say who is missing
LINGER_S = 5.0  # for which a process 0 that has refused a process tells those who come later why
QUIET_S = 5.0  # process 0 said nothing for so long: it is stuck
LINE_BYTES = 4096
RETRY_S = 0.05


class MissingPeers(RuntimeError):
    """Not all processes of the job have come in time. The message is one line that names the ranks."""


class PortTaken(UserError):
    """Another program listens on the coordinator's port."""


class Meeting(NamedTuple):
    """Where a process looks for process 0. key: of the job; a process 0 with another one is another job's."""

    host: str
    port: int
    key: str


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


def ranks(numbers: Collection[int]) -> str:
    """ "rank 3", "ranks 1, 2 and 5", "ranks 1-7 and 9"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [part for run in runs for part in (map(str, run) if len(run) < 3 else [f"{run[0]}-{run[-1]}"])]
    listed = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    return f"rank{'s' if len(numbers) > 1 else ''} {listed}"


def address(host: str, port: int) -> str:
    """ "host:port", with brackets round an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int, seconds: float) -> socket.socket:
    """A socket that listens on one address of this machine, that of `host`, and on no other. Raises `UserError`,
    `PortTaken` for a port that is in use.

    seconds: for how long to wait for the name: in Kubernetes it may be known later than the process starts.
    """
    where, deadline = address(host, port), time.monotonic() + seconds
    mend = (
        "give an address of the host of rank 0; or, if it is reached at another address than its own, set"
        " JAX_COORDINATOR_BIND_ADDRESS=ADDRESS:PORT to its own"
    )
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            break
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise UserError(f"coordinator: the host of {where} is not known to rank 0 ({error}); {mend}") from error
            time.sleep(0.5)
    for family, kind, protocol, _, target in found:
        if ipaddress.ip_address(str(target[0]).partition("%")[0]).is_unspecified:
            raise UserError(f"coordinator: {where} is all addresses of a machine; {mend}")
        server = socket.socket(family, kind, protocol)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier attempt may linger
            server.bind(target)
            server.listen(1024)
            server.setblocking(False)
            return server
        except OSError as error:
            server.close()
            if error.errno != errno.EADDRNOTAVAIL:
                reason = os.strerror(error.errno or 0)
                kind_of = PortTaken if error.errno == errno.EADDRINUSE else UserError
                raise kind_of(
                    f"coordinator: {where}: port {port}: {reason}; set a free one (MASTER_PORT or"
                    " JAX_COORDINATOR_ADDRESS), or is another process rank 0 too?"
                ) from error
    shown = ", ".join(sorted({str(entry[4][0]) for entry in found}))
    raise UserError(f"coordinator: {where} ({shown}) is no address of this machine, on which rank 0 runs; {mend}")


class _Peer:
    """A connection at process 0: what it has sent, and who it says it is."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.received, self.rank, self.name = connection, b"", -1, ""

    def say(self, status: str, text: str = "") -> None:
        """Send a line. A peer that is gone or does not read is found out when its connection is read."""
        line = json.dumps({"jaxdist": 1, "status": status, "text": text[:2000]}) + "\n"
        with contextlib.suppress(OSError):
            self.connection.send(line.encode())


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line of this protocol, or None."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) and said.get("jaxdist") == 1 else None


class _Desk:
    """Process 0 while it waits for the others."""

    def __init__(self, server: socket.socket, processes: int, key: str) -> None:
        self.server, self.processes, self.key = server, processes, key
        self.selector = selectors.DefaultSelector()
        self.selector.register(server, selectors.EVENT_READ)
        self.peers: list[_Peer] = []
        self.refusal = ""  # why this job cannot be
        self.told: set[int] = set()  # ranks that know of it

    def arrived(self) -> dict[int, _Peer]:
        return {peer.rank: peer for peer in self.peers if peer.rank >= 0}

    def missing(self) -> set[int]:
        return set(range(1, self.processes)) - set(self.arrived())

    def work(self, seconds: float) -> None:
        """Take who comes and see who goes, for so long at most."""
        for key, _ in self.selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(OSError):  # it has gone already
                    connection, _ = self.server.accept()
                    connection.setblocking(False)
                    self.peers.append(_Peer(connection))
                    self.selector.register(connection, selectors.EVENT_READ, self.peers[-1])
            else:
                self.read(key.data)

    def read(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.received += data
        line, end, _ = peer.received.partition(b"\n")
        if not data or len(peer.received) > LINE_BYTES or (end and peer.rank < 0 and not self.meet(peer, line)):
            self.selector.unregister(peer.connection)
            peer.connection.close()
            self.peers.remove(peer)

    def meet(self, peer: _Peer, line: bytes) -> bool:
        """Whether it belongs here. Sets `refusal` where two processes cannot be of one job."""
        said = _parse(line)
        if said is None:
            return False
        if said.get("key") != self.key:
            peer.say("other")
            return False
        rank, name = said.get("rank"), f"process {said.get('pid')} on {str(said.get('host'))[:64]!r}"
        text = ""
        if said.get("processes") != self.processes:
            text = f"rank {rank} ({name}) was started for {said.get('processes')} processes, rank 0 for"
            text += f" {self.processes}; start all with the same number"
        elif not isinstance(rank, int) or not 0 <= rank < self.processes:
            text = f"rank {rank} ({name}) of a job of {self.processes} processes; allowed: 0 to {self.processes - 1}"
        elif rank == 0 or rank in self.arrived():
            other = "this process" if rank == 0 else self.arrived()[rank].name
            text = f"rank {rank} is given twice: to {other} and to {name}; give each process a rank of its own"
        number = rank if isinstance(rank, int) else -1
        if text and not self.refusal:
            self.refusal = text
            for each in self.peers:
                each.say("refused", text)
            self.told = {*self.arrived(), number}
        elif self.refusal:
            peer.say("refused", self.refusal)
            self.told.add(number)
        peer.rank, peer.name = -2 if self.refusal else number, name
        return True

    def linger(self, seconds: float) -> None:
        """Tell those who come later, too: they would look for process 0 until their time is up."""
        deadline = time.monotonic() + seconds
        while not self.told.issuperset(range(1, self.processes)) and (left := deadline - time.monotonic()) > 0:
            self.work(left)

    def close(self, seconds: float) -> None:
        """Let the others hang up first, for so long at most: their side keeps the closed connection, not this port."""
        deadline = time.monotonic() + seconds
        self.selector.unregister(self.server)
        self.server.close()
        while self.arrived() and time.monotonic() < deadline:
            self.work(0.1)
        for peer in self.peers:
            peer.connection.close()
        self.selector.close()


def gather(server: socket.socket, *, processes: int, key: str, seconds: float) -> None:
    """Process 0's part: wait until each of the other ranks is here, tell all to go on, close `server`.

    Raises `MissingPeers` after `seconds`, `UserError` for a rank given twice or for another number of processes; those
    who are here hear of it too, and of the latter those who come within `LINGER_S`.
    """
    where = address(*server.getsockname()[:2])
    desk = _Desk(server, processes, key)
    begun = told = time.monotonic()
    notice = NOTICE_S
    try:
        while missing := desk.missing():
            now = time.monotonic()
            if now >= begun + seconds:
                text = f"{ranks(missing)} of {processes} did not come to {where} within {seconds:g} s"
                if ipaddress.ip_address(server.getsockname()[0].partition("%")[0]).is_loopback:
                    text += " (an address that only processes of the same host can reach)"
                for peer in desk.arrived().values():
                    peer.say("missing", text)
                raise MissingPeers(text)
            if now >= begun + notice:
                print(f"rank 0 waits for {ranks(missing)} of {processes} at {where}", file=sys.stderr, flush=True)
                notice *= 4
            if now >= told + STATE_S:
                told = now
                for peer in desk.arrived().values():
                    peer.say("waiting", ranks(missing))
            desk.work(min(STATE_S, begun + seconds - now))
            if desk.refusal:
                desk.linger(LINGER_S)
                raise UserError(desk.refusal)
        for peer in desk.arrived().values():
            peer.say("go")
    finally:
        desk.close(2.0)


def _lines(connection: socket.socket, quiet: Callable[[], float]) -> Any:
    """Lines that come; ends with the connection. Raises `TimeoutError` when none comes within `quiet()` seconds."""
    received = b""
    while len(received) <= LINE_BYTES:
        connection.settimeout(max(0.01, quiet()))
        data = connection.recv(LINE_BYTES)
        received += data
        while b"\n" in received:
            line, _, received = received.partition(b"\n")
            yield line
        if not data:
            if received:
                yield received
            return


class _Caller:
    """A process other than 0 while it waits. `state` is what it knows of why it cannot go on."""

    def __init__(self, rank: int, processes: int, seconds: float) -> None:
        self.rank, self.processes, self.seconds = rank, processes, seconds
        self.deadline = time.monotonic() + seconds
        self.state = "process 0 has not been found"
        self.notice = time.monotonic() + NOTICE_S

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def wait(self, seconds: float) -> None:
        time.sleep(max(0.0, min(seconds, self.left())))
        if time.monotonic() > self.notice:
            print(f"rank {self.rank} of {self.processes} waits: {self.state}", file=sys.stderr, flush=True)
            self.notice += 3 * NOTICE_S

    def connect(self, meeting: Meeting) -> socket.socket | None:
        where = address(meeting.host, meeting.port)
        try:
            return socket.create_connection((meeting.host, meeting.port), max(0.01, min(5.0, self.left())))
        except (OSError, UnicodeError) as error:
            self.state = f"process 0 cannot be reached at {where} ({getattr(error, 'strerror', None) or error})"
            return None

    def call(self, meeting: Meeting, connection: socket.socket) -> bool:
        """Whether process 0 says go. False: it is not there, or not this job's; try again."""
        hello = {
            "jaxdist": 1,
            "key": meeting.key,
            "rank": self.rank,
            "processes": self.processes,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        where = address(meeting.host, meeting.port)
        self.state = f"something answers at {where}, but no process 0 that waits for this one: is a job running there"
        self.state += " already, or has rank 0 gone on without this process?"
        connection.sendall((json.dumps(hello) + "\n").encode())
        for line in _lines(connection, self.left):
            said = _parse(line) or {"status": "foreign"}
            status, text = said["status"], str(said.get("text", ""))
            if status == "go":
                return True
            if status == "refused":
                raise UserError(text)
            if status == "missing":
                raise MissingPeers(text)
            if status == "other":
                self.state = f"at {where} a process 0 waits, but for another job (JAXDIST_JOB_ID is not the same)"
            if status != "waiting":
                return False
            self.state = f"process 0 at {where} waits for {text}"
            self.deadline = max(self.deadline, time.monotonic() + QUIET_S)  # it is process 0 that counts
        return False


def report(find: Callable[[], Meeting | None], *, rank: int, processes: int, seconds: float) -> tuple[str, int]:
    """The other processes' part: find process 0, wait until it says go, then until the service that it starts is there.
    Returns the IP address and port of process 0.

    find: where process 0 is, asked again before each try; None while that is not known. Raises `MissingPeers` after
    `seconds`, `UserError` for what process 0 refuses.
    """
    caller = _Caller(rank, processes, seconds)
    while caller.left() > 0:
        meeting = find()
        connection = meeting and caller.connect(meeting)
        if meeting and connection:
            with connection, contextlib.suppress(OSError):  # it has hung up, or keeps silent
                peer = connection.getpeername()[:2]
                if caller.call(meeting, connection):
                    connection.close()
                    return _await_service(caller, *peer)
        caller.wait(RETRY_S if not connection else 0.5)
    raise MissingPeers(f"rank {rank} of {processes} has waited for {seconds:g} s: {caller.state}")


def _await_service(caller: _Caller, host: str, port: int) -> tuple[str, int]:
    """gRPC would wait for a second after it has come too early."""
    caller.deadline = max(caller.deadline, time.monotonic() + 30.0)
    while caller.left() > 0:
        connection = caller.connect(Meeting(host, port, ""))
        if connection:
            connection.close()
            return host, port
        caller.wait(0.01)
    raise MissingPeers(f"rank {caller.rank} of {caller.processes}: all have come, then {caller.state}")
