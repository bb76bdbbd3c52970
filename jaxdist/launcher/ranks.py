"""The processes of one attempt of a job on one host: started, shown with their rank, ended together."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, NamedTuple

from jaxdist.files.launcher_notes import STOP_NOTE
from jaxdist.launcher.options import Plan
from jaxdist.launcher.orphans import adopt_orphans, children, end_orphans, group_runs, reap_orphans
from jaxdist.runtime.exit_status import STOPPED, WRONG
from jaxdist.runtime.output import LastingFile
from jaxdist.runtime.rank_names import name_ranks
from jaxdist.runtime.run_folder import open_log

POLL_S = 0.02
LINE_S = 1.0  # in which a line of the launcher's own is read, or it does not wait for it
SHOWN_LINE = 1 << 16  # bytes; a longer line is shown in parts
# Statuses of ranks that were told to stop. A rank without a handler still imports, and has nothing to save.
HALTED = (0, STOPPED, -signal.SIGTERM)
BY_SIGTERM = (signal.SIGTERM, 128 + signal.SIGTERM)  # of a process, and as a shell gives that of its child
HERE = Path(__file__).parent


def share_of_cpus(cpus: Sequence[int], index: int, count: int) -> list[int]:
    """The CPUs for process `index` of `count` on a host: neighbours, so that all are used; [] where there are fewer
    CPUs than processes."""
    if len(cpus) < count:
        return []
    return list(cpus[index * len(cpus) // count : (index + 1) * len(cpus) // count])


def cpus_in_order() -> list[int]:
    """The CPUs that this process may use, sorted by socket and core."""

    def place(cpu: int) -> tuple[int, ...]:
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            return *(int((folder / name).read_text()) for name in ("physical_package_id", "core_id")), cpu
        except (OSError, ValueError):  # some containers hide it
            return 0, 0, cpu

    return sorted(os.sched_getaffinity(0), key=place)


class Screen:
    """Standard output and error of a launcher, to which many threads write lines. `lost` is set when their reader has
    gone, as in `... | head`."""

    def __init__(self) -> None:
        self.lost = False
        self._saying: threading.Thread | None = None  # a line of the launcher's own, which nobody has read yet
        self.files = {stream: LastingFile(stream, self._lose) for stream in (1, 2)}

    def _lose(self) -> None:
        self.lost = True

    def write(self, stream: int, line: bytes) -> None:
        """Write a whole line, with its end, to stream 1 or 2. Waits for its reader."""
        self.files[stream].write(line if line.endswith(b"\n") else line + b"\n")

    def say(self, line: bytes) -> None:
        """Write a line of the launcher's own to stream 2. It waits `LINE_S` at most: where nobody reads, signals count
        all the same, and the line is dropped if one before it still waits."""
        if self._saying is None or not self._saying.is_alive():
            self._saying = threading.Thread(target=self.write, args=(2, line), daemon=True)
            self._saying.start()
            self._saying.join(LINE_S)


@dataclass
class Rank:
    """A process of the job on this host. `status` is None while it runs, and -n after signal n."""

    rank: int
    process: subprocess.Popen[bytes]
    log: int
    pumps: list[threading.Thread] = field(default_factory=list)
    status: int | None = None
    killed: bool = False
    outlived: bool = False  # by what it has started, after SIGTERM

    def send(self, number: int) -> None:
        """Send a signal to the process and all that it has started."""
        if self.status is None:
            self.killed |= number == signal.SIGKILL
            os.killpg(self.process.pid, number)

    def ended(self, *, asked: bool = False) -> bool:
        """Whether the process has ended; then all that it has started is ended, too, before its number is free
        again.

        asked: whether ranks were asked to stop. SIGTERM ends a shell at once, while the program that it has started
        still saves: such a rank runs as long as anything of its group does.
        """
        if self.status is None:
            end = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is None:
                return False
            if asked and end.si_status in BY_SIGTERM and group_runs(self.process.pid):
                self.outlived = True
                return False
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            status = self.process.wait()
            self.status = -signal.SIGKILL if self.outlived and self.killed else status
        return True


class HostPlace(NamedTuple):
    """The part of one host in an attempt of the job."""

    node: int  # the number of this host
    nodes: int  # how many hosts there are
    first_rank: int  # of the processes on this host
    world: int  # how many processes the job has
    host: str  # the address of rank 0
    port: int
    job: str  # a name of the attempt; processes of another one do not join it


class Outcome(NamedTuple):
    """The end of an attempt."""

    statuses: dict[int, int]  # by rank, as `Rank.status`
    cause: int | None  # the rank that failed first, or None
    killed: frozenset[int]  # the ranks that were killed because of it
    elsewhere: bool = False  # whether another host is lost or its ranks have failed


def first_cause(failed: Sequence[tuple[int, int]]) -> int | None:
    """The rank to blame, of (rank, status) in the order in which they failed. A wrong configuration comes first. JAX
    aborts, and a watchdog ends with `STOPPED`, where another rank is lost: these come last."""
    key = {rank: (status != WRONG, status in (STOPPED, -signal.SIGABRT)) for rank, status in failed}
    return min(key, key=lambda rank: key[rank], default=None)


@dataclass
class Attempt:
    """One start of all processes of this host."""

    plan: Plan
    environs: Sequence[Mapping[str, str]]  # one for each process, with its RANK in it
    screen: Screen
    number: int
    ranks: list[Rank] = field(default_factory=list)
    order: list[Rank] = field(default_factory=list)  # as they ended

    def __post_init__(self) -> None:
        adopt_orphans()
        mark = f"{STOP_NOTE}={self.environs[0][STOP_NOTE]}"  # in the environment of all that the ranks start
        reaper = [sys.executable, "-I", "-S", str(HERE / "reaper.py"), mark]
        self.reaper = subprocess.Popen(reaper, stdin=subprocess.PIPE, start_new_session=True)
        self.own = children()  # with those that the launcher was started with

    def start(self) -> None:
        """Start all processes."""
        cpus = cpus_in_order() if self.plan.bind else []
        for index, environ in enumerate(self.environs):
            mine = ",".join(map(str, share_of_cpus(cpus, index, len(self.environs))))
            rank = int(environ["RANK"])
            log = open_log(self.plan.log_dir / f"rank{rank}.log", self.plan.log_option)
            os.write(log, f"=== attempt {self.number}, {datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(HERE / "exec_rank.py"), str(os.getpid()), mine, *self.plan.command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._tell_reaper(f"+{process.pid}")
            started = Rank(rank, process, log)
            self.ranks.append(started)
            for source, stream in ((process.stdout, 1), (process.stderr, 2)):
                assert source is not None
                started.pumps.append(threading.Thread(target=self._pump, args=(source, stream, started), daemon=True))
                started.pumps[-1].start()

    def _tell_reaper(self, line: str) -> None:
        """Say which process groups there are: the reaper kills them when this launcher is killed."""
        assert self.reaper.stdin is not None
        with contextlib.suppress(OSError):  # the reaper was killed; ranks still die with their launcher
            self.reaper.stdin.write(f"{line}\n".encode())
            self.reaper.stdin.flush()

    def _pump(self, source: IO[bytes], stream: int, rank: Rank) -> None:
        """Show and log the output of a rank, line by line, to its end: a rank must never wait for its reader."""
        prefix, logging = f"[{rank.rank}] ".encode(), True
        with source:
            while line := source.readline(SHOWN_LINE):
                self.screen.write(stream, prefix + line)
                try:
                    while logging and line:
                        line = line[os.write(rank.log, line) :]
                except OSError as error:
                    logging = False
                    self.screen.write(2, f"[launch] the log of rank {rank.rank} ends: {error.strerror}\n".encode())

    def watch(self, signals: list[int], peers: "Peers", note: Path, say: Callable[[str], None]) -> Outcome:
        """Wait until all processes have ended.

        The first of `signals` is passed on as SIGTERM: ranks then stop together, with a checkpoint. That may take
        minutes, so nothing ends those that still run `grace` seconds later (1 at least): a line names them. After a
        second signal all are killed. When a rank fails, the others cannot go on. They have `grace` seconds to say what
        they saw, then they are killed.

        Args:
            signals: Those that this process has received; more may come meanwhile.
            peers: The launchers of other hosts.
            note: A file that a rank leaves when it ends because the run was asked to stop. That counts as a signal (0).
                The other ranks usually know of it; after `grace` seconds they are told.
            say: Prints a line.
        """
        grace, deadline, tell, told, remind = self.plan.grace, float("inf"), 0.0, False, float("inf")
        patience = max(grace, 1.0)  # ranks that stop at once are not told of, with --grace 0 either
        while running := self._running(asked=bool(signals)):
            now = time.monotonic()
            if self.screen.lost and not signals:
                signals.append(signal.SIGPIPE)
            if self._asked(signals, note) or peers.asked(signals):
                tell = now + grace
            if signals and not told and now >= tell:
                told, remind = True, now + patience
                for rank in running:
                    rank.send(signal.SIGTERM)
            failed = [rank for rank in self.order if rank.status not in (HALTED if signals else (0,))]
            if peers.lost(failed=bool(failed)) or failed:
                deadline = min(deadline, now + grace)
            if now >= remind and deadline == float("inf"):  # else they are killed soon, without another signal
                remind = float("inf")
                names = name_ranks({rank.rank for rank in running}, most=8)
                waits = f"still running {patience:g} s after SIGTERM, maybe to save: {names}"
                say(f"{waits}; another signal kills what runs")
            if now >= deadline or len(signals) > 1:
                for rank in running:
                    rank.send(signal.SIGKILL)
            time.sleep(POLL_S)
        self._asked(signals, note)
        return self._outcome(peers.lost(failed=False))

    def _asked(self, signals: list[int], note: Path) -> bool:
        """Whether a rank has ended because the run was asked to stop; then a 0 is added to the signals."""
        if signals or not any(rank.status == STOPPED for rank in self.order) or not note.exists():
            return False
        signals.append(0)
        return True

    def _running(self, *, asked: bool = False) -> list[Rank]:
        """The processes that still run. Those that have ended since the last look are added to `order`. asked: see
        `Rank.ended`."""
        running = []
        for rank in self.ranks:
            if not rank.ended(asked=asked):
                running.append(rank)
            elif rank not in self.order:
                self.order.append(rank)
                self._tell_reaper(f"-{rank.process.pid}")
        reap_orphans([*self.own, *(rank.process.pid for rank in running)])
        return running

    def _outcome(self, elsewhere: bool) -> Outcome:
        statuses = {rank.rank: rank.status for rank in self.ranks if rank.status is not None}
        cause = first_cause([(rank.rank, rank.status) for rank in self.order if rank.status and not rank.killed])
        return Outcome(statuses, cause, frozenset(rank.rank for rank in self.ranks if rank.killed), elsewhere)

    def close(self) -> None:
        """End the processes that still run, and wait until their output is shown."""
        for rank in self.ranks:
            rank.send(signal.SIGKILL)
        while self._running():
            time.sleep(POLL_S)
        end_orphans(self.own)  # in sessions of their own, out of reach of a signal to the rank's group
        for rank in self.ranks:
            for pump in rank.pumps:
                pump.join(5.0)  # whom a rank has handed the pipe may keep it open
            os.close(rank.log)
        assert self.reaper.stdin is not None
        with contextlib.suppress(OSError):
            self.reaper.stdin.close()
        self.reaper.wait()


class Peers:
    """The launchers of other hosts, as an attempt sees them. This class is for a job on one host."""

    def lost(self, *, failed: bool) -> bool:
        """Whether ranks of another host have failed. failed: whether ranks of this host have; the others are told
        then."""
        return False

    def asked(self, signals: list[int]) -> bool:
        """Whether another host was asked to stop and this one was not; then a 0 is added to the signals."""
        return False
