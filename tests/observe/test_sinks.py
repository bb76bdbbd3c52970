"""TensorBoard and Weights & Biases: read back by TensorBoard's own reader and by `wandb sync`, after kill -9 too."""

import importlib.util
import io
import itertools
import math
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from child import QUICK, environment
from levels import levels
from matplotlib.image import imread
from wandb_server import synced

from jaxdist.config.checks import check_packages
from jaxdist.config.load import load_config
from jaxdist.config.sections.observe import ObserveConfig, WandbConfig
from jaxdist.errors import UserError
from jaxdist.observe import MetricsWriter, read_metrics
from jaxdist.observe.report import Prediction, RunRecord, Sent
from jaxdist.observe.report.pictures import figures_of, png_of
from jaxdist.observe.sinks import Image, Sinks
from jaxdist.observe.sinks.mlflow import MLflow
from jaxdist.observe.sinks.tensorboard import TensorBoard
from jaxdist.observe.sinks.wandb import WandB
from jaxdist.trainer.train import train

CONFIG = """
model: {{layers: 1, width: 16, heads: 2}}
data: {{path: {path}, seq_len: 16, global_batch: 8}}
train: {{steps: 9, eval_every: 3, eval_batches: 1, sample_tokens: 0}}
checkpoint: {{every: 2}}
devices: {{platform: cpu, simulated: 1}}
observe: {{console: plain, {keys}}}
"""
KILLED = """
import os, signal
from jaxdist.observe.sinks import Sinks

record = Sinks.record
def killing(self, step, metrics):
    record(self, step, metrics)
    if step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
Sinks.record = killing
"""
CHARTS = ["loss", "grad_norm", "lr", "throughput", "time", "time_over_the_run", "history", "memory"]  # on one device
COMMAND = "import sys; from jaxdist.cli.main import main; sys.exit(main())"


class Failing:
    """A sink on a disk that is full at these steps, and its records."""

    def __init__(self, *full: int) -> None:
        self.full, self.steps = full, list[float]()
        self.told_failed: bool | None = None

    def open(self, run_dir: Path, config: str, step: int) -> None:
        if 0 in self.full:
            raise OSError(28, "No space left on device")

    def record(self, record: Mapping[str, float]) -> None:
        if record["step"] in self.full:
            raise OSError(28, "No space left on device")
        self.steps.append(record["step"])

    def pictures(self, step: int, images: Mapping[str, Image]) -> None:
        self.record({"step": step})

    def close(self, *, failed: bool) -> None:
        self.told_failed = failed


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """{name: [(step, value)]} of a folder of events, and the steps of the text "configuration"."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def is_picture(png: bytes) -> bool:
    """Whether these are the bytes of a PNG image that is not of one colour."""
    image = imread(io.BytesIO(png))
    return png.startswith(b"\x89PNG") and image.shape[1] > 500 and len(np.unique(image[..., :3])) > 5


def pictures(folder: Path) -> dict[str, list[int]]:
    """{name: [step]} of the images of a folder of events, each of which is one."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = event_accumulator.EventAccumulator(str(folder), size_guidance={"images": 0})
    found.Reload()
    for tag in found.Tags()["images"]:
        for each in found.Images(tag):
            assert is_picture(each.encoded_image_string) and each.width > 500 and each.height > 200
    return {tag: [each.step for each in found.Images(tag)] for tag in found.Tags()["images"]}


def test_a_sink_that_fails_is_said_and_counted() -> None:
    said: list[dict[str, Any]] = []
    failing, closed = Failing(2, 3, 5), Failing(0)
    with Sinks({"tensorboard": failing, "wandb": closed}, said.append).open(Path(), "", 0) as sinks:
        for step in range(1, 7):
            sinks.record(step, {"loss": 1.0})
    assert failing.steps == [1, 4, 6] and closed.steps == []
    assert [each["what"] for each in said] == [
        "observe.wandb: OSError: [Errno 28] No space left on device; the run goes on without it",
        "observe.tensorboard: OSError: [Errno 28] No space left on device; at step 2; the run goes on",
        "observe.tensorboard: failed 3 times; metrics.jsonl has every step",
    ]


@pytest.mark.parametrize(("error", "failed"), [(None, False), (OSError, True), (KeyboardInterrupt, False)])
def test_a_sink_is_told_whether_the_run_failed(error: type[BaseException] | None, failed: bool) -> None:
    sink = Failing()
    with suppress(OSError, KeyboardInterrupt), Sinks({"mlflow": sink}).open(Path(), "", 0):
        if error is not None:
            raise error
    assert sink.told_failed is failed


@pytest.mark.parametrize(("rate", "failed"), levels([(1e30, True), (1e-3, False)], everyday=2))
def test_a_run_tells_its_sinks_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float, failed: bool
) -> None:
    (tmp_path / "text").write_text("some words " * 100)
    (tmp_path / "run.yaml").write_text(CONFIG.format(path=tmp_path / "text", keys="report: false"))
    changed = [f"optimizer.lr={rate}", "optimizer.schedule=constant"]
    sink = Failing()
    monkeypatch.setattr("jaxdist.trainer.run.make_sinks", lambda observe, warn: Sinks({"mlflow": sink}, warn))
    assert train(load_config(tmp_path / "run.yaml", changed), tmp_path / "run") == int(failed)
    assert sink.told_failed is failed


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_packages(ObserveConfig())
    with pytest.raises(UserError, match=r"^observe\.tensorboard: .* pip install 'jaxdist\[tensorboard\]', or"):
        check_packages(ObserveConfig(tensorboard=True))
    with pytest.raises(UserError, match=r"^observe\.wandb: .* pip install 'jaxdist\[wandb\]', or"):
        check_packages(ObserveConfig(wandb=WandbConfig(project="mine")))
    with pytest.raises(UserError, match=r"^observe\.mlflow: .* pip install 'jaxdist\[mlflow\]', or"):
        check_packages(ObserveConfig(mlflow="mine"))


def test_events_after_a_rollback(tmp_path: Path) -> None:
    """Steps that are taken again stand there once, as they were the last time; a torn record of a kill ends a file."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'jaxdist[tensorboard]'")
    with Sinks({"tensorboard": TensorBoard()}, print).open(tmp_path, "model: {name: gpt}\n", 0) as sinks:
        for first, times in ((1, 1.0), (3, 2.0)):
            for step in range(first, 6):
                sinks.record(step, {"loss": step * times, "time": 1e9 + step})
            if times == 1:
                for path in (tmp_path / "tensorboard").iterdir():
                    with path.open("ab") as file:
                        file.write(path.read_bytes()[-30:-9])
                sinks.rewind(2)
    assert points(tmp_path / "tensorboard") == {"loss": [(1, 1.0), (2, 2.0), (3, 6.0), (4, 8.0), (5, 10.0)]}


def test_pictures_of_an_earlier_end_are_replaced(tmp_path: Path) -> None:
    """Also those of the same step, where a run that is complete is started again."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'jaxdist[tensorboard]'")
    record = RunRecord("a", metrics=[{"step": step, "loss": 1.0 / step} for step in range(1, 6)])
    images = {each.name: Image(png_of(each), each.label) for each in figures_of(record)}
    assert list(images) == ["loss"]
    for steps, last in (((1, 2), 2), ((3, 4), 4), ((), 4)):
        first = steps[0] - 1 if steps else last
        with Sinks({"tensorboard": TensorBoard()}, print).open(tmp_path, "", first) as sinks:
            for step in steps:
                sinks.record(step, {"loss": 1.0})
            sinks.pictures(last, images)
        assert pictures(tmp_path / "tensorboard") == {"report/loss": [last]}
    assert points(tmp_path / "tensorboard") == {"loss": [(step, 1.0) for step in range(1, 5)]}


def test_wandb_gets_the_numbers_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lines that it does not have yet; no arrays, which it would take for tables."""
    logged: list[Any] = []
    run = SimpleNamespace(starting_step=2, log=lambda numbers, step: logged.append((step, numbers)))
    fake = SimpleNamespace(Settings=lambda **settings: None, init=lambda **settings: run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with MetricsWriter(tmp_path / "metrics.jsonl", resume_step=None) as writer:
        for step in range(1, 4):
            writer.write(step, {"loss": 1.0, "experts/load": np.ones((1, 2))})
    WandB("mine", "offline").open(tmp_path, "", 3)
    assert logged == [(2, {"loss": 1.0}), (3, {"loss": 1.0})]


def test_each_chart_of_the_report_is_a_picture() -> None:
    lines = [
        {"step": i, "loss": 3.0 / i, "eval/loss": 1.0, "time": 1e9 + i, "time/device": 0.9, "time/host": 0.1, "lr": 0.1}
        for i in range(1, 40)
    ]
    lines[-1]["arrays"] = {"experts/load": [[0.0, 2.0, math.nan]]}
    sent = Sent(("data", "fsdp"), "gradients", "psum", ("backward",), 1, 100.0, "inside a host")
    told = {"baselines": {"a model with $ in its name": 2.0}}
    record = RunRecord(
        "a", metrics=lines, environment=told, prediction=Prediction((), {"parameters": 3, "temporary": 5}, {}, (sent,))
    )
    found = figures_of(record)
    names = ["loss", "lr", "experts_load", "time", "time_over_the_run", "history", "memory", "sent"]
    assert [each.name for each in found] == names
    assert all(is_picture(png_of(each)) for each in found)
    assert figures_of(RunRecord("b", metrics=[{"step": 1, "loss": float("nan")}])) == []


def killed_and_resumed(tmp_path: Path, keys: str, again: bool = False) -> list[dict[str, Any]]:
    """The metrics of a run that kill -9 ended after step 7, and that went on. again: it is started once more then."""
    (tmp_path / "text.py").write_text("def f(x): return x + 1\n" * 200)
    (tmp_path / "run.yaml").write_text(CONFIG.format(path=tmp_path / "text.py", keys=keys))
    command = ["train", str(tmp_path / "run.yaml"), "--run-dir", str(tmp_path / "run")]
    extra = {"PYTHONPATH": ":".join([environment()["PYTHONPATH"], *(path for path in sys.path if path)])}
    for script, status in ((KILLED + COMMAND, -9), *[(COMMAND, 0)] * (1 + again)):
        done = subprocess.run(
            [sys.executable, "-c", script, *command], env=environment() | QUICK | extra, capture_output=True, text=True
        )
        assert done.returncode == status, done.stderr
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [each["step"] for each in records] == list(range(1, 10))
    return records


@pytest.mark.slow
def test_tensorboard_of_a_killed_run(tmp_path: Path) -> None:
    """Each record of metrics.jsonl is there once: every name, in order, in float32."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'jaxdist[tensorboard]'")
    records = killed_and_resumed(tmp_path, "tensorboard: true")
    found = points(tmp_path / "run" / "tensorboard")
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 3  # one for each session, and the pictures
    assert pictures(tmp_path / "run" / "tensorboard") == {f"report/{name}": [9] for name in CHARTS}
    assert set(found) == set(itertools.chain(*records)) - {"step", "time"}
    for name, values in found.items():
        assert values == [(each["step"], pytest.approx(each[name])) for each in records if name in each], name


@pytest.mark.slow
def test_wandb_of_a_killed_run(tmp_path: Path) -> None:
    """What is to be sent is one file with each step once; the run keeps its id."""
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'jaxdist[wandb]'")
    records = killed_and_resumed(tmp_path, "wandb: {project: mine, mode: offline}", again=True)
    folders = sorted(path.name for path in (tmp_path / "run" / "wandb").glob("*-run-*"))
    name = (tmp_path / "run" / "wandb_run_id").read_text()
    assert [folder.split("-")[0] for folder in folders] == ["earlier", "earlier", "offline"]
    assert all(folder.endswith(f"-{name}") for folder in folders)
    [folder] = (tmp_path / "run" / "wandb").glob(f"offline-run-*-{name}")
    found = synced(folder)
    assert found.name == name
    assert [(line["_step"], line["loss"]) for line in found.history] == [
        (each["step"], each["loss"]) for each in records
    ]
    images = [{key: value for key, value in line.items() if key.startswith("report/")} for line in found.history]
    assert images[:-1] == [{}] * 8 and sorted(images[-1]) == sorted(f"report/{name}" for name in CHARTS)
    assert all(is_picture(found.files[each["path"]]) for each in images[-1].values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its database
@pytest.mark.slow
def test_mlflow_of_a_killed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of MLflow, with each line of metrics.jsonl once; the settings are its parameters."""
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'jaxdist[mlflow]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)  # where it keeps files of its own
    records = killed_and_resumed(tmp_path, "mlflow: mine", again=True)
    client = mlflow.MlflowClient()
    [experiment] = client.search_experiments(filter_string="name = 'mine'")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == (tmp_path / "run" / "mlflow_run_id").read_text()
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["model.layers"] == "1" and run.data.params["observe.mlflow"] == "mine"
    for name in (
        "step",
        "loss",
        "grad_norm",
        "eval/loss",
    ):  # times of a step that was taken twice are those of the first
        found = sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, name))
        assert found == [(each["step"], each[name]) for each in records if name in each], name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its database
def test_mlflow_gets_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session begins with the lines that a killed one could not send; a step that is taken again stays as it was."""
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'jaxdist[mlflow]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)  # where it keeps files of its own
    (tmp_path / "metrics.jsonl").touch()
    with Sinks({"mlflow": MLflow("mine")}, print).open(tmp_path, "model: {name: gpt, layers: 2}\n", 0) as sinks:
        for step in (1, 3):
            sinks.record(step, {"loss": 1.0 / step, "acc@5": 0.5, "time": 1e9 + step})
    with MetricsWriter(tmp_path / "metrics.jsonl", resume_step=None) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": 2.0 / step, "experts/load": np.ones((1, 2))})
    image = Image(b"of a chart", "its text")
    with Sinks({"mlflow": MLflow("mine")}, print).open(tmp_path, "model: {name: gpt, layers: 3}\n", 3) as sinks:
        sinks.record(4, {"loss": math.nan})
        sinks.pictures(4, {"loss": image})
    client, run = mlflow.MlflowClient(), (tmp_path / "mlflow_run_id").read_text()
    found = {point.step: point for point in client.get_metric_history(run, "loss")}
    assert [found[step].value for step in (1, 2, 3)] == [1.0, 1.0, 1 / 3] and math.isnan(found[4].value)
    assert found[1].timestamp == 1000000001000 and len(found) == 4
    assert [point.step for point in client.get_metric_history(run, "acc_5")] == [1, 3]
    assert client.get_run(run).data.params == {"model.name": "gpt", "model.layers": "2"}
    assert client.get_run(run).data.tags["resumed.model.layers"] == "3"
    with Sinks({"mlflow": MLflow("mine")}, print).open(tmp_path, "model: {name: gpt, layers: 2}\n", 4):
        tags = client.get_run(run).data.tags  # set back
    assert tags["resumed.model.layers"] == "2" and "resumed.model.name" not in tags
    assert [each.path for each in client.list_artifacts(run, "report")] == ["report/loss.png"]


def pretend_mlflow(monkeypatch: pytest.MonkeyPatch, **methods: Any) -> None:
    """An mlflow whose client does nothing but these."""
    nothing = ("update_run", "log_text", "set_terminated", "log_artifact", "log_batch", "get_experiment_by_name")
    client = SimpleNamespace(
        **dict.fromkeys(nothing, lambda *_, **__: None)
        | {"create_experiment": lambda name: "1", "get_metric_history": lambda run, name: []}
        | {"get_run": lambda run: SimpleNamespace(data=SimpleNamespace(params={"a": "1"}, tags={}))}
        | {"create_run": lambda place, run_name: SimpleNamespace(info=SimpleNamespace(run_id="a run"))}
        | methods
    )
    entities = SimpleNamespace(Metric=lambda *each: each, Param=lambda *each: each, RunTag=lambda *each: each)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: client, entities=entities))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)


def test_no_step_waits_for_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer costs no step a second, and is said once; one that comes back gets all lines."""
    sent, down = list[int](), threading.Event()

    def log_batch(run: str, metrics: Any = (), params: Any = ()) -> None:
        if down.is_set():
            time.sleep(0.2)
            raise OSError("nobody answers")
        sent.extend(step for name, _, _, step in metrics if name == "loss")

    there = lambda run, name: [SimpleNamespace(step=step) for step in sent]  # noqa: E731
    pretend_mlflow(monkeypatch, log_batch=log_batch, get_metric_history=there)
    (tmp_path / "metrics.jsonl").touch()
    said: list[str] = []
    sinks = Sinks({"mlflow": MLflow("mine")}, lambda each: said.append(each["what"])).open(tmp_path, "", 0)
    with MetricsWriter(tmp_path / "metrics.jsonl", resume_step=None) as writer, sinks:
        began = time.monotonic()
        for step in range(1, 31):
            if step == 10:
                down.set()
            sinks.record(step, {"loss": 1.0})
            writer.write(step, {"loss": 1.0})
        assert time.monotonic() - began < 2.0
    assert said[0].startswith("observe.mlflow: OSError: nobody answers") and len(said) <= 2 and len(sent) < 30
    down.clear()
    Sinks({"mlflow": MLflow("mine")}, print).open(tmp_path, "", 30).close()
    assert sorted(sent) == [*range(1, 31)]


def test_files_that_mlflow_cannot_keep_cost_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a session begins with lines that it lacks, while config.yaml fails."""
    sent, failed = list[int](), threading.Event()

    def log_text(*_: Any) -> None:
        failed.set()
        raise OSError("no bucket")

    def log_batch(run: str, metrics: Any = (), params: Any = ()) -> None:
        sent.extend(step for name, _, _, step in metrics if name == "loss")

    def read(path: Path) -> list[dict[str, Any]]:
        assert failed.wait(5)
        time.sleep(0.1)  # until it is known to the sink
        return [{"step": step, "loss": 1.0} for step in (1, 2)]

    pretend_mlflow(monkeypatch, log_text=log_text, log_batch=log_batch)
    monkeypatch.setattr("jaxdist.observe.sinks.mlflow.read_metrics", read)
    said: list[str] = []
    with Sinks({"mlflow": MLflow("mine")}, lambda each: said.append(each["what"])).open(tmp_path, "a: 1\n", 2) as sinks:
        sinks.record(3, {"loss": 1.0})
    assert sent == [1, 2, 3] and said == ["observe.mlflow: OSError: no bucket; at step 3; the run goes on"]
