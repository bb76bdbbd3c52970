"""The launchers of several hosts: they meet at host 0 before each attempt, hear of each other's failures, end together.

Host 0's launcher keeps one connection to each of the others for the whole job. Before an attempt it waits for all of
them, or for `--min-nodes` when the time is over, and tells each which ranks it starts. A host that comes later joins at
the next restart. The connections are those of the roll call, and as little trusted: keep the port inside the cluster.
"""

import contextlib
import functools
import secrets
import select
import sys
import time
from dataclasses import dataclass
from typing import Any

from jaxdist.errors import UserError
from jaxdist.launcher.ranks import POLL_S, HostPlace, Outcome, Peers, first_cause
from jaxdist.runtime.connection import NAME_S, Connection, JsonObject, format_address, listen, open_connection
from jaxdist.runtime.join.roll_call import NOTICE_S, MissingPeers
from jaxdist.runtime.rank_names import name_ranks

LAUNCHER_PROTOCOL = 2  # of the messages between launchers; a hello carries it as "jaxdist", and another one is refused
SETTLE_S = 15.0  # beyond the grace period, until another host must have said how its ranks ended
LOST_S = 30  # a host that answers nothing for so long is lost: one without power or network does not hang up
TRY_S, PAUSE_S = 2.0, 0.2  # of a try to reach host 0, and until the next one; also after one that host 0 hung up on
CLOSE_S = 5.0  # in which a last message must be sent


_hosts = functools.partial(name_ranks, noun="host")  # "host 1", "hosts 1 and 2"


@dataclass(eq=False)
class _Host:
    """Another host, as host 0 knows it. node: -1 until it has said its number. launcher: a name of its launcher's
    own."""

    connection: Connection
    node: int = -1
    procs: int = 0
    launcher: str = ""


class FirstHost(Peers):
    """The launcher of host 0, in its dealings with those of the other hosts."""

    def __init__(self, where: tuple[str, int], *, nnodes: int, min_nodes: int, seconds: float, grace: float) -> None:
        self.where, self.nnodes, self.min_nodes, self.seconds, self.grace = where, nnodes, min_nodes, seconds, grace
        self.server = listen(*where, NAME_S)
        self.known: list[_Host] = []
        self.active: dict[int, _Host] = {}  # the hosts of this attempt, by number
        self.ends: dict[int, JsonObject] = {}  # how the ranks of each have ended, as it said
        self.failed = self.told = False  # whether one of them has failed, and whether they were told to stop

    def meet(self, procs: int, attempt: int, signals: list[int]) -> HostPlace | None:
        """Wait for the other hosts and say who starts what. None after a signal. Raises `MissingPeers`."""
        begun, notice = time.monotonic(), NOTICE_S
        shown = format_address(*self.where)
        while len(ready := self.ready()) < self.nnodes - 1:
            missing, now = sorted(set(range(1, self.nnodes)) - set(ready)), time.monotonic() - begun
            if signals:
                return None
            if now > notice:
                text = f"[launch] waiting for {_hosts(missing)} of {self.nnodes} at {shown}"
                print(text, file=sys.stderr, flush=True)
                notice *= 4
            if now > self.seconds:
                if len(ready) + 1 >= self.min_nodes:
                    break
                raise MissingPeers(f"{_hosts(missing)} of {self.nnodes} did not come to {shown} in {self.seconds:g} s")
            time.sleep(POLL_S)
        self.active, self.ends, self.failed, self.told = dict(sorted(ready.items())), {}, False, False
        job, world = f"{secrets.token_hex(8)}-{attempt}", procs + sum(host.procs for host in ready.values())
        first, place = procs, HostPlace(0, len(ready) + 1, 0, world, self.where[0], self.where[1] + 1, job)
        for node, host in enumerate(self.active.values(), start=1):
            own = place._replace(node=node, first_rank=first)
            host.connection.send({"status": "start", "attempt": attempt, "place": own})
            first += host.procs
        return place

    def ready(self) -> dict[int, _Host]:
        """The hosts that have said who they are, by number."""
        while select.select([self.server], [], [], 0)[0]:
            with contextlib.suppress(OSError):  # it has gone already
                self.known.append(_Host(Connection(self.server.accept()[0], LOST_S)))
        for host in self.known:
            for said in host.connection.receive():
                if said.get("status") == "hello" and host.node < 0:
                    self._hear_hello(host, said)
        self.known = [host for host in self.known if host.connection.open]
        return {host.node: host for host in self.known if host.node > 0}

    def _hear_hello(self, host: _Host, said: JsonObject) -> None:
        """Take a host in, or refuse it."""
        node, procs, launcher = said.get("node"), said.get("procs"), str(said.get("launcher", ""))
        for other in self.known:
            if other.node == node and other.launcher == launcher != "":  # it has lost that connection
                other.connection.close()
        if not isinstance(node, int) or not isinstance(procs, int) or not 1 <= procs <= 100_000:
            host.connection.close()
        elif said.get("jaxdist") != LAUNCHER_PROTOCOL:
            text = f"host {node} runs another version of jaxdist than host 0; install the same on every host"
            self._refuse(host, text, said.get("jaxdist"))
        elif said.get("nnodes") != self.nnodes or not 0 < node < self.nnodes:
            self._refuse(
                host,
                f"--node-rank: {node} of --nnodes {said.get('nnodes')}, but host 0 was started for {self.nnodes} hosts;"
                " start all with the same, each with its own rank",
            )
        elif any(other.node == node and other.connection.open for other in self.known):
            self._refuse(host, f"--node-rank: {node} is given twice; give each host one of its own")
        else:
            host.node, host.procs, host.launcher = node, procs, launcher

    def _refuse(self, host: _Host, text: str, protocol: object = LAUNCHER_PROTOCOL) -> None:
        """Tell a host why it cannot be of this job; in its own protocol, for one of version 1 reads no other."""
        host.connection.send({"jaxdist": protocol, "status": "refused", "text": text})

    def lost(self, *, failed: bool) -> bool:
        """See `Peers`."""
        self._read()
        if (failed or self.failed) and not self.told:
            self.told = True
            for host in self.active.values():
                host.connection.send({"status": "stop"})
        return self.failed

    def _read(self) -> None:
        for node, host in self.active.items():
            for said in host.connection.receive():
                if said.get("status") == "failed":
                    self.failed = True
                elif said.get("status") == "ended":
                    self.ends[node] = said
            if not host.connection.open and node not in self.ends:
                self.failed = True

    def settle(self, own: Outcome, signals: list[int]) -> Outcome:
        """Wait until the ranks of all hosts have ended, and return how. A lost host is hung up on, and comes back if it
        lives; `elsewhere` is set then. A host that was asked to stop stops all."""
        deadline = float("inf")
        while [node for node, host in self.active.items() if host.connection.open and node not in self.ends]:
            self.lost(failed=own.cause is not None)
            if self.told:
                deadline = min(deadline, time.monotonic() + self.grace + SETTLE_S)
            if time.monotonic() > deadline:
                for node in set(self.active) - set(self.ends):
                    self.active[node].connection.close()
            if len(signals) > 1:
                break
            time.sleep(POLL_S)
        self._read()
        statuses, killed, causes = dict(own.statuses), set(own.killed), [own.cause]
        for said in self.ends.values():
            statuses |= {int(rank): int(status) for rank, status in said["statuses"].items()}
            killed |= set(said["killed"])
            causes.append(said["cause"])
            if said["stopped"] and not signals:
                signals.append(0)
        cause = first_cause([(rank, statuses[rank]) for rank in causes if rank is not None])
        return Outcome(statuses, cause, frozenset(killed), set(self.active) != set(self.ends))

    def decide(self, status: int | None) -> None:
        """Tell the others to go on (None) or to end."""
        for host in self.active.values():
            host.connection.send({"status": "again" if status is None else "over", "exit": status})

    def close(self) -> None:
        """Hang up."""
        for host in self.known:
            host.connection.close(CLOSE_S)
        self.server.close()


class OtherHost(Peers):
    """The launcher of any other host, in its dealings with that of host 0."""

    def __init__(self, where: tuple[str, int], *, node: int, nnodes: int, seconds: float) -> None:
        self.where, self.node, self.nnodes, self.seconds = where, node, nnodes, seconds
        self.connection: Connection | None = None
        self.failed = self.told = False  # whether another host has failed; whether host 0 knows that this one has
        self.verdict: JsonObject | None = None  # of host 0 on the last attempt
        self.begin: JsonObject | None = None  # what host 0 has said of the next one
        self.attempt, self.launcher = 0, secrets.token_hex(8)

    def meet(self, procs: int, signals: list[int]) -> HostPlace | None:
        """Wait for host 0 to say what to start. None after a signal. Raises `MissingPeers`, `UserError`."""
        begun, notice, shown = time.monotonic(), NOTICE_S, format_address(*self.where)
        while not signals:
            now = time.monotonic() - begun
            if self.connection is None or not self.connection.open:
                if now > self.seconds:
                    raise MissingPeers(f"host 0 cannot be reached at {shown} since {self.seconds:g} s")
                self._connect(procs)
            if self.connection is not None:
                self._read(self.connection)
            if self.begin is not None:
                place, self.attempt = HostPlace(*self.begin["place"]), int(self.begin["attempt"])
                self.begin, self.verdict, self.told = None, None, False
                return place
            if now > notice:
                print(f"[launch] host {self.node} waits for host 0 at {shown}", file=sys.stderr, flush=True)
                notice *= 4
            time.sleep(POLL_S if self.connection is not None and self.connection.open else PAUSE_S)
        return None

    def _connect(self, procs: int) -> None:
        try:
            self.connection = open_connection(*self.where, TRY_S, LOST_S)
        except OSError:  # not there yet
            return
        who: dict[str, Any] = {"node": self.node, "nnodes": self.nnodes, "procs": procs, "launcher": self.launcher}
        self.connection.send({"jaxdist": LAUNCHER_PROTOCOL, "status": "hello"} | who)

    def lost(self, *, failed: bool) -> bool:
        """See `Peers`."""
        assert self.connection is not None
        if failed and not self.told:
            self.told = True
            self.connection.send({"status": "failed"})
        self._read(self.connection)
        return self.failed

    def _read(self, connection: Connection) -> None:
        for said in connection.receive():
            status = said.get("status")
            if status == "refused":
                raise UserError(str(said.get("text")))
            if status == "start":  # it may come together with the verdict on the last attempt
                self.begin, self.failed = said, False
            elif status == "stop":
                self.failed = True
            elif status in ("again", "over"):
                self.verdict = said
        self.failed |= not connection.open

    def settle(self, own: Outcome, signals: list[int]) -> tuple[bool, int | None]:
        """Say how the ranks of this host ended: (whether host 0 has decided, the exit status or None to go on)."""
        assert self.connection is not None
        ended = {"statuses": own.statuses, "killed": sorted(own.killed), "cause": own.cause, "stopped": bool(signals)}
        self.connection.send({"status": "ended"} | ended)
        while self.verdict is None and self.connection.open and len(signals) < 2:
            self._read(self.connection)
            time.sleep(POLL_S)
        return (False, None) if self.verdict is None else (True, self.verdict.get("exit"))

    def close(self) -> None:
        """Hang up."""
        if self.connection is not None:
            self.connection.close()
