"""The launcher, `jaxdist launch`: starts the processes of a job, and again from its last checkpoint.

JAX cannot go on without a lost rank, so a launcher ends them all and starts the whole job again, which resumes. The
global batch is the configuration's, whatever the number of processes (`mesh.data: -1` is all devices that are there).
"""

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxdist.config.resolve import only_cpus
from jaxdist.errors import UserError, first_of, reports_mistakes
from jaxdist.files.launcher_notes import ATTEMPT, RUN_DIR, STOP_NOTE
from jaxdist.launcher.headway import Headway
from jaxdist.launcher.hosts import FirstHost, OtherHost
from jaxdist.launcher.note_signals import noted_signals
from jaxdist.launcher.options import Plan, make_plan
from jaxdist.launcher.ranks import HALTED, Attempt, HostPlace, Outcome, Peers, Screen
from jaxdist.runtime.exit_status import FAILED, SAME_S, STOPPED, WRONG
from jaxdist.runtime.join.environment import FREE_PORT, INIT_METHOD, JOB_ID, NUM_PROCESSES, RANK
from jaxdist.runtime.join.roll_call import MissingPeers, join_timeout
from jaxdist.runtime.network.addresses import free_port, split_address
from jaxdist.runtime.network.job_token import TOKEN, TOKEN_FILE
from jaxdist.runtime.output import lasting_output
from jaxdist.runtime.rank_names import name_ranks
from jaxdist.runtime.run_folder import make_log_folder, open_log, safe_name

MAX_BACKOFF_S = 60.0
# Variables that an outer launcher may have left in the environment. They would win over those that are set here.
OUTER_VARIABLES = (
    INIT_METHOD, NUM_PROCESSES, RANK, "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID", "TORCHELASTIC_RUN_ID", FREE_PORT, STOP_NOTE, TOKEN_FILE,
)  # fmt: skip

# XLA:CPU allocates the temporary arrays of a program anew for each call, and Linux clears every page of 4 kB again. In
# huge pages, where they are allowed ("madvise"), a step takes up to a quarter less: docs/performance.md.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def rank_environ(place: HostPlace, *, local: int, procs: int, attempt: int, run_dir: Path | None) -> dict[str, str]:
    """The environment of process `local` of `procs` on this host: that of the launcher, and the place in the job."""
    kept = {name: value for name, value in os.environ.items() if name not in OUTER_VARIABLES}
    if only_cpus(os.environ):
        kept = HUGE_PAGES | kept
    job: dict[str, Any] = {
        "RANK": place.first_rank + local,
        "WORLD_SIZE": place.world,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": procs,
        "NODE_RANK": place.node,
        "GROUP_RANK": place.node,
        "MASTER_ADDR": place.host,
        "MASTER_PORT": place.port,
        JOB_ID: place.job,
        ATTEMPT: attempt,
    }
    if run_dir is not None:
        job |= {RUN_DIR: run_dir, "PYTHONUNBUFFERED": 1}
    return kept | {name: str(value) for name, value in job.items()}


def exit_code(status: int) -> str:
    """ "exit 1" or "SIGKILL", of a status as `Rank.status`, with the likely cause of a signal that names none."""
    if status >= 0:
        return f"exit {status}"
    if status == -signal.SIGBUS:
        return "SIGBUS: a file that it maps into memory, of data or of a package, became shorter, or its disk failed"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


class Supervisor:
    """The attempts of one job on this host, and what happens between them."""

    def __init__(self, plan: Plan, signals: list[int]) -> None:
        self.plan, self.signals, self.screen = plan, signals, Screen()
        make_log_folder(plan.log_dir, plan.log_option)
        name = "launch.log" if plan.nnodes == 1 else f"launch{plan.node_rank}.log"
        self.log = open_log(plan.log_dir / name, plan.log_option)
        self.procs, self.attempt = plan.procs, 0
        self.headway, self.fruitless = Headway(plan.run_dir), 0  # and restarts since without a newer checkpoint
        self.name = secrets.token_hex(8)  # of the job, in all its attempts
        self.began_there = False  # whether the run directory was there when the attempt began
        self.shrunk = False  # whether the job has fewer processes than it was started with
        self.peers: FirstHost | OtherHost | None = None
        if plan.coordinator is not None and plan.nnodes > 1:
            where = split_address(plan.coordinator)
            job: dict[str, Any] = {"nnodes": plan.nnodes, "seconds": join_timeout(os.environ)}
            if plan.node_rank:
                self.peers = OtherHost(where, plan.token, node=plan.node_rank, **job)
            else:
                self.peers = FirstHost(where, plan.token, min_nodes=plan.min_nodes, grace=plan.grace, **job)

    def say(self, text: str) -> None:
        """Write a line to standard error, and with the time to the launcher's own log."""
        self.screen.say(f"[launch] {text}\n".encode())
        with contextlib.suppress(OSError):  # a full disk must not end the job
            os.write(self.log, f"{datetime.now():%Y-%m-%d %H:%M:%S.%f} {text}\n".encode())

    def place(self) -> HostPlace | None:
        """The part of this host in the next attempt, which has a port and a name of its own, so that processes of the
        last one cannot get in its way. None after a signal. Raises `MissingPeers`."""
        plan = self.plan
        if isinstance(self.peers, FirstHost):
            return self.peers.meet(self.procs, self.attempt, self.signals)
        if isinstance(self.peers, OtherHost):
            place = self.peers.meet(self.procs, self.signals)
            self.attempt = self.peers.attempt
            return place
        host, port = split_address(plan.coordinator) if plan.coordinator else ("127.0.0.1", free_port())
        return HostPlace(0, 1, 0, self.procs, host, port, f"{self.name}-{self.attempt}")

    def once(self, place: HostPlace) -> Outcome:
        """Make one attempt, to its end."""
        plan, note = self.plan, self.plan.log_dir.absolute() / f"stopped-{safe_name(place.job)}-{place.node}"
        more = {STOP_NOTE: str(note), TOKEN: plan.token} | ({FREE_PORT: "1"} if plan.coordinator is None else {})
        options: dict[str, Any] = {"procs": self.procs, "attempt": self.attempt, "run_dir": plan.run_dir}
        environs = [rank_environ(place, local=n, **options) | more for n in range(self.procs)]
        attempt, self.began_there = Attempt(plan, environs, self.screen, self.attempt), plan.run_dir.exists()
        try:
            try:
                attempt.start()
            except OSError as error:
                mend = "start fewer, or raise a limit (ulimit -a)"
                raise UserError(f"-n: {self.procs} processes cannot be started: {error.strerror}; {mend}") from error
            return attempt.watch(self.signals, self.peers or Peers(), note, self.say)
        finally:
            attempt.close()
            note.unlink(missing_ok=True)
            self.headway.read(note)

    def describe(self, outcome: Outcome) -> str:
        """A line about how the ranks ended."""
        left = {status for rank, status in outcome.statuses.items() if rank not in outcome.killed}
        if len(self.signals) > 1 and outcome.killed and left <= set(HALTED):
            return f"{name_ranks(outcome.killed, most=8)} still ran after the first signal, and a second one killed all"
        if outcome.cause is None:
            return "another host is lost, or its ranks have failed" if outcome.elsewhere else "no rank failed"
        others = {rank: status for rank, status in outcome.statuses.items() if rank != outcome.cause and status}
        words = [
            f"rank {rank}: {exit_code(status)}" + (" (ended)" if rank in outcome.killed else "")
            for rank, status in others.items()
        ]
        shown = first_of(words, 8)
        first = f"rank {outcome.cause} failed first ({exit_code(outcome.statuses[outcome.cause])})"
        return f"{first}; {shown}" if shown else first

    def ended(self, outcome: Outcome) -> int | None:
        """The exit status of the launcher after this attempt, or None to start again."""
        statuses = set(outcome.statuses.values())
        if statuses == {0} and not outcome.elsewhere:
            return 0
        if STOPPED in statuses and self.began_there and not self.plan.run_dir.exists():
            self.say(f"stopped: the run directory is not at {self.plan.run_dir} any more; the ranks say where it is")
            return STOPPED
        if self.signals:
            stopped = statuses <= set(HALTED)
            wrong = f"stopped, but not all ranks with a checkpoint: {self.describe(outcome)}"
            self.say("stopped; the same command goes on" if stopped else wrong)
            return STOPPED if stopped else WRONG if WRONG in statuses else FAILED
        cause = outcome.statuses[outcome.cause] if outcome.cause is not None else STOPPED
        if cause == WRONG and not self.shrunk:
            self.say(f"{self.describe(outcome)}; not started again: it would fail again")
            return WRONG
        if self.headway.gained():
            self.fruitless = 0
        if cause == WRONG or self.fruitless >= self.plan.max_restarts:
            return self.shrink(outcome, cause)
        self.fruitless += 1
        self.say(
            f"{self.describe(outcome)}; restart {self.fruitless} of {self.plan.max_restarts} without a newer"
            f" checkpoint than {f'step {step}' if (step := self.headway.step) >= 0 else f'none in {self.plan.run_dir}'}"
        )
        return None

    def shrink(self, outcome: Outcome, cause: int) -> int | None:
        """Go on with fewer processes where that is allowed; else the exit status."""
        if self.procs > self.plan.min_procs:
            self.procs, self.fruitless, self.shrunk = self.procs - 1, 0, True
            self.say(f"{self.describe(outcome)}; going on with {self.procs} of {self.plan.procs} processes")
            return None
        if self.plan.max_restarts == 0:
            self.say(self.describe(outcome))
            return STOPPED if cause == STOPPED or cause < 0 else WRONG if cause == WRONG else FAILED
        why = f"given up after {self.fruitless} restarts without a newer checkpoint"
        if self.headway.step < 0:
            why += f" in {self.plan.run_dir}; a loop without jaxdist.Checkpoints gives its folder as {RUN_DIR}"
        self.say(f"{self.describe(outcome)}; {why}")
        return WRONG if cause == WRONG else FAILED

    def close(self) -> None:
        """Hang up, close the log."""
        if self.peers is not None:
            self.peers.close()
        os.close(self.log)

    def pause(self) -> None:
        """Wait before a restart, until a signal comes."""
        seconds = self.plan.backoff * 2 ** max(0, self.fruitless - 1)
        until = time.monotonic() + min(MAX_BACKOFF_S, seconds)
        while time.monotonic() < until and not self.signals:
            time.sleep(0.05)

    def run(self) -> int:
        """Run the job to its end. Returns the exit status."""
        while True:
            self.attempt += 1
            try:
                place = self.place()
            except MissingPeers as error:
                self.say(f"error: {error}")
                return STOPPED
            if place is not None and (self.attempt > 1 or place.nodes > 1):
                step, where = max(0, self.headway.step), f"on {place.nodes} of {self.plan.nnodes} hosts"
                self.say(f"attempt {self.attempt}, from step {step}: {place.world} processes {where}")
            # Other hosts that have been told to start must hear how it ends: then the ranks are started, and stopped.
            if place is None or (self.signals and place.nodes == 1):
                self.say("stopped before the start; the same command goes on")
                return STOPPED
            status = self.settle(self.once(place))
            if status is not None:
                return status
            self.pause()

    def settle(self, own: Outcome) -> int | None:
        """The exit status after an attempt, or None to start again: host 0 decides for all."""
        if isinstance(self.peers, OtherHost):
            self.headway.gained()
            decided, status = self.peers.settle(own, self.signals)
            if not decided:
                self.say("no connection to host 0" + ("" if self.signals else "; waiting for it"))
                return STOPPED if self.signals else None
            said = f"{self.describe(own)}; host 0 says " + ("again" if status is None else f"exit {status}")
            orderly = status == STOPPED and set(own.statuses.values()) <= set(HALTED)
            self.say("stopped; the same command goes on" if orderly else said)
            return status
        if isinstance(self.peers, FirstHost):
            status = self.ended(self.peers.settle(own, self.signals))
            self.peers.decide(status)
            return status
        return self.ended(own)


@reports_mistakes
def _run(arguments: Sequence[str], prog: str) -> int:
    plan, signals = make_plan(arguments, os.environ, prog, make=True), list[int]()
    with noted_signals(signals, SAME_S), contextlib.closing(Supervisor(plan, signals)) as supervisor:
        return supervisor.run()


def run_launcher(arguments: Sequence[str], prog: str = "jaxdist launch") -> int:
    """Run a job as a command line says. Returns the exit status."""
    with lasting_output():
        return _run(arguments, prog)
