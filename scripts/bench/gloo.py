"""A training step of GPT-2 by several processes on CPUs, which communicate by gloo: jaxdist beside PyTorch, in turns.

    python scripts/bench/gloo.py [--processes 2] [--contenders jaxdist-ddp,torch-ddp,...] [--rounds 9] [--json OUT]

jaxdist-ddp and jaxdist-zero3 train beside DistributedDataParallel (torch-ddp) and FSDP2 (torch-fsdp2), eagerly and by
`torch.compile` (torch-ddp-compiled, torch-fsdp2-compiled). All have the same weights and batches, fp32, and AdamW after
clipping; the first losses must agree. Every contender is a job of its own with a core for each process, and all jobs
stay; in a round each trains in its turn while the others wait. Given are medians over the rounds with their spread.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.task import SIZES

from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.observe import measured_on
from jaxdist.runtime.network.addresses import free_port

RANK = Path(__file__).parent / "harness" / "gloo_rank.py"
CONTENDERS = "jaxdist-ddp,torch-ddp,torch-ddp-compiled,jaxdist-zero3,torch-fsdp2"
KNOWN = (*CONTENDERS.split(","), "torch-fsdp2-compiled")
WARM = 2  # rounds that are not counted
AGREE = 1e-5  # first losses, relative


class Job:
    """The processes of a contender."""

    def __init__(self, name: str, size: str, processes: int) -> None:
        port, folder = free_port(), str(RANK.parents[1])
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "XLA_FLAGS": "", "OMP_NUM_THREADS": "1"}
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
        if name not in KNOWN:
            raise UserError(f"--contenders: {name!r} is not known; allowed: {', '.join(KNOWN)}")
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
    jobs: list[Job] = []
    try:
        for name in arguments.contenders.split(","):
            jobs.append(Job(name, arguments.size, arguments.processes))
            jobs[-1].first = jobs[-1].train(1)["loss"]
            say(f"{name}: loss {jobs[-1].first:.6f}")
            if not abs(jobs[-1].first - jobs[0].first) <= AGREE * jobs[0].first:
                raise UserError(f"{name}: its first loss is not that of {jobs[0].name}: another computation")
        for i in range(WARM + arguments.rounds):
            for job in jobs[i % len(jobs) :] + jobs[: i % len(jobs)]:
                seconds = job.train(arguments.steps)["seconds"]
                job.seconds += [seconds] * (i >= WARM)
    finally:
        for job in jobs:
            job.end()
    rows = [_row(job) for job in jobs]
    return {
        "processes": arguments.processes,
        "size": arguments.size,
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "rows": rows,
        **measured_on(),
    }


def _row(job: Job) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(job.seconds, n=4)
    return {"contender": job.name, "seconds": middle, "quartiles": [low, high], "all": job.seconds}


def text(found: dict[str, Any]) -> list[str]:
    """A line a contender: milliseconds of a step, and jaxdist's speed over it where both do the same."""
    at = {row["contender"]: row["seconds"] for row in found["rows"]}
    lines = []
    for row in found["rows"]:
        own = "jaxdist-zero3" if "fsdp2" in row["contender"] else "jaxdist-ddp"
        low, high = (1e3 * each for each in row["quartiles"])
        other = row["contender"].startswith("torch") and own in at
        ratio = f", jaxdist {row['seconds'] / at[own]:.2f} x" if other else ""
        lines.append(f"{row['contender']:22} {1e3 * row['seconds']:7.1f} ms ({low:.1f} to {high:.1f}){ratio}")
    return lines


@reports_mistakes
def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--contenders", default=CONTENDERS)
    parser.add_argument("--size", default="gloo", help="of harness/task.py")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="in a turn")
    parser.add_argument("--json", metavar="OUT")
    arguments = parser.parse_args(argv)
    found = measure(arguments, lambda line: print(line, flush=True))
    print("\n".join(text(found)))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
