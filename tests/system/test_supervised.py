"""Training under the launcher: kills at random times change nothing, a signal stops it, secrets stay out of files."""

import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import child
import numpy as np
import pytest
from jobs import wait_until

from jaxdist import load_config, make_mesh, make_optimizer, state_target
from jaxdist.checkpoint import Checkpoints
from jaxdist.models.gpt import gpt
from jaxdist.observe import read_metrics

pytestmark = pytest.mark.xdist_group("processes")

ROOT = Path(__file__).parents[2]
TRAIN = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", "tiny.yaml"]
LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py")]
YAML = """
model: {layers: 1, width: 8, heads: 2}
data: {path: text.py, seq_len: 8, global_batch: 8}
mesh: {data: 2, fsdp: 2}
parallel: {strategy: zero3, min_shard_bytes: 0, grad_sync: {deterministic: true}}
optimizer: {lr: 1e-2, schedule: constant}
train: {steps: 200, eval_every: 0, sample_tokens: 0}
checkpoint: {every: 5, keep: 2}
devices: {platform: cpu, simulated: 2}
observe: {report: false}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words = np.random.default_rng(0).choice(["def", "return", "x", "y", "0", "1", "+", ":"], 4000)
    (tmp_path / "tiny.yaml").write_text(YAML)
    (tmp_path / "text.py").write_text(" ".join(words))
    return tmp_path


def begin(folder: Path, run: str, *overrides: str, options: tuple[str, ...] = (), **environ: str) -> subprocess.Popen:
    """Two processes of two devices under the launcher."""
    clean = child.environment() | child.QUICK | environ
    with (folder / f"{run}.out").open("wb") as out:
        command = [*LAUNCH, "-n", "2", *options, "--", *TRAIN, "--run-dir", run, *overrides]
        return subprocess.Popen(command, cwd=folder, env=clean, stdout=out, stderr=subprocess.STDOUT)


def ended(job: subprocess.Popen, folder: Path, run: str, seconds: float) -> int:
    try:
        return job.wait(seconds)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()
        pytest.fail(f"not ended after {seconds} s\n{(folder / f'{run}.out').read_text()}")


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the ranks that a launcher runs, in no order."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(job: subprocess.Popen, folder: Path, count: int) -> None:
    """Until the run has taken so many steps."""
    wait_until(
        lambda: lines(folder / "run") >= count,
        f"step {count}",
        300,
        over=lambda: job.poll() is not None,
        logs=(folder / "run.out").read_text,
    )


def words_of(folder: Path, run: str, steps: int) -> list[np.ndarray]:
    """All words of the last checkpoint's parameters and optimizer state."""
    config = load_config(folder / "tiny.yaml", [f"data.path={folder / 'text.py'}", "devices.simulated=4"])
    optimizer = make_optimizer(config.optimizer, steps=steps, deterministic=True)
    target = state_target(gpt(config.model, max_length=config.data.seq_len), optimizer, make_mesh())
    with Checkpoints(folder / run / "checkpoints", keep=2) as checkpoints:
        state = checkpoints.restore(steps, target)
    import jax

    return [np.asarray(leaf).ravel().view(np.uint32) for leaf in jax.tree.leaves(state)]


def kill_at_random(job: subprocess.Popen, run: Path, kills: int, steps: int, seed: int) -> list[tuple[float, float]]:
    """Kill -9 a random rank at random times, each after another step of the run's; the seconds from each kill until the
    state is restored, and until the next new step."""
    choose, waits = random.Random(seed), []
    marks = sorted(choose.uniform(1, steps * 0.9) for _ in range(kills))
    for mark in marks:
        while lines(run) < mark and job.poll() is None:
            time.sleep(0.005)
        time.sleep(choose.uniform(0, 0.3))
        victims = ranks_of(job.pid)
        if job.poll() is not None:
            break
        assert len(victims) == 2, victims
        began, attempts = time.monotonic(), len(log_of(run))
        os.kill(choose.choice(victims), signal.SIGKILL)
        found = []
        for line in ("resumed|step", "step"):  # killed before the first checkpoint, it does not say resumed
            while job.poll() is None and not re.search(rf"^({line}) ", "".join(log_of(run)[attempts:]), re.MULTILINE):
                time.sleep(0.01)
            found.append(time.monotonic() - began)
        waits.append((found[0], found[1]))
    return waits


def log_of(run: Path) -> list[str]:
    """What rank 0 has said in each attempt."""
    return (run / "logs" / "rank0.log").read_text().split("=== attempt")


@pytest.mark.parametrize(
    ("kills", "steps"),
    [pytest.param(1, 30, marks=pytest.mark.slow), pytest.param(10, 200, marks=pytest.mark.exhaustive)],
)
def test_kills_change_nothing(kills: int, steps: int, folder: Path) -> None:
    override = f"train.steps={steps}"
    assert ended(begin(folder, "whole", override), folder, "whole", 300) == 0, (folder / "whole.out").read_text()
    job = begin(folder, "killed", override, options=("--grace", "2", "--max-restarts", str(kills)))
    try:
        waits = kill_at_random(job, folder / "killed", kills, steps, seed=kills)
        assert ended(job, folder, "killed", 600) == 0, (folder / "killed.out").read_text()
    finally:
        job.kill()
        job.wait()
    out = (folder / "killed.out").read_text()
    assert out.count("(SIGKILL)") >= len(waits) == kills, out
    want, got = (read_metrics(folder / run / "metrics.jsonl") for run in ("whole", "killed"))
    for key in ("step", "loss", "grad_norm"):
        assert [record[key] for record in got] == [record[key] for record in want]
    for one, other in zip(words_of(folder, "killed", steps), words_of(folder, "whole", steps), strict=True):
        np.testing.assert_array_equal(one, other)
    for what, seconds in zip(("to the restored state", "to the next step"), zip(*waits, strict=True), strict=True):
        print(f"restart {what}: median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s of {kills}")


SECRETS = {
    "HF_TOKEN": "hf-0123456789",
    "WANDB_API_KEY": "wandb-0123456789",
    "AWS_SECRET_ACCESS_KEY": "aws-0123456789",
    "JAX_SOME_TOKEN": "jax-0123456789",
    "JAXDIST_API_KEY": "own-0123456789",
    "NCCL_KEY": "nccl-0123456789",
}


@pytest.mark.slow
def test_secrets_and_one_line_about_the_job(folder: Path) -> None:
    """Planted in the environment, they are in no file of the run; the run directory is the launcher's choice."""
    clean = child.environment() | child.QUICK | SECRETS
    command = [*LAUNCH, "-n", "2", "--", *TRAIN, "train.steps=3", "observe.report=true"]
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (folder / "runs").iterdir()
    files = [path for path in run.rglob("*") if path.is_file()]
    names = {path.relative_to(run).parts[0] for path in files}
    assert {"logs", "checkpoints", "env.json", "metrics.jsonl", "config.yaml", "report.html"} <= names
    texts = {str(path): path.read_bytes() for path in files} | {"out": done.stdout, "err": done.stderr}
    for secret in SECRETS.values():
        assert [name for name, text in texts.items() if secret.encode() in text] == []
    assert "JAXDIST_ATTEMPT" in json.loads((run / "env.json").read_text())["variables"]
    row = re.search(r"^\[0\] job +(.*)$", done.stdout.decode(), re.MULTILINE)
    assert row is not None
    assert row[1] == (
        f"2 ranks on 1 host (0 and 1 on {socket.gethostname()}), 2 devices each; mesh: data between processes of a host"
    )
    assert [path.name for path in folder.iterdir() if path.name not in ("tiny.yaml", "text.py")] == ["runs"]


@pytest.mark.slow
def test_a_signal_to_the_launcher_stops_with_a_checkpoint(folder: Path) -> None:
    """The same command goes on."""
    options = ("train.steps=100000", "checkpoint.every=0")
    for number in (signal.SIGINT, signal.SIGTERM):
        before = lines(folder / "run")
        job = begin(folder, "run", *options)
        try:
            wait_for_lines(job, folder, before + 5)
            job.send_signal(number)
            assert ended(job, folder, "run", 60) == 75, (folder / "run.out").read_text()
        finally:
            job.kill()
            job.wait()
        steps = [int(path.name) for path in (folder / "run" / "checkpoints").iterdir()]
        assert max(steps) == lines(folder / "run") > before


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["by its time limit", "by a signal to one rank"])
def test_a_run_that_was_asked_to_stop_is_not_started_again(asked: str, folder: Path) -> None:
    """It has saved a checkpoint, and the launcher leaves it at that."""
    limit = ("train.max_hours=0.004",) if asked == "by its time limit" else ()
    job = begin(folder, "run", "train.steps=1000000", "checkpoint.every=0", *limit)
    try:
        if not limit:
            wait_for_lines(job, folder, 5)
            os.kill(max(ranks_of(job.pid)), signal.SIGTERM)
        assert ended(job, folder, "run", 120) == 75, (folder / "run.out").read_text()
    finally:
        job.kill()
        job.wait()
    (newest,) = (int(path.name) for path in (folder / "run" / "checkpoints").iterdir())
    assert newest == lines(folder / "run")
    out = (folder / "run.out").read_text()
    assert out.splitlines()[-1] == "[launch] stopped; the same command goes on" and "restart" not in out
    assert not list((folder / "run" / "logs").glob("stopped*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "second",
    [(), pytest.param(("--rank", "0"), marks=pytest.mark.slow), pytest.param(("--rank", "2"), marks=pytest.mark.slow)],
)
def test_a_job_that_cannot_begin(second: tuple[str, ...], folder: Path) -> None:
    """A rank that never comes: 75, and its name. A rank given twice: 2. Each in one line."""
    clean = child.environment() | {"JAXDIST_JOIN_TIMEOUT": "4"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    method = ["--init-method", f"tcp://127.0.0.1:{port}", "--num-processes", "3"]
    if second == ("--rank", "2"):
        ranks = (("--rank", "0"), second, second)
    else:
        ranks = (("--rank", "0"), second) if second else (("--rank", "0"),)
    jobs = [
        subprocess.Popen(
            [*TRAIN, *method, *rank], cwd=folder, env=clean, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in ranks
    ]
    try:
        found = [(job, *job.communicate(timeout=60)) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for _, out, err in found:
        assert out == "" and err.count("\n") == 1, (out, err)
    statuses, said = [job.returncode for job in jobs], [err for *_, err in found]
    if not second:
        assert statuses == [75]
        assert said[0].startswith(f"error: ranks 1 and 2 of 3 did not come to 127.0.0.1:{port} within 4 s")
    elif second == ("--rank", "2"):
        assert statuses == [2, 2, 2] and all(text.startswith("error: rank 2 is given twice: to") for text in said)
    else:
        assert sorted(statuses) == [2, 75] and f"port {port}: Address already in use" in said[statuses.index(2)]
