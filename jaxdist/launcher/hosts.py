"""The launchers of several hosts: they meet at host 0 before each attempt, hear of each other's failures, end together.

Host 0's launcher keeps one connection to each of the others for the whole job. Before an attempt it waits for all of
them, or for `--min-nodes` when the time is over, and tells each which ranks it starts; a host that comes later is taken
in at the next restart. Lines of JSON, as in the roll call, and as little trust: keep the port inside the cluster.
"""

import contextlib
import json
import secrets
import select
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxdist.errors import UserError
from jaxdist.launcher.ranks import Outcome, Peers, Place
from jaxdist.runtime.exit_status import STOPPED
from jaxdist.runtime.join.roll_call import NOTICE_S, MissingPeers, address, listen, ranks

POLL_S = 0.02
SETTLE_S = 15.0  # beyond the grace period, for another host to say how its ranks ended
# A host that answers nothing for so long is lost: one without power or network does not hang up.
ALIVE_IDLE_S, ALIVE_EVERY_S, ALIVE_S = 10, 5, 30
LINE_BYTES = 1 << 20  # of a message: it may hold the statuses of some thousand ranks


def hosts(numbers: Sequence[int]) -> str:
    """ "host 1", "hosts 1 and 2"."""
    return ranks(numbers).replace("rank", "host")


class Line:
    """A connection that carries messages and never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, ALIVE_IDLE_S),
            (socket.TCP_KEEPINTVL, ALIVE_EVERY_S),
            (socket.TCP_KEEPCNT, (ALIVE_S - ALIVE_IDLE_S) // ALIVE_EVERY_S),
            (socket.TCP_USER_TIMEOUT, 1000 * ALIVE_S),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.connection, self.received, self.open, self.node, self.procs = connection, b"", True, -1, 0
        self.launcher = ""  # which one of that host: a name of its own

    def send(self, **message: Any) -> None:
        """A connection that takes nothing is lost: that is found out when it is read."""
        try:
            self.connection.setblocking(True)
            self.connection.settimeout(5.0)
            self.connection.sendall((json.dumps({"jaxdist": 1, **message}) + "\n").encode())
            self.connection.setblocking(False)
        except OSError:
            self.close()

    def messages(self) -> list[dict[str, Any]]:
        """What has come by now."""
        while self.open:
            try:
                data = self.connection.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.received += data
            if not data or len(self.received) > LINE_BYTES:
                self.close()
        *lines, self.received = self.received.split(b"\n")
        found = []
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):  # noise
                said = json.loads(line)
                if isinstance(said, dict) and said.get("jaxdist") == 1:
                    found.append(said)
        return found

    def close(self) -> None:
        self.open = False
        self.connection.close()


class First(Peers):
    """Host 0's side."""

    def __init__(self, where: tuple[str, int], *, nnodes: int, min_nodes: int, seconds: float, grace: float) -> None:
        self.where, self.nnodes, self.min_nodes, self.seconds, self.grace = where, nnodes, min_nodes, seconds, grace
        self.server = listen(*where, 30.0)
        self.lines: list[Line] = []
        self.active: dict[int, Line] = {}
        self.failed: set[int] = set()
        self.ends: dict[int, dict[str, Any]] = {}
        self.told = False

    def meet(self, procs: int, attempt: int, signals: list[int]) -> Place | None:
        """Wait for the other hosts and say who starts what. None after a signal. Raises `MissingPeers`."""
        begun, notice = time.monotonic(), NOTICE_S
        shown = address(*self.where)
        while len(ready := self.ready()) < self.nnodes - 1:
            missing, now = sorted(set(range(1, self.nnodes)) - set(ready)), time.monotonic() - begun
            if signals:
                return None
            if now > notice:
                print(f"[launch] waiting for {hosts(missing)} of {self.nnodes} at {shown}", file=sys.stderr, flush=True)
                notice *= 4
            if now > self.seconds:
                if len(ready) + 1 >= self.min_nodes:
                    break
                raise MissingPeers(f"{hosts(missing)} of {self.nnodes} did not come to {shown} in {self.seconds:g} s")
            time.sleep(POLL_S)
        self.active, self.failed, self.ends, self.told = dict(sorted(ready.items())), set(), {}, False
        job, world = f"{secrets.token_hex(8)}-{attempt}", procs + sum(line.procs for line in ready.values())
        first, place = procs, Place(0, len(ready) + 1, 0, world, self.where[0], self.where[1] + 1, job)
        for node, line in enumerate(self.active.values(), start=1):
            line.send(status="start", attempt=attempt, place=place._replace(node=node, first_rank=first))
            first += line.procs
        return place

    def ready(self) -> dict[int, Line]:
        """Connections of hosts that have said who they are."""
        while select.select([self.server], [], [], 0)[0]:
            with contextlib.suppress(OSError):  # it has gone already
                self.lines.append(Line(self.server.accept()[0]))
        for line in self.lines:
            for said in line.messages():
                if said.get("status") == "hello" and line.node < 0:
                    self.hello(line, said)
        self.lines = [line for line in self.lines if line.open]
        return {line.node: line for line in self.lines if line.node > 0}

    def hello(self, line: Line, said: dict[str, Any]) -> None:
        node, procs, launcher = said.get("node"), said.get("procs"), str(said.get("launcher", ""))
        for other in self.lines:
            if other.node == node and other.launcher == launcher != "":  # it has lost that connection
                other.close()
        if not isinstance(node, int) or not isinstance(procs, int) or not 1 <= procs <= 100_000:
            line.close()
        elif said.get("nnodes") != self.nnodes or not 0 < node < self.nnodes:
            line.send(
                status="refused",
                text=f"--node-rank: {node} of --nnodes {said.get('nnodes')}, but host 0 was "
                f"started for {self.nnodes} hosts; start all with the same, each with its own rank",
            )
        elif any(other.node == node and other.open for other in self.lines):
            line.send(status="refused", text=f"--node-rank: {node} is given twice; give each host one of its own")
        else:
            line.node, line.procs, line.launcher = node, procs, launcher

    def lost(self, *, failed: bool) -> bool:
        """See `Peers`."""
        self.read()
        if (failed or self.failed) and not self.told:
            self.told = True
            for line in self.active.values():
                line.send(status="stop")
        return bool(self.failed)

    def read(self) -> None:
        for node, line in self.active.items():
            for said in line.messages():
                if said.get("status") == "failed":
                    self.failed.add(node)
                elif said.get("status") == "ended":
                    self.ends[node] = said
            if not line.open and node not in self.ends:
                self.failed.add(node)

    def settle(self, own: Outcome, signals: list[int]) -> Outcome:
        """How the ranks of all hosts ended; `told` where a host is lost: it is hung up on, and comes back if it
        lives. A wish to stop on one is one of all."""
        deadline = float("inf")
        while [node for node, line in self.active.items() if line.open and node not in self.ends]:
            self.lost(failed=own.cause is not None)
            if self.told:
                deadline = min(deadline, time.monotonic() + self.grace + SETTLE_S)
            if time.monotonic() > deadline:
                for node in set(self.active) - set(self.ends):
                    self.active[node].close()
            if len(signals) > 1:
                break
            time.sleep(POLL_S)
        self.read()
        lost = [node for node in self.active if node not in self.ends]
        statuses, killed, causes = dict(own.statuses), set(own.killed), [own.cause]
        for said in self.ends.values():
            statuses |= {int(rank): int(status) for rank, status in said["statuses"].items()}
            killed |= set(said["killed"])
            causes.append(said["cause"])
            if said["stopped"] and not signals:
                signals.append(0)
        found = sorted(
            (rank for rank in causes if rank is not None),
            key=lambda rank: (statuses[rank] != 2, statuses[rank] in (STOPPED, -6)),
        )
        return Outcome(statuses, found[0] if found else None, frozenset(killed), bool(lost))

    def decide(self, status: int | None) -> None:
        """Tell the others to go on (None) or to end."""
        for line in self.active.values():
            line.send(status="again" if status is None else "over", exit=status)

    def close(self) -> None:
        """Hang up."""
        for line in self.lines:
            line.close()
        self.server.close()


class Other(Peers):
    """The side of any other host."""

    def __init__(self, where: tuple[str, int], *, node: int, nnodes: int, seconds: float) -> None:
        self.where, self.node, self.nnodes, self.seconds = where, node, nnodes, seconds
        self.line: Line | None = None
        self.failed = self.told = False
        self.verdict: dict[str, Any] | None = None
        self.begin: dict[str, Any] | None = None
        self.attempt, self.launcher = 0, secrets.token_hex(8)

    def meet(self, procs: int, signals: list[int]) -> Place | None:
        """Wait for host 0 to say what to start. None after a signal. Raises `MissingPeers`, `UserError`."""
        begun, notice, shown = time.monotonic(), NOTICE_S, address(*self.where)
        while not signals:
            now = time.monotonic() - begun
            if self.line is None or not self.line.open:
                if now > self.seconds:
                    raise MissingPeers(f"host 0 cannot be reached at {shown} since {self.seconds:g} s")
                self.connect(procs)
            if self.line is not None:
                self.read()
            if self.begin is not None:
                place, self.attempt = Place(*self.begin["place"]), int(self.begin["attempt"])
                self.begin, self.verdict, self.told = None, None, False
                return place
            if now > notice:
                print(f"[launch] host {self.node} waits for host 0 at {shown}", file=sys.stderr, flush=True)
                notice *= 4
            time.sleep(POLL_S)
        return None

    def connect(self, procs: int) -> None:
        with contextlib.suppress(OSError, UnicodeError):  # not there yet
            self.line = Line(socket.create_connection(self.where, 2.0))
            self.line.send(status="hello", node=self.node, nnodes=self.nnodes, procs=procs, launcher=self.launcher)
            return
        time.sleep(0.2)

    def lost(self, *, failed: bool) -> bool:
        """See `Peers`."""
        assert self.line is not None
        if failed and not self.told:
            self.told = True
            self.line.send(status="failed")
        self.read()
        return self.failed

    def read(self) -> None:
        assert self.line is not None
        for said in self.line.messages():
            status = said.get("status")
            if status == "refused":
                raise UserError(str(said.get("text")))
            if status == "start":  # it may come together with the verdict on the last attempt
                self.begin, self.failed = said, False
            elif status == "stop":
                self.failed = True
            elif status in ("again", "over"):
                self.verdict = said
        self.failed |= not self.line.open

    def settle(self, own: Outcome, signals: list[int]) -> tuple[bool, int | None]:
        """Say how the ranks of this host ended: (whether host 0 has decided, the exit status or None to go on)."""
        assert self.line is not None
        self.line.send(
            status="ended", statuses=own.statuses, killed=sorted(own.killed), cause=own.cause, stopped=bool(signals)
        )
        while self.verdict is None and self.line.open and len(signals) < 2:
            self.read()
            time.sleep(POLL_S)
        return (False, None) if self.verdict is None else (True, self.verdict.get("exit"))

    def close(self) -> None:
        """Hang up."""
        if self.line is not None:
            self.line.close()
