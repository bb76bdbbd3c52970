"""The processes of one attempt of a job on one host: started, shown with their rank, ended together."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, NamedTuple

from jaxdist.errors import UserError
from jaxdist.runtime.exit_status import STOPPED
from jaxdist.runtime.run_folder import open_log

POLL_S = 0.02
LINE_BYTES = 1 << 16  # a longer line is shown in parts
# How ranks end that are told to stop. One that has no handler yet, as it still imports, has nothing to save either.
HALTED = (0, STOPPED, -signal.SIGTERM)
HERE = Path(__file__).parent


def share_of_cpus(cpus: Sequence[int], index: int, count: int) -> list[int]:
    """The part of these CPUs for process `index` of `count` on a host: neighbours, all of them used; [] where there are
    fewer CPUs than processes."""
    if len(cpus) < count:
        return []
    return list(cpus[index * len(cpus) // count : (index + 1) * len(cpus) // count])


def cpus_in_order() -> list[int]:
    """The CPUs that this process may use, those of one socket together, and those of one core."""

    def place(cpu: int) -> tuple[int, ...]:
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            return *(int((folder / name).read_text()) for name in ("physical_package_id", "core_id")), cpu
        except (OSError, ValueError):  # some containers hide it
            return 0, 0, cpu

    return sorted(os.sched_getaffinity(0), key=place)


class Screen:
    """Standard output and error of a launcher, written a line at a time by many threads.

    lost: set when whoever reads them has gone, as in `... | head`.
    """

    def __init__(self) -> None:
        self.lock, self.lost = threading.Lock(), False

    def write(self, stream: int, line: bytes) -> None:
        """stream: 1 or 2. The line is written whole, with an end."""
        line = line if line.endswith(b"\n") else line + b"\n"
        with self.lock:
            try:
                while not self.lost and line:
                    line = line[os.write(stream, line) :]
            except OSError:
                self.lost = True


@dataclass
class Rank:
    """A process of the job that runs here. `status` is None while it runs; -n after signal n."""

    rank: int
    process: subprocess.Popen[bytes]
    log: int
    pumps: list[threading.Thread] = field(default_factory=list)
    status: int | None = None
    killed: bool = False

    def send(self, number: int) -> None:
        """To the whole group of what it has started."""
        if self.status is None:
            self.killed |= number == signal.SIGKILL
            os.killpg(self.process.pid, number)

    def ended(self) -> bool:
        """Whether it has; then what it has started is ended too. Its number is not given back before that."""
        if self.status is None:
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.status = self.process.wait()
        return True


class Place(NamedTuple):
    """Where the processes of this host stand in one attempt of the job."""

    node: int
    nodes: int
    first_rank: int
    world: int
    host: str
    port: int
    job: str


class Outcome(NamedTuple):
    """How an attempt ended. statuses: by rank, as `Rank.status`. cause: the rank that failed first, None where none
    did. killed: ranks that were ended on account of it. told: another host's ranks failed."""

    statuses: dict[int, int]
    cause: int | None
    killed: frozenset[int]
    told: bool = False


class Attempt:
    """One start of all processes of this host. environs: one for each, with its RANK in it."""

    def __init__(
        self,
        command: Sequence[str],
        environs: Sequence[Mapping[str, str]],
        *,
        logs: Path,
        option: str,
        bind: bool,
        screen: Screen,
        number: int,
    ) -> None:
        self.command, self.environs, self.logs, self.option = command, environs, logs, option
        self.bind, self.screen, self.number = bind, screen, number
        self.ranks: list[Rank] = []
        self.order: list[Rank] = []  # as they ended
        self.reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HERE / "reaper.py")], stdin=subprocess.PIPE, start_new_session=True
        )

    def start(self) -> None:
        """Start all of them."""
        cpus = cpus_in_order() if self.bind else []
        for index, environ in enumerate(self.environs):
            mine = ",".join(map(str, share_of_cpus(cpus, index, len(self.environs))))
            rank = int(environ["RANK"])
            log = open_log(self.logs / f"rank{rank}.log", self.option)
            os.write(log, f"=== attempt {self.number}, {datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(HERE / "exec_rank.py"), str(os.getpid()), mine, *self.command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._keep(f"+{process.pid}")
            started = Rank(rank, process, log)
            self.ranks.append(started)
            for source, stream in ((process.stdout, 1), (process.stderr, 2)):
                assert source is not None
                started.pumps.append(threading.Thread(target=self._pump, args=(source, stream, started), daemon=True))
                started.pumps[-1].start()

    def _keep(self, line: str) -> None:
        assert self.reaper.stdin is not None
        with contextlib.suppress(OSError):  # somebody has ended it; ranks still die with their launcher
            self.reaper.stdin.write(f"{line}\n".encode())
            self.reaper.stdin.flush()

    def _pump(self, source: IO[bytes], stream: int, rank: Rank) -> None:
        """Show and log what a rank prints, line by line, to its end: a rank must never wait for its reader."""
        prefix, logging = f"[{rank.rank}] ".encode(), True
        with source:
            while line := source.readline(LINE_BYTES):
                self.screen.write(stream, prefix + line)
                try:
                    while logging and line:
                        line = line[os.write(rank.log, line) :]
                except OSError as error:
                    logging = False
                    self.screen.write(2, f"[launch] the log of rank {rank.rank} ends: {error.strerror}\n".encode())

    def watch(self, signals: list[int], grace: float, peers: "Peers", note: Path) -> Outcome:
        """Until all have ended.

        The first of `signals` is passed on as SIGTERM, which ranks take as a wish to stop together, with a checkpoint;
        after a second one all are killed. A rank that fails leaves the others `grace` seconds, to say what they saw:
        they cannot go on without it. peers: the launchers of other hosts. note: a file that a rank leaves which ends
        because the run was asked to stop: a signal, too (0), of which the others know, or after `grace` seconds hear.
        """
        deadline, tell, told = float("inf"), 0.0, False
        while running := [rank for rank in self.ranks if not rank.ended()]:
            now = time.monotonic()
            self._note_ended()
            if self.screen.lost and not signals:
                signals.append(signal.SIGPIPE)
            if self._asked(signals, note):
                tell = now + grace
            if signals and not told and now >= tell:
                told = True
                for rank in running:
                    rank.send(signal.SIGTERM)
            failed = [rank for rank in self.order if rank.status not in (HALTED if signals else (0,))]
            if peers.lost(failed=bool(failed)) or failed:
                deadline = min(deadline, now + grace)
            if now >= deadline or len(signals) > 1:
                for rank in running:
                    rank.send(signal.SIGKILL)
            time.sleep(POLL_S)
        self._note_ended()
        self._asked(signals, note)
        return self._outcome(peers.lost(failed=False))

    def _asked(self, signals: list[int], note: Path) -> bool:
        """Whether a rank turns out to have ended because the run was asked to stop: a 0 among the signals."""
        if signals or not any(rank.status == STOPPED for rank in self.order) or not note.exists():
            return False
        signals.append(0)
        return True

    def _note_ended(self) -> None:
        for rank in self.ranks:
            if rank.status is not None and rank not in self.order:
                self.order.append(rank)
                self._keep(f"-{rank.process.pid}")

    def _outcome(self, told: bool) -> Outcome:
        statuses = {rank.rank: rank.status for rank in self.ranks if rank.status is not None}
        failed = [rank for rank in self.order if rank.status and not rank.killed]
        # JAX aborts, and a watchdog ends with 75, where another rank is lost: the cause is rather that one.
        worst = sorted(failed, key=lambda rank: (rank.status != 2, rank.status in (STOPPED, -signal.SIGABRT)))
        killed = frozenset(rank.rank for rank in self.ranks if rank.killed)
        return Outcome(statuses, worst[0].rank if worst else None, killed, told)

    def close(self) -> None:
        """End what still runs, and wait for what was printed to be shown."""
        for rank in self.ranks:
            rank.send(signal.SIGKILL)
            while not rank.ended():
                time.sleep(POLL_S)
        self._note_ended()
        for rank in self.ranks:
            for pump in rank.pumps:
                pump.join(5.0)  # a process in a session of its own may keep the pipe open
            os.close(rank.log)
        assert self.reaper.stdin is not None
        with contextlib.suppress(OSError):
            self.reaper.stdin.close()
        self.reaper.wait()


class Peers:
    """The launchers of other hosts, as far as an attempt has to know them; here: there are none."""

    def lost(self, *, failed: bool) -> bool:
        """Whether ranks of another host have failed. failed: ranks of this host have, and the others are to know."""
        return False


def check_command(command: Sequence[str]) -> None:
    """Raises `UserError` where there is nothing to run."""
    if not command:
        raise UserError("command: none given; allowed: a program and its arguments, after --")
    if any("\0" in argument for argument in command):
        raise UserError("command: an argument holds a NUL character; leave it out")
