"""Elastic runs with Ray's processes: workers and servers that are killed and stopped, replays, and errors of one line.

Slow, for a cluster takes seconds to start; skipped where Ray is not installed, which `.ci/run` does install.
"""

import itertools
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from elastic_toy import Toy
from jobs import marked, wait_until
from syntax import ROOT

from jaxdist.elastic.cluster import cluster
from jaxdist.elastic.log import read_log
from jaxdist.elastic.outer import Outer
from jaxdist.elastic.replay import replay, sha256_of
from jaxdist.elastic.run import ElasticRun, run_elastic
from jaxdist.elastic.run_directory import Settings, check_directory, log_so_far
from jaxdist.elastic.worker import Worker
from jaxdist.errors import RunStopped, UserError
from jaxdist.runtime.run_claim import RunClaim
from jaxdist.runtime.run_folder import ELASTIC_LOG

pytest.importorskip("ray", reason="SKIPPED: Ray is not installed: pip install 'jaxdist[elastic]'")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
PATIENCE = 2.0
TINY = """
model: {name: gpt, style: gpt2, layers: 1, width: 16, heads: 2}
data: {source: text, path: stdlib, seq_len: 16, global_batch: 4}
optimizer: {name: adamw, lr: 3e-3}
train: {steps: 6, eval_every: 6, eval_batches: 1}
devices: {platform: cpu, simulated: 1}
"""
# Runs a command with the default handler of SIGINT, which those in the background of a script do not have.
IN_FRONT = "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
SETTINGS = Settings(3, 2, bound=2, patience=PATIENCE, period=1, rounds=40, outer=Outer("nesterov", 0.7, 0.5))


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))
        patch.delenv("RAY_ADDRESS", raising=False)
        jax.devices()  # a program that has begun to use jax is warned of every fork; a warning is a failure here
        with cluster(cpus=8):
            import ray

            yield ray


class Dying(Toy):
    """A worker whose process dies in each round."""

    def work_in_parts(self, *parts: Any) -> tuple[Any, ...]:
        os._exit(1)


def play(settings: Settings, folder: Path, disturb: Any = None, worker: type = Toy) -> Any:
    text = "train: {}\n"
    with RunClaim(folder) as claim:
        before = log_so_far(folder / ELASTIC_LOG)
        check_directory(settings, text, folder, before)
        return run_elastic(settings, text, claim, before, print, worker=worker, disturb=disturb)


def check(folder: Path, settings: Settings, result: Any) -> list[dict[str, Any]]:
    """The log's staleness is in the bound, and it gives the same bits in this process."""
    events = read_log(folder / ELASTIC_LOG)
    again = replay(events, Toy("w0").numbers(), Toy)
    assert sha256_of(again.flat) == events[-1]["sha256"] == sha256_of(result.flat) and again.version == result.version
    stale = [push["staleness"] for event in events if event["event"] == "commit" for push in event["pushes"]]
    assert max(stale) <= settings.bound
    return events


def test_workers_are_killed_stopped_and_started(ray: Any, tmp_path: Path) -> None:
    done: list[int] = []

    def disturb(run: ElasticRun, event: dict[str, Any]) -> None:
        if event["event"] == "commit" and run.rule.pushes >= 8 * (1 + len(done)) and len(done) < 2:
            name, worker = next(reversed(run.workers.items()))
            pid = ray.get(worker.pid.remote())  # which waits until it has started
            if name in run.rule.seen:  # or else nobody would miss it
                os.kill(pid, (signal.SIGKILL, signal.SIGSTOP)[len(done)])
                done.append(pid)

    result = play(SETTINGS, tmp_path / "run", disturb)
    events = check(tmp_path / "run", SETTINGS, result)
    assert len(done) == 2
    lost = [event["reason"] for event in events if event["event"] == "lost"]
    assert sorted(lost) == ["died", "silent"]
    joined = [event for event in events if event["event"] == "join" and event["version"] > 0]
    assert joined, "the killed worker is replaced"
    times = [event["t"] for event in events if event["event"] == "commit"]
    assert max(b - a for a, b in itertools.pairwise(times)) < PATIENCE + 1.5


def test_a_killed_server_comes_back_with_all_but_its_last_round(ray: Any, tmp_path: Path) -> None:
    pids: list[int] = []

    def disturb(run: ElasticRun, event: dict[str, Any]) -> None:
        if event["event"] == "commit" and run.rule.version == 3:
            pids.append(ray.get(run.servers[1].__ray_call__.remote(lambda server: os.getpid())))
        if event["event"] == "commit" and run.rule.version == 12 and len(pids) == 1:
            os.kill(pids[0], signal.SIGKILL)
            pids.append(0)

    result = play(SETTINGS, tmp_path / "run", disturb)
    events = check(tmp_path / "run", SETTINGS, result)
    (back,) = [event for event in events if event["event"] == "restored"]
    before = [event["version"] for event in events[: events.index(back)] if event["event"] == "commit"]
    assert max(before) - 1 <= back["version"] <= max(before)


def test_a_run_goes_on_where_it_was_stopped(ray: Any, tmp_path: Path) -> None:
    play(SETTINGS._replace(rounds=10), tmp_path / "run")
    result = play(SETTINGS._replace(rounds=25), tmp_path / "run")
    events = check(tmp_path / "run", SETTINGS, result)
    assert [event["event"] for event in events].count("restored") == 1
    assert result.version >= 20
    with pytest.raises(UserError, match="--bound: 3, but the run in .* was started with 2"):
        play(SETTINGS._replace(bound=3, rounds=25), tmp_path / "run")


def test_servers_have_their_place_beside_more_workers_than_there_is_place_for(ray: Any, tmp_path: Path) -> None:
    """Also a server that dies: workers that have waited for a place do not get it."""
    done: list[int] = []

    def disturb(run: ElasticRun, event: dict[str, Any]) -> None:
        if event["event"] == "commit" and run.rule.version == 5 and not done:
            done.append(ray.get(run.servers[0].__ray_call__.remote(lambda server: os.getpid())))
            os.kill(done[0], signal.SIGKILL)

    settings = SETTINGS._replace(workers=9)
    events = check(tmp_path / "run", settings, play(settings, tmp_path / "run", disturb))
    assert [event["event"] for event in events].count("restored") == 1


def test_workers_that_always_die_end_a_run_that_was_taken_up_again(ray: Any, tmp_path: Path) -> None:
    settings = SETTINGS._replace(workers=1, rounds=3)
    play(settings, tmp_path / "run")
    with pytest.raises(RunStopped, match="7 workers have died, and nobody has pushed meanwhile") as stopped:
        play(settings._replace(rounds=9), tmp_path / "run", worker=Dying)
    assert "Some common causes" not in str(stopped.value)


def test_a_save_that_fails_ends_the_run_in_a_line(ray: Any, tmp_path: Path) -> None:
    """Also that of the last version, which nothing comes after."""

    def disturb(run: ElasticRun, event: dict[str, Any]) -> None:
        if event["event"] == "commit" and run.rule.pushes == 3:
            folder = tmp_path / "run" / "servers" / "0"
            folder.rename(tmp_path / "away")
            folder.write_text("a file", encoding="utf-8")

    with pytest.raises(RunStopped, match="elastic: .*servers/0"):
        play(SETTINGS._replace(workers=1, rounds=3), tmp_path / "run", disturb)


def test_training_that_has_failed_ends_a_worker_in_a_line() -> None:
    worker = Worker("w0", TINY, 1)
    worker.first()
    assert np.isfinite(worker.work(worker.numbers()).loss)
    with pytest.raises(UserError, match=r"w0 has no finite loss or gradient in round 1"):
        worker.work(np.full_like(worker.numbers(), np.nan))


def without_ray(**more: str) -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return environ | {"PYTHONPATH": str(ROOT)} | more


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_ray_starts_leaves_nothing(number: int, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY, encoding="utf-8")
    mark = f"mark-{secrets.token_hex(8)}"
    program = [sys.executable, "-m", "jaxdist.cli.main", "elastic", "tiny.yaml", "--run-dir", "run"]
    options: dict[str, Any] = {"cwd": tmp_path, "env": without_ray(MARK=mark), "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", IN_FRONT, *program], **options) as process:
        assert process.stdout is not None and any("Ray starts" in line for line in process.stdout)
        while len(marked(mark, "environ")) < 3:  # some of Ray's, and not all
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        said = process.stdout.read()
        assert process.wait(60) == 75 and "with --run-dir run goes on" in said, said
    wait_until(lambda: not marked(mark, "environ"), "the end of all its processes", 30)


def test_the_command_and_its_replay(tmp_path: Path) -> None:
    """A cluster of the command's own, of which nothing is left, and jobs that train; then the log, in one process."""
    (tmp_path / "tiny.yaml").write_text(TINY, encoding="utf-8")
    counts = ["--workers", "2", "--servers", "2", "--period", "2", "--rounds", "6", "--bound", "1"]
    for command, said in (
        (["elastic", "tiny.yaml", *counts, "--patience", "60", "--run-dir", "run"], "\nround      "),
        (["replay", "run"], "the same bits"),
    ):
        program = [sys.executable, "-m", "jaxdist.cli.main", *command]
        done = subprocess.run(program, cwd=tmp_path, env=without_ray(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
    events = read_log(tmp_path / "run" / ELASTIC_LOG)
    assert 2 < events[-1]["loss"] < 6
