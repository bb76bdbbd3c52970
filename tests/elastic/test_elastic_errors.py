"""Elastic runs without Ray: what is refused in one line, what a log and a server's file may be."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxdist.cli.main import main
from jaxdist.elastic import cluster as clusters
from jaxdist.elastic.log import Log, read_log
from jaxdist.elastic.outer import Outer
from jaxdist.elastic.replay import replay
from jaxdist.elastic.rule import BoundedStaleness
from jaxdist.elastic.run_directory import Settings, begin, check_directory, first_line, log_so_far
from jaxdist.elastic.server import Server
from jaxdist.errors import UserError

START = {
    "event": "start",
    "period": 1,
    "bound": 2,
    "servers": 1,
    "outer": "sgd",
    "lr": 1.0,
    "momentum": 0.0,
    "numbers": 3,
    "dtype": "float32",
}
PULL = {"event": "pull", "worker": "w0", "version": 0}
PUSH = {"worker": "w0", "clock": 0, "base": 0, "staleness": 0}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)


def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = clusters.importlib.util.find_spec
    monkeypatch.setattr(clusters.importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    assert main(["elastic", "quickstart"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install 'jaxdist[elastic]'" in said


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (1, "x\nInvalidAuthToken: Authentication token is missing", "has another token"),
        (1, "RuntimeError: Version mismatch: The cluster was started with:\n    Ray: 2.61.0", "another Ray or Python"),
        (None, "", "has not answered as Ray does in 15 s"),
        (1, "a\nRuntimeError: no raylet here\n", "cannot be joined: RuntimeError: no raylet here"),
    ],
)
def test_a_cluster_that_does_not_let_us_in_is_one_line(
    status: int | None, said: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "probe", lambda address: (status, said))
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(UserError, match=expected):
        clusters.check_answers(f"127.0.0.1:{server.getsockname()[1]}")


def test_an_address_where_nobody_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(UserError, match=f"127.0.0.1:{port} cannot be reached: Connection refused"):
        clusters.check_answers(f"127.0.0.1:{port}")
    for address in ("ray://there:1", "there", "there:0", ":6379", "there:port"):
        with pytest.raises(UserError, match="allowed: HOST:PORT, auto or local"):
            clusters.check_answers(address)


def test_too_few_resources_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SimpleNamespace(available_resources=lambda: {"CPU": 1.0})
    with pytest.raises(UserError, match="the cluster has 4 CPUs, and 5 are needed"):
        clusters.check_resources(ray, {"CPU": 5}, {"CPU": 4.0}, False, clusters.ELASTIC)
    monkeypatch.setattr(clusters, "FREE_S", 0.0)
    with pytest.raises(UserError, match="the cluster has 1 of 4 CPUs free, and 2 are needed"):
        clusters.check_resources(ray, {"CPU": 2}, {"CPU": 4.0}, False, clusters.ELASTIC)
    clusters.check_resources(ray, {"CPU": 1, "GPU": 0}, {"CPU": 4.0}, False, clusters.ELASTIC)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--workers", "0"], "--workers: 0; allowed: an integer >= 1 and <= 1024"),
        (["--bound", "-1"], "--bound: -1; allowed: an integer >= 0 and <= 10000"),
        (["--patience", "0"], "--patience: 0; allowed: a number >= 1 and <= 86400"),
        (["--patience", "nan"], "--patience: nan; allowed"),
        (["--least", "3"], "--least: 3; allowed: 1 to 2"),
        (["--outer", "nesterof"], "did you mean nesterov?"),
        (["--outer-lr", "0"], "--outer-lr: 0; allowed"),
        (["--outer-momentum", "1"], "--outer-momentum: 1; allowed"),
    ],
)
def test_options_that_cannot_be_meant(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["elastic", "quickstart", *arguments, "--run-dir", str(tmp_path / "run")]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def write(path: Path, *events: Any) -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], "does not begin with an event start"),
        ([PULL], "does not begin with an event start"),
        ([START, {"event": "explode"}], "log:2: no event; allowed: start"),
        ([START, PULL | {"worker": "../../w0"}], "log:2: '../../w0' is no worker"),
        ([START, PULL | {"version": True}], "log:2: version is 'True'"),
        ([START, PULL | {"version": -1}], "log:2: version is -1"),
        ([START, {"event": "commit", "version": 1, "pushes": []}], "log:2: a commit without pushes"),
        ([START, {"event": "commit", "version": 1, "pushes": [{"worker": "w0"}]}], "log:2: clock is 'None'"),
        ([START | {"momentum": None}], "log:1: momentum is 'None'"),
    ],
)
def test_a_log_that_no_run_writes_is_refused(events: list[Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=expected):
        read_log(write(tmp_path / "log", *events))


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "log", START, PULL)
    with path.open("a") as file:
        file.write('{"event": "comm')
    assert [event["event"] for event in read_log(path)] == ["start", "pull"]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([START | {"numbers": 4}], "the configuration has 3 parameters in float32, the log 4 in float32"),
        ([START, {"event": "commit", "version": 1, "pushes": [PUSH]}], "w0 ends round 0, and has not pulled"),
        ([START, PULL, {"event": "commit", "version": 1, "pushes": [PUSH | {"clock": 3}]}], "w0 ends round 3 after"),
        ([START, PULL, {"event": "commit", "version": 7, "pushes": [PUSH]}], "version 7 follows 0"),
        ([START, {"event": "restored", "version": 5}], "goes back to version 5, which was not made"),
    ],
)
def test_a_log_that_contradicts_itself_is_not_replayed(events: list[Any], expected: str) -> None:
    from elastic_toy import Toy

    class Three(Toy):
        def work(self, flat: np.ndarray) -> Any:
            self.clock += 1
            return SimpleNamespace(clock=self.clock - 1, loss=0.0, moved=np.ones(3, np.float32))

    with pytest.raises(UserError, match=expected):
        replay(events, np.zeros(3, np.float32), Three)


def test_a_server_comes_back_to_a_version_that_is_intact(tmp_path: Path) -> None:
    server = Server(1, Outer("nesterov", 0.7, 0.5), str(tmp_path))
    server.begin(np.arange(3, dtype=np.float32))
    seen = {0: server.read()}
    for version in range(1, 6):
        assert server.stage("w0", np.full(3, version, np.float32)) == ""
        assert server.commit(["w0"]) == version
        seen[version] = server.read()
    other = Server(1, Outer("nesterov", 0.7, 0.5), str(tmp_path))
    assert sorted(other.intact()) == [3, 4, 5]
    path = tmp_path / "1" / "5.part"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert sorted(other.intact()) == [3, 4]
    other.restore(4)
    assert other.read().tobytes() == seen[4].tobytes() and sorted(other.saved()) == [3, 4]
    other.stage("w1", np.full(3, 5, np.float32))
    assert other.commit(["w1"]) == 5 and other.read().tobytes() == seen[5].tobytes()  # its memory came back, too


def test_a_push_of_another_shape_or_not_finite_is_named() -> None:
    server = Server(0, Outer("sgd", 1.0, 0.0), None)
    server.begin(np.zeros(3, np.float32))
    assert server.stage("w0", np.zeros(4, np.float32)) == "float32[4], not float32[3]"
    assert server.stage("w0", np.zeros(3, np.float64)) == "float64[3], not float32[3]"
    assert server.stage("w0", np.array([0, np.nan, 0], np.float32)) == "not finite"
    assert server.staged == {}


@pytest.mark.parametrize("given", ["parallel.local.every=10", "train.ema=0.99"])
def test_what_a_worker_would_keep_for_itself_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    key, value = given.split("=")
    assert main(["elastic", "quickstart", given]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{key}: {value} does not go with jaxdist elastic" in said


SETTINGS = Settings(1, 1, bound=2, patience=1.0, period=1, rounds=4, outer=Outer("sgd", 1.0, 0.0))


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "checkpoints"])
def test_the_folder_of_another_run_is_left_as_it_is(name: str, tmp_path: Path) -> None:
    (tmp_path / "servers" / "0").mkdir(parents=True)
    (tmp_path / name).write_text("of another run", encoding="utf-8")
    (tmp_path / "servers" / "0" / "3.part").write_text("mine", encoding="utf-8")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    with pytest.raises(UserError, match=f"--run-dir: .* has a {name} of another run"):
        check_directory(SETTINGS, "train: {}", tmp_path, [])
    assert before == {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}


def test_a_run_that_was_stopped_before_it_began_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "servers" / "0").mkdir(parents=True)
    for name in ("config.yaml", "servers/0/3.part", "servers/notes.txt"):
        (tmp_path / name).write_text("train: {}", encoding="utf-8")
    (tmp_path / "elastic.jsonl").write_text('{"event": "sta', encoding="utf-8")
    assert log_so_far(tmp_path / "elastic.jsonl") == []
    check_directory(SETTINGS, "train: {}", tmp_path, [])
    begin("train: {}", tmp_path)
    assert (tmp_path / "servers" / "notes.txt").exists() and not (tmp_path / "servers" / "0" / "3.part").exists()


def test_a_log_without_its_configuration_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has a log without its config\.yaml"):
        check_directory(SETTINGS, "train: {}", tmp_path, [START | first_line(SETTINGS)])


def test_a_log_that_was_cut_goes_on_with_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "elastic.jsonl"
    path.write_text(json.dumps(START) + "\n" + '{"event": "pu', encoding="utf-8")
    with Log(path, lambda: 0.0) as log:
        log(PULL)
    assert [event["event"] for event in read_log(path)] == ["start", "pull"]


def test_a_loss_that_is_not_finite_leaves_a_log_that_can_be_read(tmp_path: Path) -> None:
    with Log(tmp_path / "elastic.jsonl", lambda: 0.0) as log:
        log(START)
        rule = BoundedStaleness(bound=1, patience=1.0, log=log)
        rule.pull("w0", 0.0)
        assert rule.push("w0", 0, float("nan"), 0.0) and rule.commit()
    assert read_log(tmp_path / "elastic.jsonl")[-1]["pushes"][0]["loss"] is None


def test_a_log_with_a_rule_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UserError, match=r"--outer: 'zz'; allowed: sgd"):
        replay([START | {"outer": "zz"}], np.zeros(3, np.float32), lambda name: None)  # type: ignore[arg-type,return-value]


def test_the_figures_of_costs_need_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which is said before anything is computed."""
    assert main(["cost", "--json", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert f"--json: '{tmp_path}': is a folder; allowed: a file, as {tmp_path}/out" in said.err and said.out == ""


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("25", "dgx-b200; where bits a second are meant: 25gbit\n"),
        ("25Gbit/s", "dgx-b200; where bits a second are meant: 25gbit\n"),
        ("100Mbps", "where bits a second are meant: 100mbit\n"),
        ("h100", "dgx-b200; did you mean nvlink-h100?\n"),
        ("H100", "dgx-b200; did you mean nvlink-h100?\n"),
        ("t4", "it has no NVLink"),
        ("p4d.24xl", "did you mean p4d.24xlarge?"),
        ("0", "'0' is not known; allowed: a rate such as 10gbit, or pcie3"),
        ("zzz", "dgx-b200\n"),
    ],
)
def test_a_link_that_is_nearly_one_gets_a_hint(link: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "--link", link]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1, err
