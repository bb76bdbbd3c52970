"""The launchers of several hosts: they meet at host 0 before each attempt, hear of each other's failures, end together.

Host 0's launcher keeps one connection to each of the others for the whole job. Before an attempt it waits for all of
them, or for `--min-nodes` when the time is over, and tells each which ranks it starts. A host that comes later joins at
the next restart. All know the job's token (`jaxdist.runtime.network.handshake`).
"""

import functools
import secrets
import sys
import time
from dataclasses import dataclass
from typing import Any

from jaxdist.errors import UserError
from jaxdist.launcher.options import MAX_COUNT
from jaxdist.launcher.ranks import POLL_S, HostPlace, Outcome, Peers, first_cause
from jaxdist.runtime.join.roll_call import NOTICE_S, MissingPeers
from jaxdist.runtime.network.addresses import NAME_S, format_address, listen
from jaxdist.runtime.network.connection import Connection, Connections, open_connection, tell
from jaxdist.runtime.network.handshake import Door
from jaxdist.runtime.network.messages import (
    JsonObject,
    Shape,
    digits,
    flag,
    many,
    maybe,
    one_of,
    row,
    string,
    table,
    whole,
)
from jaxdist.runtime.rank_names import name_ranks

SETTLE_S = 15.0  # beyond the grace period, until another host must have said how its ranks ended
LOST_S = 30  # a host that answers nothing for so long is lost: one without power or network does not hang up
TRY_S, PAUSE_S = 2.0, 0.2  # of a try to reach host 0, and until the next one; also after one that host 0 hung up on
CLOSE_S = 5.0  # in which a last message must be sent
_MESSAGES: tuple[Shape, ...] = (
    {"status": one_of("hello"), "node": whole(1), "nnodes": whole(1), "procs": whole(1, MAX_COUNT), "launcher": string},
    {"status": one_of("refused"), "text": string},
    {"status": one_of("start"), "attempt": whole(1), "place": row(*[whole()] * 4, string, whole(1, 65535), string)},
    {"status": one_of("failed", "stop", "asked")},
    {
        "status": one_of("ended"),
        "statuses": table(digits, whole(-255, 255)),
        "killed": many(whole()),
        "cause": maybe(whole()),
        "stopped": flag,
    },
    {"status": one_of("again", "over"), "exit": maybe(whole(0, 255))},
)

_hosts = functools.partial(name_ranks, noun="host")  # "host 1", "hosts 1 and 2"


@dataclass(eq=False)
class _Host:
    """Another host, as host 0 knows it.

    Args:
        connection: To its launcher.
        node: Its number; -1 until it is taken in.
        procs: How many processes it starts.
        launcher: A name of its launcher's own.
        hello: What it has said of itself and has not been looked at yet.
        ranks: Of its processes in this attempt.
    """

    connection: Connection
    node: int = -1
    procs: int = 0
    launcher: str = ""
    hello: JsonObject | None = None
    ranks: range = range(0)


def _add_stop(signals: list[int]) -> bool:
    """Add a 0 to the signals if there are none. Whether there were none."""
    if signals:
        return False
    signals.append(0)
    return True


class FirstHost(Peers):
    """The launcher of host 0, in its dealings with those of the other hosts."""

    def __init__(
        self, where: tuple[str, int], token: str, *, nnodes: int, min_nodes: int, seconds: float, grace: float
    ) -> None:
        self.where, self.nnodes, self.min_nodes, self.seconds, self.grace = where, nnodes, min_nodes, seconds, grace
        self.connections = Connections(listen(*where, NAME_S), Door("launcher", token, _MESSAGES), LOST_S)
        self.name = secrets.token_hex(8)  # of the job, in all its attempts
        self.known: dict[Connection, _Host] = {}
        self.active: dict[int, _Host] = {}  # the hosts of this attempt, by number
        self.ends: dict[int, JsonObject] = {}  # how the ranks of each have ended, as it said
        self.failed = self.told = False  # whether one of them has failed, and whether they were told to stop
        self.passed_on = False  # whether they were told that one of them was asked to stop

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
        self.active, self.ends = dict(sorted(ready.items())), {}
        self.failed = self.told = self.passed_on = False
        job, world = f"{self.name}-{attempt}", procs + sum(host.procs for host in ready.values())
        first, place = procs, HostPlace(0, len(ready) + 1, 0, world, self.where[0], self.where[1] + 1, job)
        for node, host in enumerate(self.active.values(), start=1):
            own, host.ranks = place._replace(node=node, first_rank=first), range(first, first + host.procs)
            host.connection.send({"status": "start", "attempt": attempt, "place": own})
            first += host.procs
        return place

    def ready(self) -> dict[int, _Host]:
        """The hosts that have said who they are, by number."""
        self._read()
        for host in list(self.known.values()):
            if host.hello is not None:
                self._take_in(host, host.hello)
                host.hello = None
        return {host.node: host for host in self.known.values() if host.node > 0}

    def _take_in(self, host: _Host, hello: JsonObject) -> None:
        """Give a host its place, or refuse it."""
        node, launcher = int(hello["node"]), str(hello["launcher"])
        for other in list(self.known.values()):
            if other.node == node and other.launcher == launcher:  # it has lost that connection
                self._hang_up(other)
        text = ""
        if hello["nnodes"] != self.nnodes or node >= self.nnodes:
            text = (
                f"--node-rank: {node} of --nnodes {hello['nnodes']}, but host 0 was started for {self.nnodes} hosts;"
                " start all with the same, each with its own rank"
            )
        elif any(other.node == node for other in self.known.values()):
            text = f"--node-rank: {node} is given twice; give each host one of its own"
        if text:
            host.connection.send({"status": "refused", "text": text})
        else:
            host.node, host.procs, host.launcher = node, int(hello["procs"]), launcher

    def _hang_up(self, host: _Host) -> None:
        self.connections.drop(host.connection)
        self.known.pop(host.connection, None)

    def lost(self, *, failed: bool) -> bool:
        """See `Peers`."""
        self._read()
        if (failed or self.failed) and not self.told:
            self.told = True
            for host in self.active.values():
                host.connection.send({"status": "stop"})
        return self.failed

    def asked(self, signals: list[int]) -> bool:
        """See `Peers`. The others are told, too: their ranks may wait for some that do not come any more."""
        if self.passed_on or not any(said["stopped"] for said in self.ends.values()):
            return False
        self.passed_on = True
        for host in self.active.values():
            host.connection.send({"status": "asked"})
        return _add_stop(signals)

    def _read(self) -> None:
        """Hear all hosts, also those that have just come: they are taken in before the next attempt."""
        for connection, messages in self.connections.poll(0):
            host = self.known.setdefault(connection, _Host(connection))
            active = self.active.get(host.node) is host
            for said in messages:
                if said["status"] == "hello" and host.node < 0:
                    host.hello = said
                elif said["status"] == "failed" and active:
                    self.failed = True
                elif said["status"] == "ended" and active:
                    self._hear_end(host, said)
            if not connection.open:
                self._hang_up(host)
        for node, host in self.active.items():
            if not host.connection.open and node not in self.ends:
                self.failed = True

    def _hear_end(self, host: _Host, said: JsonObject) -> None:
        """Take in how the ranks of a host have ended: each of its own, and no other."""
        ranks = set(map(int, said["statuses"]))
        if ranks == set(host.ranks) and {*said["killed"], said["cause"]} <= ranks | {None}:
            self.ends[host.node] = said
        else:
            tell(f"[launch] host {host.node} says how other ranks than its own have ended; it is hung up on")
            self._hang_up(host)

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
                    self._hang_up(self.active[node])
            if len(signals) > 1:
                break
            time.sleep(POLL_S)
        self._read()
        statuses, killed, causes = dict(own.statuses), set(own.killed), [own.cause]
        for said in self.ends.values():
            statuses |= {int(rank): int(status) for rank, status in said["statuses"].items()}
            killed |= set(said["killed"])
            causes.append(said["cause"])
            if said["stopped"]:
                _add_stop(signals)
        cause = first_cause([(rank, statuses[rank]) for rank in causes if rank is not None])
        return Outcome(statuses, cause, frozenset(killed), set(self.active) != set(self.ends))

    def decide(self, status: int | None) -> None:
        """Tell the others to go on (None) or to end."""
        for host in self.active.values():
            host.connection.send({"status": "again" if status is None else "over", "exit": status})

    def close(self) -> None:
        """Hang up."""
        self.connections.close(CLOSE_S)


class OtherHost(Peers):
    """The launcher of any other host, in its dealings with that of host 0."""

    def __init__(self, where: tuple[str, int], token: str, *, node: int, nnodes: int, seconds: float) -> None:
        self.where, self.node, self.nnodes, self.seconds = where, node, nnodes, seconds
        self.door = Door("launcher", token, _MESSAGES)
        self.connection: Connection | None = None
        self.failed = self.told = False  # whether another host has failed; whether host 0 knows that this one has
        self.stop = False  # whether host 0 has said that another host was asked to stop
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
            self.connection = open_connection(*self.where, TRY_S, self.door, LOST_S)
        except OSError:  # not there yet
            return
        who: dict[str, Any] = {"node": self.node, "nnodes": self.nnodes, "procs": procs, "launcher": self.launcher}
        self.connection.send({"status": "hello"} | who)

    def lost(self, *, failed: bool) -> bool:
        """See `Peers`."""
        assert self.connection is not None
        if failed and not self.told:
            self.told = True
            self.connection.send({"status": "failed"})
        self._read(self.connection)
        return self.failed

    def asked(self, signals: list[int]) -> bool:
        """See `Peers`."""
        return self.stop and _add_stop(signals)

    def _read(self, connection: Connection) -> None:
        for said in connection.receive():
            status = said["status"]
            if status == "refused":
                raise UserError(said["text"])
            if status == "start":  # it may come together with the verdict on the last attempt
                self.begin, self.failed, self.stop = said, False, False
            elif status == "stop":
                self.failed = True
            elif status == "asked":
                self.stop = True
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
        return (False, None) if self.verdict is None else (True, self.verdict["exit"])

    def close(self) -> None:
        """Hang up."""
        if self.connection is not None:
            self.connection.close()
