"""The launcher behind `scripts/launch.py`: starts the processes of a job, and again from its last checkpoint.

A lost rank ends all: JAX cannot go on without it. So the whole job is started again, and resumes. The global batch is
the configuration's, whatever the number of processes (`mesh.data: -1` takes what devices there are).
"""

import argparse
import contextlib
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jaxdist.errors import UserError
from jaxdist.launcher.hosts import First, Other
from jaxdist.launcher.ranks import HALTED, Attempt, Outcome, Peers, Place, Screen, check_command
from jaxdist.runtime.exit_status import SAME_S, STOPPED
from jaxdist.runtime.join.environment import FREE_PORT, INIT_METHOD, JOB_ID, NUM_PROCESSES, RANK, split_address
from jaxdist.runtime.join.roll_call import MissingPeers, join_timeout
from jaxdist.runtime.run_folder import (
    RUN_DIR,
    STOP_NOTE,
    given_run_directory,
    latest_step,
    make_log_folder,
    open_log,
    run_directory_of,
    safe_name,
)

FAILED, WRONG = 1, 2
ATTEMPT = "JAXDIST_ATTEMPT"  # of the job, from 1
MAX_BACKOFF_S = 60.0
# What an outer launcher may have left in the environment: it would come before, or change, what is set here.
OTHERS = (
    INIT_METHOD, NUM_PROCESSES, RANK, "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID", "TORCHELASTIC_RUN_ID", FREE_PORT, STOP_NOTE,
)  # fmt: skip
DESCRIPTION = """Start COMMAND N times on this host, as the processes of one job; with --nnodes, on every host. Each
process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment. A job that
fails is started again and resumes from its last checkpoint. Ctrl-C, or SIGTERM, stops the ranks together, with a
checkpoint; a second one kills them. Exit status: 0 done, 2 the configuration is wrong, 75 stopped but resumable, 1
anything else."""
USAGE = "launch.py -n N [options] -- COMMAND ..."


class Plan(NamedTuple):
    """What to start, as the command line says. procs: processes on this host. coordinator: "host:port" or None for a
    free port of this host. grace, backoff: seconds. log_option: what to name in errors about the logs' folder."""

    command: tuple[str, ...]
    procs: int
    min_procs: int
    nnodes: int
    min_nodes: int
    node_rank: int
    coordinator: str | None
    max_restarts: int
    run_dir: Path
    log_dir: Path
    log_option: str
    bind: bool
    grace: float
    backoff: float


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; usage: {USAGE}")


def make_parser() -> argparse.ArgumentParser:
    """The options before `--`."""
    parser = _Parser(prog="launch.py", description=DESCRIPTION, usage=USAGE)
    parser.add_argument("-n", "--procs", type=int, required=True, metavar="N", help="processes on this host")
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="hosts in the job (default: 1)")
    parser.add_argument("--node-rank", type=int, default=0, metavar="R", help="of this host, from 0")
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="an address of host 0 that all hosts can reach; with"
        " several hosts the launchers meet at this port, and the job at the next",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        metavar="N",
        help="give up after so many restarts without a newer checkpoint (default: 3)",
    )
    parser.add_argument(
        "--min-procs",
        type=int,
        metavar="N",
        help="instead of giving up, go on with one process fewer on this host, down to this number",
    )
    parser.add_argument(
        "--min-nodes",
        type=int,
        metavar="N",
        help="restart with the hosts that come, if they are so many at least (host 0 among them)",
    )
    parser.add_argument("--log-dir", metavar="DIR", help="of the ranks' logs (default: logs/ in the run directory)")
    parser.add_argument("--no-bind", action="store_true", help="let every process use all CPUs")
    parser.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="left to the other ranks when one has failed (default: 5)",
    )
    parser.add_argument(
        "--backoff",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="before a restart; doubled for each further one without progress (default: 1)",
    )
    return parser


def make_plan(arguments: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Read a command line. Raises `UserError`."""
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    options, command = make_parser().parse_args(arguments[:split]), tuple(arguments[split + 1 :])
    check_command(command)
    least = {"--min-procs": (options.min_procs, options.procs), "--min-nodes": (options.min_nodes, options.nnodes)}
    for name, value in (("-n", options.procs), ("--nnodes", options.nnodes)):
        if not 1 <= value <= 100_000:
            raise UserError(f"{name}: {value}; allowed: 1 or more")
    for name, (value, most) in least.items():
        if value is not None and not 1 <= value <= most:
            raise UserError(f"{name}: {value}; allowed: 1 to {most}")
    if not 0 <= options.node_rank < options.nnodes:
        raise UserError(f"--node-rank: {options.node_rank} of {options.nnodes} hosts; allowed: 0 to --nnodes - 1")
    if options.max_restarts < 0:
        raise UserError(f"--max-restarts: {options.max_restarts}; allowed: 0 or more")
    for name, seconds in (("--grace", options.grace), ("--backoff", options.backoff)):
        if not 0 <= seconds < math.inf:
            raise UserError(f"{name}: {seconds}; allowed: seconds >= 0")
    if options.nnodes > 1 and options.coordinator is None:
        raise UserError("--coordinator: not given; with --nnodes give HOST:PORT of host 0, the same on every host")
    if options.nnodes > 1 and options.min_procs is not None:
        raise UserError("--min-procs: is for one host; with --nnodes use --min-nodes")
    if options.coordinator is not None and split_address(options.coordinator)[1] == 65535:
        raise UserError(f"--coordinator: {options.coordinator!r} leaves no next port; allowed: ports below 65535")
    if options.nnodes > 1 and options.log_dir is None and given_run_directory(command, environ) is None:
        raise UserError("--run-dir: not given in the command; with --nnodes give one, the same on every host")
    run_dir = run_directory_of(command, environ)
    log_dir = Path(options.log_dir) if options.log_dir is not None else run_dir / "logs"
    return Plan(
        command,
        options.procs,
        options.min_procs or options.procs,
        options.nnodes,
        options.min_nodes or options.nnodes,
        options.node_rank,
        options.coordinator,
        options.max_restarts,
        run_dir,
        log_dir,
        "--run-dir" if options.log_dir is None else "--log-dir",
        not options.no_bind,
        options.grace,
        options.backoff,
    )


def rank_environ(
    environ: Mapping[str, str], place: Place, *, local: int, procs: int, attempt: int, run_dir: Path | None
) -> dict[str, str]:
    """The environment of process `local` of `procs` on this host."""
    kept = {name: value for name, value in environ.items() if name not in OTHERS}
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


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def exit_code(status: int) -> str:
    """ "exit 1" or "SIGKILL", of a status as `Rank.status`."""
    if status >= 0:
        return f"exit {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


class Supervisor:
    """One job's life on this host: attempts, and what lies between them."""

    def __init__(self, plan: Plan, environ: Mapping[str, str], signals: list[int], screen: Screen) -> None:
        self.plan, self.environ, self.signals, self.screen = plan, environ, signals, screen
        self.logs = make_log_folder(plan.log_dir, plan.log_option)
        name = "launch.log" if plan.nnodes == 1 else f"launch{plan.node_rank}.log"
        self.log = open_log(self.logs / name, plan.log_option)
        self.procs, self.attempt, self.fruitless, self.best = plan.procs, 0, 0, latest_step(plan.run_dir)
        self.shrunk = False
        self.peers: First | Other | None = None
        if plan.coordinator is not None and plan.nnodes > 1:
            where, seconds = split_address(plan.coordinator), join_timeout(environ)
            self.peers = (
                Other(where, node=plan.node_rank, nnodes=plan.nnodes, seconds=seconds)
                if plan.node_rank
                else (First(where, nnodes=plan.nnodes, min_nodes=plan.min_nodes, seconds=seconds, grace=plan.grace))
            )

    def say(self, text: str) -> None:
        """On standard error, and in the launcher's own log with the time."""
        self.screen.write(2, f"[launch] {text}\n".encode())
        with contextlib.suppress(OSError):  # a full disk must not end the job
            os.write(self.log, f"{datetime.now():%Y-%m-%d %H:%M:%S.%f} {text}\n".encode())

    def place(self) -> Place | None:
        """For the next attempt: a port and a name of its own, so that nothing of the last one can get in its way. None
        after a signal."""
        plan = self.plan
        if isinstance(self.peers, First):
            return self.peers.meet(self.procs, self.attempt, self.signals)
        if isinstance(self.peers, Other):
            place = self.peers.meet(self.procs, self.signals)
            self.attempt = self.peers.attempt
            return place
        host, port = split_address(plan.coordinator) if plan.coordinator else ("127.0.0.1", free_port())
        return Place(0, 1, 0, self.procs, host, port, f"{secrets.token_hex(8)}-{self.attempt}")

    def once(self, place: Place) -> Outcome:
        """One attempt, from start to end."""
        plan, note = self.plan, self.logs.absolute() / f"stopped-{safe_name(place.job)}-{place.node}"
        more = {STOP_NOTE: str(note)} | ({FREE_PORT: "1"} if plan.coordinator is None else {})
        environs = [
            rank_environ(self.environ, place, local=local, procs=self.procs, attempt=self.attempt, run_dir=plan.run_dir)
            | more
            for local in range(self.procs)
        ]
        attempt = Attempt(
            plan.command,
            environs,
            logs=self.logs,
            option=plan.log_option,
            bind=plan.bind,
            screen=self.screen,
            number=self.attempt,
        )
        try:
            attempt.start()
            return attempt.watch(self.signals, plan.grace, self.peers or Peers(), note)
        finally:
            attempt.close()
            note.unlink(missing_ok=True)

    def describe(self, outcome: Outcome) -> str:
        """What the ranks did, in a line."""
        if outcome.cause is None:
            return "another host is lost, or its ranks have failed" if outcome.told else "no rank failed"
        others = {rank: status for rank, status in outcome.statuses.items() if rank != outcome.cause and status}
        words = [
            f"rank {rank}: {exit_code(status)}" + (" (ended)" if rank in outcome.killed else "")
            for rank, status in others.items()
        ]
        shown = ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")
        return f"rank {outcome.cause} failed first ({exit_code(outcome.statuses[outcome.cause])})" + (
            f"; {shown}" if shown else ""
        )

    def ended(self, outcome: Outcome) -> int | None:
        """The exit status of the launcher after this attempt, or None to start again."""
        statuses = set(outcome.statuses.values())
        if statuses == {0} and not outcome.told:
            return 0
        if self.signals:
            stopped = statuses <= set(HALTED)
            self.say(
                "stopped; the same command goes on"
                if stopped
                else f"stopped, but not all ranks with a checkpoint: {self.describe(outcome)}"
            )
            return STOPPED if stopped else WRONG if WRONG in statuses else FAILED
        cause = outcome.statuses[outcome.cause] if outcome.cause is not None else STOPPED
        if cause == WRONG and not self.shrunk:
            self.say(f"{self.describe(outcome)}; not started again: it would fail again")
            return WRONG
        newest = latest_step(self.plan.run_dir)
        if newest > self.best:
            self.best, self.fruitless = newest, 0
        if cause == WRONG or self.fruitless >= self.plan.max_restarts:
            return self.shrink(outcome, cause)
        self.fruitless += 1
        self.say(
            f"{self.describe(outcome)}; restart {self.fruitless} of {self.plan.max_restarts} without a newer"
            f" checkpoint than {'none' if self.best < 0 else f'step {self.best}'}"
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
            return STOPPED if cause in (STOPPED,) or cause < 0 else WRONG if cause == WRONG else FAILED
        self.say(f"{self.describe(outcome)}; given up after {self.fruitless} restarts without a newer checkpoint")
        return WRONG if cause == WRONG else FAILED

    def close(self) -> None:
        """Hang up, close the log."""
        if self.peers is not None:
            self.peers.close()
        os.close(self.log)

    def pause(self) -> None:
        """Back-off, cut short by a signal."""
        seconds = self.plan.backoff * 2 ** max(0, self.fruitless - 1)
        until = time.monotonic() + min(MAX_BACKOFF_S, seconds)
        while time.monotonic() < until and not self.signals:
            time.sleep(0.05)

    def run(self) -> int:
        """To the end of the job; the exit status."""
        while True:
            self.attempt += 1
            place = self.place()
            if place is not None and (self.attempt > 1 or place.nodes > 1):
                step = max(0, latest_step(self.plan.run_dir))
                self.say(
                    f"attempt {self.attempt}, from step {step}: {place.world} processes on {place.nodes} of"
                    f" {self.plan.nnodes} hosts"
                )
            if place is None or self.signals:
                self.say("stopped before the start; the same command goes on")
                return STOPPED
            status = self.settle(self.once(place))
            if status is not None:
                return status
            self.pause()

    def settle(self, own: Outcome) -> int | None:
        """The exit status after an attempt, or None to start again: host 0 decides for all."""
        if isinstance(self.peers, Other):
            decided, status = self.peers.settle(own, self.signals)
            if not decided:
                self.say("no connection to host 0" + ("" if self.signals else "; waiting for it"))
                return STOPPED if self.signals else None
            said = f"{self.describe(own)}; host 0 says " + ("again" if status is None else f"exit {status}")
            orderly = status == STOPPED and set(own.statuses.values()) <= set(HALTED)
            self.say("stopped; the same command goes on" if orderly else said)
            return status
        if isinstance(self.peers, First):
            status = self.ended(self.peers.settle(own, self.signals))
            self.peers.decide(status)
            return status
        return self.ended(own)


@contextlib.contextmanager
def _noted(signals: list[int]) -> Iterator[None]:
    """Signals that would end this process only leave a note: those within a second of the first are the same one.
    SIGHUP and SIGINT stay ignored where they are, as under nohup and in the background of a script."""
    before: dict[signal.Signals, Any] = {}
    first: list[float] = []

    def note(received: int, frame: Any) -> None:
        now = time.monotonic()
        if not first or now > first[0] + SAME_S:
            signals.append(received)
        first.append(now)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def launch(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Run a job as a command line says; the exit status. Raises `UserError` for what the user can mend."""
    environ = os.environ if environ is None else environ
    plan, signals = make_plan(arguments, environ), list[int]()
    with _noted(signals):
        supervisor = Supervisor(plan, environ, signals, Screen())
        try:
            return supervisor.run()
        except MissingPeers as error:
            supervisor.say(f"error: {error}")
            return STOPPED
        finally:
            supervisor.close()


def main(arguments: Sequence[str]) -> int:
    """`launch`, with a user's mistake as one line and status 2."""
    try:
        return launch(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG
