"""A training step of GPT-2 by several processes on CPUs, which communicate by gloo: jaxdist beside PyTorch, in turns.

    python scripts/bench/gloo.py [--processes 2] [--contenders jaxdist-ddp,torch-ddp,...] [--rounds 9] [--json OUT]

jaxdist-ddp and jaxdist-zero3 train beside DistributedDataParallel (torch-ddp) and FSDP2 (torch-fsdp2), eagerly and by
`torch.compile` (torch-ddp-compiled, torch-fsdp2-compiled). All have the same weights and batches, fp32, and AdamW after
clipping; the first losses must agree. Every contender is a job of its own with a core for each process, and all jobs
stay; in a round each trains in its turn while the others wait. Given are medians over the rounds with their spread.

With --rate each process is on a virtual host behind a link of that rate (`jaxdist lab`), as root, and contenders train
one after the other: --processes 3 --size links --rate 100mbit. jaxdist-ddp-ring and jaxdist-ddp-ring-int8 sum gradients
by parallel.grad_sync.algorithm=ring, and wire_dtype=int8; so do all other algorithms, and -bfloat16. -2mb behind such a
name sets bucket_mb=2: gradients of a block are sent while those of the block before are computed.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.task import SIZES

from jaxdist import registry
from jaxdist.collectives.algorithm import ALGORITHMS
from jaxdist.config.arguments import COUNT, output_file
from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.lab.network import INTERFACE
from jaxdist.lab.virtual_hosts import exit_status, run_on_hosts
from jaxdist.launcher.supervisor import HUGE_PAGES
from jaxdist.observe import measured_on
from jaxdist.runtime.network.addresses import free_port

RANK = Path(__file__).parent / "harness" / "gloo_rank.py"
CONTENDERS = "jaxdist-ddp,torch-ddp,torch-ddp-compiled,jaxdist-zero3,torch-fsdp2"
KNOWN = (*CONTENDERS.split(","), "torch-fsdp2-compiled")
ALGORITHM = re.compile(rf"jaxdist-ddp-({'|'.join(registry.names(ALGORITHMS))})(-bfloat16|-int8)?(-[1-9][0-9]*mb)?")
ON_HOST = 'printf "%s" "$0" | exec "$@" "$HOST_INDEX" "$HOST_COUNT" "$JAX_COORDINATOR_ADDRESS"'
WARM = 2  # rounds that are not counted
AGREE = 1e-5  # first losses, relative


def _environ() -> dict[str, str]:
    path = os.pathsep.join([str(RANK.parents[1]), os.environ.get("PYTHONPATH", "")])
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "XLA_FLAGS": "", "OMP_NUM_THREADS": "1"}
    return HUGE_PAGES | os.environ | own  # which `jaxdist launch` sets, too


class Finished(NamedTuple):
    """A contender that has trained. seconds: of a step, in each round."""

    name: str
    first: float
    seconds: list[float]


def on_hosts(name: str, arguments: argparse.Namespace) -> Finished:
    """A contender on virtual hosts. Raises `UserError` where a host fails."""
    turns = "".join(f"{steps}\n" for steps in (1, *[arguments.steps] * (WARM + arguments.rounds)))
    command = ["sh", "-c", ON_HOST, turns, sys.executable, str(RANK), name, arguments.size]
    environ = _environ() | {"GLOO_SOCKET_IFNAME": INTERFACE}
    results = run_on_hosts(command, hosts=arguments.processes, rate=arguments.rate, environ=environ)
    if exit_status(results):
        failed = min((each for each in results if each.status and not each.killed), key=lambda each: each.seconds)
        raise UserError(f"{name}: host {failed.host} ended with status {failed.status}: {failed.stderr[-500:].strip()}")
    answers = [[json.loads(line) for line in each.stdout.splitlines() if line.startswith("{")] for each in results]
    slowest = [max(float(answer["seconds"]) for answer in turn) for turn in zip(*answers, strict=True)]
    return Finished(name, answers[0][0]["loss"], slowest[1 + WARM :])


class Job:
    """The processes of a contender."""

    def __init__(self, name: str, size: str, processes: int) -> None:
        port, env = free_port(), _environ()
        self.name, self.seconds, self.first = name, list[float](), 0.0
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(RANK), name, size, str(rank), str(processes), f"127.0.0.1:{port}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env,
            )
            for rank in range(processes)
        ]

    def train(self, steps: int) -> dict[str, float]:
        """So many steps of all processes: the answer of the slowest. Raises `UserError` where one has ended."""
        for rank in self.ranks:
            assert rank.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # one that has ended gives no answer, which is told below
                print(steps, file=rank.stdin, flush=True)
        answers = []
        for rank in self.ranks:
            assert rank.stdout is not None
            line = ""
            while not line.startswith("{"):  # gloo prints there when it connects
                line = rank.stdout.readline()
                if not line:
                    raise UserError(f"{self.name}: a process has ended with status {rank.wait()}; see above")
            answers.append(json.loads(line))
        return max(answers, key=lambda each: float(each["seconds"]))

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def _check(arguments: argparse.Namespace) -> None:
    """Raise `UserError` for what cannot be measured."""
    for name in arguments.contenders.split(","):
        if name not in KNOWN and not (arguments.rate and ALGORITHM.fullmatch(name)):
            more = "; with --rate jaxdist-ddp-ALGORITHM, too"
            raise UserError(f"--contenders: {name!r} is not known; allowed: {', '.join(KNOWN)}{more}")
    if arguments.size not in SIZES:
        raise UserError(f"--size: {arguments.size!r} is not known; allowed: {', '.join(SIZES)}")
    rows = SIZES[arguments.size].rows
    if arguments.processes < 1 or rows % arguments.processes:
        raise UserError(f"--processes: {arguments.processes}; allowed: a divisor of the batch's {rows} sequences")
    if arguments.rounds < 2 or arguments.steps < 1:
        raise UserError(
            f"--rounds: {arguments.rounds}, --steps: {arguments.steps}; allowed: 2 rounds or more, whose spread is"
            " given, and 1 step or more"
        )


def measure(arguments: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Medians of all contenders, and their speed in relation to each other."""
    _check(arguments)
    jobs: Sequence[Job | Finished] = (one_by_one if arguments.rate else in_turns)(arguments, say)
    return {
        "processes": arguments.processes,
        "rate": arguments.rate,
        "size": arguments.size,
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "rows": [_row(job) for job in jobs],
        **measured_on(),
    }


def _say_first(jobs: Sequence[Job | Finished], say: Callable[[str], None]) -> None:
    """Say the first loss of the last job. Raises `UserError` where it is not that of the first job."""
    first, last = jobs[0], jobs[-1]
    say(f"{last.name}: loss {last.first:.6f}")
    if not abs(last.first - first.first) <= AGREE * first.first:
        raise UserError(f"{last.name}: its first loss is not that of {first.name}: another computation")


def one_by_one(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[Finished]:
    """All contenders on virtual hosts, which have trained one after the other."""
    jobs: list[Finished] = []
    for name in arguments.contenders.split(","):
        jobs.append(on_hosts(name, arguments))
        _say_first(jobs, say)
    return jobs


def in_turns(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[Job]:
    """All contenders on this host, which have trained in turns."""
    jobs: list[Job] = []
    try:
        for name in arguments.contenders.split(","):
            jobs.append(Job(name, arguments.size, arguments.processes))
            jobs[-1].first = jobs[-1].train(1)["loss"]
            _say_first(jobs, say)
        for i in range(WARM + arguments.rounds):
            for job in jobs[i % len(jobs) :] + jobs[: i % len(jobs)]:
                seconds = job.train(arguments.steps)["seconds"]
                job.seconds += [seconds] * (i >= WARM)
    finally:
        for job in jobs:
            job.end()
    return jobs


def _row(job: Job | Finished) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(job.seconds, n=4)
    return {"contender": job.name, "seconds": middle, "quartiles": [low, high], "all": job.seconds}


def text(found: dict[str, Any]) -> list[str]:
    """A line a contender: milliseconds of a step, and jaxdist's speed over it where both do the same."""
    at = {row["contender"]: row["seconds"] for row in found["rows"]}
    lines = []
    for row in found["rows"]:
        name, own = row["contender"], "jaxdist-zero3" if "fsdp2" in row["contender"] else "jaxdist-ddp"
        low, high = (1e3 * each for each in row["quartiles"])
        ratio = ""
        if name.startswith("torch") and own in at:
            ratio = f", jaxdist {row['seconds'] / at[own]:.2f} x"
        if name.startswith("jaxdist-ddp-") and "torch-ddp" in at:
            ratio = f", {at['torch-ddp'] / row['seconds']:.2f} x torch-ddp"
        lines.append(f"{name:22} {1e3 * row['seconds']:7.1f} ms ({low:.1f} to {high:.1f}){ratio}")
    return lines


@reports_mistakes
def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=COUNT, default=2)
    parser.add_argument("--contenders", default=CONTENDERS)
    parser.add_argument("--rate", metavar="RATE", help="of the links of virtual hosts, as 100mbit; default: this host")
    parser.add_argument("--size", default="gloo", help="of harness/task.py")
    parser.add_argument("--rounds", type=COUNT, default=9)
    parser.add_argument("--steps", type=COUNT, default=5, help="in a turn")
    parser.add_argument("--json", type=output_file, metavar="OUT")
    arguments = parser.parse_args(argv)
    found = measure(arguments, lambda line: print(line, flush=True))
    print("\n".join(text(found)))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
