"""Faults on one of two ranks, at random moments: the right rank and cause are named, in time, and nobody stays behind.

A few run in CI; all of them, 20 times each, before a release: pytest -m exhaustive tests/system/test_faults.py.
"""

import json
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import Processes, free_port, torchrun, wait_until

T = 5.0  # train.watchdog_s
TRIALS = 20
START = 300.0  # seconds, on a machine that has much else to do
YAML = """
model: {layers: 1, width: 16, heads: 2}
data: {path: text.py, seq_len: 16, global_batch: 8}
mesh: {data: 2, fsdp: 2}
parallel: {strategy: zero3, min_shard_bytes: 0}
optimizer: {lr: 1e-2, schedule: constant}
train: {steps: 100000, eval_every: 0, sample_tokens: 0, watchdog_s: 5}
checkpoint: {every: 0}
devices: {platform: cpu, simulated: 2}
observe: {report: false}
"""
FAULTY = str(Path(__file__).parents[1] / "faulty.py")
KINDS = ("exception", "failing", "kill", "stop", "data", "loop", "program", "config", "corpus")


class Job(Processes):
    """Two ranks, each in a folder of its own, with one run directory."""

    def begin(
        self, fault: dict[str, Any], *options: str, odd: tuple[str, ...] = (), seeds: tuple[int, int] = (0, 0)
    ) -> None:
        """odd: options of the rank that the fault names only. seeds: of the ranks' texts."""
        port = free_port()
        for rank in (0, 1):
            own = self.folder / f"rank{rank}"
            own.mkdir()
            (own / "tiny.yaml").write_text(YAML)
            words = np.random.default_rng(seeds[rank]).choice(["def", "return", "x", "y", "0", "1", "+", ":"], 4000)
            (own / "text.py").write_text(" ".join(words))
            more = odd if rank == fault.get("rank") else ()
            command = [FAULTY, json.dumps(fault), "--config", "tiny.yaml", "--run-dir", str(self.folder / "run")]
            self.add([*command, *options, *more], torchrun(port, rank), own)

    @property
    def metrics(self) -> Path:
        return self.folder / "run" / "metrics.jsonl"

    def fault_time(self, rank: int) -> float:
        """When the fault happened, by its own word."""
        found = re.search(r"^fault ([\d.]+)$", self.err(rank), re.MULTILINE)
        assert found, self.logs()
        return float(found[1])

    def ended(self, rank: int, seconds: float) -> float:
        """When it ended."""
        wait_until(lambda: self.running[rank].poll() is not None, f"the end of rank {rank}", seconds, logs=self.logs)
        return time.time()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.kill()


def hit(job: Job, rank: int, number: int, chance: random.Random) -> float:
    """Send a signal to a rank at a random moment. Returns when."""
    job.wait_for_step(job.metrics, chance.randint(1, 40), START)
    time.sleep(chance.random())
    job.running[rank].send_signal(number)
    return time.time()


def survivors_end(job: Job, ranks: tuple[int, ...], since: float, bound: float) -> None:
    """They have ended with 75 within `bound` of the fault."""
    for rank in ranks:
        took = job.ended(rank, START) - since
        assert took < bound, f"{took:.1f} s\n{job.logs()}"
        assert job.running[rank].returncode == 75, job.logs()


def stacks(job: Job, rank: int) -> str:
    return (job.folder / "run" / "stacks" / f"rank{rank}.txt").read_text()


def check_exception(job: Job, rank: int, chance: random.Random, kind: str = "exception", seconds: float = 0) -> None:
    job.begin({"kind": kind, "rank": rank, "step": chance.randint(1, 60), "seconds": seconds})
    took = max(job.ended(each, START) for each in (0, 1)) - job.fault_time(rank)
    assert took < 5 + seconds, job.logs()
    assert [job.running[each].returncode for each in (rank, 1 - rank)] == [1, 75], job.logs()
    assert f"failed: rank {rank}: RuntimeError: a bug of the user\n" in job.err(1 - rank)
    assert "RuntimeError: a bug of the user" in job.err(rank)


def check_failing(job: Job, rank: int, chance: random.Random) -> None:
    """What is closed on the way, a save say, takes longer than T."""
    check_exception(job, rank, chance, "failing", T + 3)


def check_kill(job: Job, rank: int, chance: random.Random) -> None:
    job.begin({"kind": "none"})
    survivors_end(job, (1 - rank,), hit(job, rank, signal.SIGKILL, chance), T + 2)
    assert f"gone: rank {rank} was killed or has crashed, last in " in job.err(1 - rank)
    assert "Thread 0x" in stacks(job, 1 - rank)  # a collective that failed of it may have left the loop already


def check_late(job: Job, rank: int, chance: random.Random) -> None:
    """JAX aborts the process before its watch has noticed: that waits."""
    job.begin({"kind": "late", "rank": 1 - rank})
    survivors_end(job, (1 - rank,), hit(job, rank, signal.SIGKILL, chance), T + 2)
    assert "Terminating process because the JAX distributed service" in job.err(1 - rank)
    assert f"gone: rank {rank} was killed or has crashed, last in " in job.err(1 - rank)


def check_stop(job: Job, rank: int, chance: random.Random) -> None:
    job.begin({"kind": "none"})
    survivors_end(job, (1 - rank,), hit(job, rank, signal.SIGSTOP, chance), T + 2)
    assert re.search(rf"^silent: rank {rank} has said nothing for [45]\.", job.err(1 - rank), re.MULTILINE), job.logs()
    assert "Thread 0x" in stacks(job, 1 - rank)
    job.running[rank].send_signal(signal.SIGCONT)  # woken, it does not stay
    assert job.ended(rank, 10)
    assert job.running[rank].returncode == 75, job.logs()


def check_stuck(job: Job, rank: int, fault: dict[str, Any], phase: str) -> None:
    job.begin({"rank": rank, **fault})
    for each in (0, 1):
        job.ended(each, START)
    survivors_end(job, (0, 1), job.fault_time(rank), T + 2)
    line = rf"^stuck: rank {rank} in {phase} .*; rank {1 - rank} in "
    for each in (0, 1):
        assert re.search(line, job.err(each), re.MULTILINE), job.logs()
        assert "steps" in stacks(job, each)


def check_data(job: Job, rank: int, chance: random.Random) -> None:
    step = chance.randint(3, 60)
    check_stuck(job, rank, {"kind": "data", "step": step}, f"data of step {step + 1}")
    assert "spoiled_batch" in stacks(job, rank)


def check_loop(job: Job, rank: int, chance: random.Random) -> None:
    step = chance.randint(4, 60)
    check_stuck(job, rank, {"kind": "loop", "step": step}, f"dispatch of step {step}")
    assert "in_step" in stacks(job, rank)


def check_save(job: Job, rank: int, chance: random.Random) -> None:
    """The others wait for the save before, all in the same phase; saving has ten times the limit."""
    job.begin({"kind": "save", "rank": rank}, "checkpoint.every=4")
    for each in (0, 1):
        job.ended(each, START)
    survivors_end(job, (0, 1), job.fault_time(rank), 10 * T + 10)
    line = (
        rf"^stuck: rank {rank} in settle of step \d+ for [\d.]+ s \(the save: writing for [\d.]+ s\); rank {1 - rank} "
    )
    for each in (0, 1):
        assert re.search(line, job.err(each), re.MULTILINE), job.logs()
        assert "faulty.py" in stacks(job, rank)


def check_first_batch(job: Job, rank: int, chance: random.Random) -> None:
    """It has no limit. Rank 0 says where the ranks are; before gloo gives up, which it does after 30 s."""
    job.begin({"kind": "data", "rank": rank, "step": 0, "unmoved": 4.0})
    there, other = f"rank {rank} in first batch of step 1", rf"rank {1 - rank} in \w+ of step [12]"
    said = rf"^no step for \d+ s: {there} for [\d.]+ s; {other} for"
    wait_until(lambda: re.search(said, job.err(0, notices=True), re.MULTILINE), said, START, logs=job.logs)


def refused(job: Job, line: str) -> None:
    """Both ranks end with 2 and this line, before the first step."""
    assert job.wait(START) == [2, 2], job.logs()
    for rank in (0, 1):
        errors = [each for each in job.err(rank).splitlines() if not each.startswith("fault")]
        assert len(errors) == 1, job.logs()
        assert re.fullmatch(f"error: {line}; allowed: the same on every rank", errors[0]), job.logs()
    assert not job.metrics.exists()


HASH = "[0-9a-f]+"


def check_program(job: Job, rank: int, chance: random.Random) -> None:
    job.begin({"kind": "program", "rank": rank})
    refused(job, rf"program of a step \(SHA-256\): {HASH} on rank 1, but {HASH} on rank 0")


def check_config(job: Job, rank: int, chance: random.Random) -> None:
    rate = round(chance.uniform(0.02, 0.9), 3)
    values = ["0.01", str(rate)] if rank else [str(rate), "0.01"]
    job.begin({"kind": "none", "rank": rank}, odd=(f"optimizer.lr={rate}",))
    refused(job, f"optimizer.lr: {values[1]} on rank 1, but {values[0]} on rank 0")


def check_corpus(job: Job, rank: int, chance: random.Random) -> None:
    other = chance.randint(1, 10**6)
    job.begin({"kind": "none", "rank": rank}, seeds=(0, other) if rank else (other, 0))
    refused(job, rf"data \(SHA-256\): {HASH} on rank 1, but {HASH} on rank 0")


CHECKS: dict[str, Callable[[Job, int, random.Random], None]] = {
    "exception": check_exception, "failing": check_failing, "kill": check_kill, "stop": check_stop, "data": check_data,
    "save": check_save, "first batch": check_first_batch, "loop": check_loop, "program": check_program,
    "config": check_config, "corpus": check_corpus, "late": check_late,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rank"),
    [("failing", 1), ("late", 0), ("stop", 1), ("loop", 0), ("program", 1), ("save", 1), ("first batch", 0)],
)
def test_fault(job: Job, kind: str, rank: int) -> None:
    check = CHECKS[kind]
    check(job, rank, random.Random(7))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trial", range(TRIALS))
def test_fault_at_random(job: Job, trial: int, kind: str) -> None:
    check = CHECKS[kind]
    check(job, trial % 2, random.Random(f"{kind} {trial}"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 1])
def test_no_false_alarm(job: Job, rank: int) -> None:
    """500 steps with evaluations and checkpoints, and one rank that does nothing for 3 s."""
    options = ("train.steps=500", "train.eval_every=100", "train.eval_batches=1", "checkpoint.every=200")
    job.begin({"kind": "hiccup", "rank": rank, "step": 250, "seconds": 3}, *options)
    assert job.wait(2 * START) == [0, 0], job.logs()
    assert job.fault_time(rank)
    assert not re.search("slow|stuck|silent|gone|failed", job.err(0) + job.err(1)), job.logs()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "phase", "seconds"),
    [("slow", "host", 0.1), pytest.param("slow_data", "data", 0.5, marks=pytest.mark.exhaustive)],
)
def test_a_slow_rank_is_named(job: Job, kind: str, phase: str, seconds: float) -> None:
    """Within 20 steps after those that compile. Batches are made ahead: only what is longer than a step is seen."""
    job.begin({"kind": kind, "rank": 1, "seconds": seconds}, "train.steps=23")
    assert job.wait(START) == [0, 0], job.logs()
    line = rf"^slow: rank 1, [\d.,]+ times the own work of the others, most of it in {phase};"
    assert re.search(line, job.err(0), re.MULTILINE), job.logs()
    assert "slow: rank 0" not in job.err(0)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_all_ranks_stay_until_the_report_is_written(job: Job, fails: bool) -> None:
    """A signal to a rank that has nothing more to do changes nothing; an exception of rank 0 has its name."""
    job.begin({"kind": "finish", "rank": 0, "seconds": 4, "fails": fails}, "train.steps=3")
    wait_until(lambda: "fault " in job.err(0), "the fault", START, logs=job.logs)
    time.sleep(2)
    job.running[1].send_signal(signal.SIGTERM)
    assert job.wait(START) == ([1, 75] if fails else [0, 0]), job.logs()
    assert ("failed: rank 0: RuntimeError: a bug of the user\n" in job.err(1)) == fails, job.logs()
