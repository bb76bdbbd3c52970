"""The commands `elastic` and `replay` without Ray: what they say, what a run that goes on keeps, what is compared."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from syntax import ROOT

from jaxdist.cli.elastic import _COUNTS
from jaxdist.cli.main import main
from jaxdist.config.load import load_config, to_yaml
from jaxdist.elastic import cluster as clusters
from jaxdist.elastic import run as runs
from jaxdist.elastic import worker as workers
from jaxdist.elastic.cluster import Cluster
from jaxdist.elastic.log import progress_line
from jaxdist.elastic.outer import Outer
from jaxdist.elastic.replay import replay
from jaxdist.elastic.run import Result
from jaxdist.elastic.run_directory import Settings, first_line

CONFIG = "train: {steps: 20}\noptimizer: {lr: 0.01}\n"
SETTINGS = Settings(2, 1, bound=4, patience=60.0, period=10, rounds=2, outer=Outer("nesterov", 0.5, 0.3))
START = first_line(SETTINGS) | {"numbers": 3, "dtype": "float32"}
PULL = {"event": "pull", "worker": "w0", "version": 0}
PUSH = {"worker": "w0", "clock": 0, "base": 0, "staleness": 0, "loss": 0.5}
COMMIT = {"event": "commit", "version": 1, "pushes": [PUSH]}
END = {"event": "end", "version": 2, "sha256": "0", "loss": None}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings of the runs that have started, in a cluster that is none."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = list[Settings]()

    @contextmanager
    def cluster(**_: Any) -> Iterator[Cluster]:
        yield Cluster("here:1", True, {})

    def run(settings: Settings, *_: Any) -> Result:
        found.append(settings)
        return Result(np.zeros(3), 2, None, {0: 2})

    monkeypatch.setattr(clusters, "cluster", cluster)
    monkeypatch.setattr(runs, "run_elastic", run)
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where my.yaml is, and r, a run that has done one round."""
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(CONFIG, encoding="utf-8")
    Path("r").mkdir()
    Path("r/config.yaml").write_text(to_yaml(load_config(Path("my.yaml"))), encoding="utf-8")
    write_log(START, PULL, COMMIT)
    return tmp_path


def write_log(*events: Any) -> None:
    Path("r/elastic.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_ray_has_started(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[str]()

    def init(**_: Any) -> Any:
        signal.signal(signal.SIGTERM, lambda *_: done.append("the handler of Ray"))  # as Ray does, with an exit in it
        signal.raise_signal(number)
        done.append("started")

    def shutdown() -> None:
        signal.raise_signal(number)  # a second Ctrl-C
        done.append("ended")

    ray = SimpleNamespace(init=init, shutdown=shutdown, cluster_resources=lambda: done.append("used"))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(clusters, "load_ray", lambda secure: ray)
    monkeypatch.setattr(clusters.tempfile, "mkdtemp", lambda **_: None)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), clusters.cluster(address="local"):
        pass
    assert done == ["started", "ended"] and signal.getsignal(signal.SIGTERM) is before


def test_what_ray_tells_is_cut_to_its_first_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = SimpleNamespace(init=lambda **_: SimpleNamespace(address_info={"gcs_address": "a:1"}), shutdown=lambda: None)
    ray.cluster_resources = ray.available_resources = lambda: {"CPU": 1.0}
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(clusters, "load_ray", lambda secure: ray)
    told = "(raylet) A worker died. To troubleshoot, check the logs. Worker exit detail: 900 letters."
    with clusters.cluster(address="local"):
        thread = threading.Thread(target=print, args=(told,), name="ray_listen_error_messages")
        thread.start()
        thread.join()
        print("Mine. All of it.")
    assert capsys.readouterr().out == "(raylet) A worker died.\nMine. All of it.\n"


def test_a_stop_names_the_folder(
    folder: Path, started: list[Settings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(runs, "run_elastic", stop)
    assert main(["elastic", "my.yaml", "--run-dir", "new run"]) == 75
    assert "stopped    the same command with --run-dir 'new run' goes on\n" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_run_directory_may_be_at_home(
    folder: Path, started: list[Settings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    assert main(["elastic", "my.yaml", "--run-dir", "~/run"]) == 0
    assert f"log        {folder}/home/run/elastic.jsonl" in capsys.readouterr().out


def test_a_run_says_where_its_log_is(folder: Path, started: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["elastic", "my.yaml", "--run-dir", "new"]) == 0
    said = capsys.readouterr().out
    assert "log        new/elastic.jsonl; to check it: jaxdist replay new\n" in said
    assert "1 server, 2 workers, bound 4, 4 rounds of 10 steps" in said and "steps " not in said.replace("10 steps", "")


def test_a_line_of_progress_has_the_rounds_the_loss_and_the_staleness() -> None:
    pushes = [PUSH, PUSH | {"loss": 1.5, "staleness": 3}, PUSH | {"loss": None}]
    assert progress_line(COMMIT | {"pushes": pushes}, 7, 40) == "round      7/40, loss 1.0000, staleness 3"
    assert "loss not finite" in progress_line(COMMIT | {"pushes": pushes[2:]}, 7, 40)


def test_a_run_that_goes_on_keeps_what_is_not_given(folder: Path, started: list[Settings]) -> None:
    """Also the learning rate, whose default depends on the number of workers."""
    assert main(["elastic", "my.yaml", "--workers", "3", "--run-dir", "r"]) == 0
    assert started == [SETTINGS._replace(workers=3, least=3, rounds=6)]
    assert main(["elastic", "my.yaml", "--workers", "3", "--run-dir", "new"]) == 0
    assert started[1].outer == Outer("sgd", 1 / 3, 0.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--outer-lr", "0.4"],
            "--outer-lr: 0.4, but the run in r was started with 0.5; leave it out, or give another",
        ),
        (["--outer-momentum", "0.4"], "--outer-momentum: 0.4, but the run in r was started with 0.3"),
        (["--bound", "0"], "--bound: 0, but the run in r was started with 4"),
        (["optimizer.lr=0.02"], "optimizer.lr: 0.02 (was 0.01 in r); put it back, or use another --run-dir"),
        (["train.steps=30", "train.seed=7"], "train.steps: 30 (was 20 in r); besides, train.seed "),
        (["train.steps=30"], "put it back (--rounds makes a run longer), or use another"),
    ],
)
def test_what_a_run_cannot_change_is_named_before_ray_starts(
    arguments: list[str], said: str, folder: Path, started: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["elastic", "my.yaml", "--run-dir", "r", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1, err
    assert started == [] and not Path("r/run.lock").exists()


def test_a_folder_of_another_run_is_refused_before_ray_starts(
    folder: Path, started: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("r/elastic.jsonl").unlink()
    Path("r/metrics.jsonl").touch()
    assert main(["elastic", "my.yaml", "--run-dir", "r"]) == 2 and started == []
    assert "r has a metrics.jsonl of another run" in capsys.readouterr().err


def test_the_same_configuration_in_other_words_goes_on(folder: Path, started: list[Settings]) -> None:
    Path("r/config.yaml").write_text(f"# mine\n{CONFIG}", encoding="utf-8")
    assert main(["elastic", "my.yaml", "--run-dir", "r"]) == 0 and len(started) == 1


def test_a_run_that_has_ended_has_nothing_left_to_do(
    folder: Path, started: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(START, PULL, COMMIT, PULL, COMMIT | {"version": 2, "pushes": [PUSH | {"clock": 1}]}, END)
    assert main(["elastic", "my.yaml", "--run-dir", "r", "--rounds", "2"]) == 0 and started == []
    said = capsys.readouterr().out
    assert "nothing is left to do: 2 rounds are done, and 2 are asked for" in said and "--rounds 4" in said
    assert main(["elastic", "my.yaml", "--run-dir", "r", "--rounds", "3"]) == 0 and len(started) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--period", "30"], "steps      30 for each worker, not 20 (train.steps): a round has 30"),
        (["--period", "15"], "steps      30 for each worker, not 20 (train.steps): a round has 15"),
        (["--period", "20"], None),
        (["--period", "30", "--rounds", "5"], None),
    ],
)
def test_rounds_that_do_not_come_to_the_steps_are_said(
    arguments: list[str], said: str | None, folder: Path, started: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["elastic", "my.yaml", *arguments]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("steps")]
    assert lines == ([] if said is None else [f"{said}; --period or --rounds change that"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--outer", "sgd", "--outer-momentum", "0.9"],
            "--outer-momentum: 0.9 has no effect with --outer sgd; leave it",
        ),
        (["--outer-momentum", "0.9"], "--outer-momentum: 0.9 has no effect with --outer sgd"),
        (["--outer", "nesterov"], "--outer: nesterov without --outer-momentum is sgd; give it"),
    ],
)
def test_a_momentum_without_effect_is_refused(
    arguments: list[str], said: str, folder: Path, started: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["elastic", "my.yaml", *arguments]) == 2 and started == []
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1, err
    assert not Path("runs").exists()


def test_more_workers_than_cores_are_said(
    folder: Path, started: list[Settings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    for number, warned in (("2", False), ("64", True)):
        assert main(["elastic", "my.yaml", "--workers", number]) == 0
        said = "warning: 64 workers are more processes than the 2 cores of this machine" in capsys.readouterr().out
        assert said == warned


class Half:
    """A worker whose loss is 0.5 in each round."""

    def __init__(self, name: str, text: str = "", period: int = 1) -> None:
        self.clock = -1

    def first(self) -> None:
        pass

    def numbers(self) -> np.ndarray:
        return np.zeros(3, np.float32)

    def twin(self, name: str) -> "Half":
        return Half(name)

    def work(self, flat: np.ndarray) -> Any:
        self.clock += 1
        return SimpleNamespace(clock=self.clock, loss=0.5, moved=np.ones(3, np.float32))


def test_each_logged_loss_is_compared_to_the_bits() -> None:
    pull, second = PULL | {"version": 1}, COMMIT | {"version": 2, "pushes": [PUSH | {"clock": 1}]}
    first = np.zeros(3, np.float32)
    again = replay([START, PULL, COMMIT, pull, second], first, Half)
    assert (again.losses, again.wrong) == (2, [])
    second["pushes"][0]["loss"] = float(np.nextafter(0.5, 1.0))
    again = replay([START, PULL, COMMIT, pull, second], first, Half)
    assert again.losses == 2
    assert again.wrong == ["w0's round 1 (in version 2): 0.5000000000000001 is logged, and 0.5 comes out"]


def test_a_changed_loss_in_the_log_of_a_stopped_run_is_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "Worker", Half)
    assert main(["replay", "r"]) == 0
    said = capsys.readouterr().out
    assert "no end: the run was stopped; its losses are compared" in said and "the same bits: 1 loss\n" in said
    write_log(START, PULL, COMMIT | {"pushes": [PUSH | {"loss": 0.25}]})
    assert main(["replay", "r"]) == 1
    said = capsys.readouterr().out
    assert "OTHER LOSSES: 1 of 1, first w0's round 0 (in version 1): 0.25 is logged, and 0.5 comes out" in said
    assert "the same bits" not in said


def test_the_page_has_the_defaults() -> None:
    page = (ROOT / "docs" / "elastic.md").read_text(encoding="utf-8")
    for name, (default, *_) in _COUNTS.items():
        assert f"| `--{name}` | {default} | " in page, name
