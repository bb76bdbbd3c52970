"""Resuming: what was changed is shown, what must not change is refused or forced; layouts do not matter."""

import json
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import on_page

from jaxdist.checkpoint import Checkpoints
from jaxdist.checkpoint.reader import Stored
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config
from jaxdist.data import load_source
from jaxdist.errors import UserError
from jaxdist.observe import read_metrics
from jaxdist.runtime.watch.stop import StopSignal, TimeLimit
from jaxdist.runtime.watch.watchdog import Watch
from jaxdist.trainer.evaluation import Evaluator, text_sampler
from jaxdist.trainer.resume import changed_settings, check_identity, identity, record
from jaxdist.trainer.run import build
from jaxdist.trainer.train import train

pytestmark = pytest.mark.xdist_group("resume")  # the finished run is shared

YAML = """
model: {{layers: 2, width: 16, heads: 2}}
data: {{path: {path}, seq_len: 16, global_batch: 8}}
train: {{steps: 4, eval_every: 0, sample_tokens: 0}}
checkpoint: {{every: 2}}
devices: {{platform: cpu}}
observe: {{console: plain, report: false}}
"""
Configure = Callable[..., Config]


@pytest.fixture(scope="module")
def configure(tmp_path_factory: pytest.TempPathFactory) -> Configure:
    folder = tmp_path_factory.mktemp("text")
    words = np.random.default_rng(0).choice(["def", "return", "x", "y", "0", "1", "+", ":"], 4000)
    (folder / "text.py").write_text(" ".join(words))
    (folder / "run.yaml").write_text(YAML.format(path=folder / "text.py"))
    return lambda *overrides: load_config(folder / "run.yaml", overrides)


@pytest.fixture(scope="module")
def finished(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps. Tests that go on with it must be refused; the others copy."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert train(configure(), folder) == 0
    return folder


def copy(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def meta_of(folder: Path, step: int) -> dict[str, Any]:
    with Checkpoints(folder / "checkpoints", keep=3) as checkpoints:
        return checkpoints.meta(step)


def incidents(folder: Path) -> list[dict[str, Any]]:
    path = folder / "incidents.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_what_was_changed_is_shown(
    finished: Path, configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each key with both values, whatever it is; nothing is said of the others, and no incident is noted."""
    folder = copy(finished, tmp_path)
    assert train(configure("optimizer.lr=1e-2", "mesh.data=2", "train.steps=5", "checkpoint.resume=must"), folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "mesh       data=2 (2 simulated CPU devices, 1 process, 6 more idle)" in lines
    at = next(i for i, line in enumerate(lines) if line.startswith("resumed"))
    assert lines[at].split(maxsplit=1)[1] == "after step 4, with"
    assert sorted(line.strip() for line in lines[at + 1 : at + 4]) == [
        "mesh.data 2 (was 1)",
        "optimizer.lr 0.01 (was 0.003)",
        "train.steps 5 (was 4)",
    ]
    assert not lines[at + 4].startswith(" ")
    assert incidents(folder) == [] and "forced" not in meta_of(folder, 5)
    assert meta_of(folder, 5)["config"]["optimizer.lr"] == 0.01


def test_no_secret_is_written_down(
    finished: Path,
    configure: Configure,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither in the header, nor in config.yaml, env.json or the report."""
    folder, secret = copy(finished, tmp_path), "hunter2swordfish"
    prompts = (f"https://a.example/c?sv=1&sig={secret}", f"hf_{secret}", f"Authorization=Bearer {secret}")
    changed = [f"train.sample_prompt={json.dumps(' '.join(prompts))}", "train.steps=5", "observe.report=true"]
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "a.yaml", *prompts, *changed])
    assert train(configure(*changed), folder) == 0
    said = capsys.readouterr().out
    assert 'train.sample_prompt "https://a.example/c?sv=[redacted]' in said and secret not in said
    for name in ("config.yaml", "env.json", "report.html"):
        assert secret not in (folder / name).read_text() and "[redacted]" in (folder / name).read_text()


def test_nothing_changed_nothing_said(finished: Path, configure: Configure, tmp_path: Path) -> None:
    meta = meta_of(finished, 4)
    assert changed_settings(meta, configure("checkpoint.resume=force")) == {}
    old = {"schedule": {"optimizer.lr": 0.003, "train.steps": 9}}  # as an older version saved it
    assert changed_settings(old, configure()) == {"train.steps": [9, 4]}


def test_a_default_is_compared_by_its_value(finished: Path, configure: Configure) -> None:
    """A key left open, as in the run, and set to what it stands for are the same model, whichever of them was saved."""
    meta, given = meta_of(finished, 4), ("model.positions=learned", "model.norm=layernorm", "model.tied=true")
    assert meta["config"]["model.norm"] is None and meta["model"]["norm"] == "layernorm"
    for config in (configure(), configure(*given)):
        assert identity(config, load_source(config.data))["model"] == meta["model"]
    assert changed_settings(meta, configure(given[1])) == {"model.norm": [None, "layernorm"]}


DANGEROUS = [
    ("train.seed=1", "train.seed: 1,", "started with 0"),
    ("data.global_batch=16", "data.global_batch: 16,", "started with 8"),
    ("data.path=OTHER", "data.path: other data", "started with ("),
    ("model.dropout=0.1", "model.dropout: 0.1,", "started with 0.0"),
    ("precision=bf16", "precision.policy: 'bf16',", "started with 'fp32'"),
]


@pytest.mark.parametrize(("override", "named", "was"), DANGEROUS)
def test_another_experiment_is_refused_unless_forced(
    finished: Path, configure: Configure, tmp_path: Path, override: str, named: str, was: str
) -> None:
    (tmp_path / "other.py").write_text("import y\n" * 500)
    overrides = (override.replace("OTHER", str(tmp_path / "other.py")), "train.steps=6")
    with pytest.raises(UserError) as error:
        train(configure(*overrides), finished)
    assert str(error.value).startswith(named) and was in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).endswith("or checkpoint.resume=force to go on all the same")


def test_the_key_by_which_the_data_are_others_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "number {i}"}}\n' for i in range(99)))
    (tmp_path / "b.jsonl").write_text('{"text": "other"}\n')
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "run.yaml").write_text(YAML.format(path=f"{tmp_path / 'a.jsonl'}, source: jsonl"))
    saved: dict[str, Any] = {}
    for key, file in (("", ""), ("data.chat_template", "chat.jinja"), ("data.val_path", "b.jsonl")):
        config = load_config(tmp_path / "run.yaml", [f"{key}={tmp_path / file}"] if key else [])
        source = load_source(config.data)
        saved = saved or record(config, source)
        given = {"changed": changed_settings(saved, config)}
        if key:
            with pytest.raises(
                UserError, match=rf"^{key}: other data .*\), perhaps by {key} null -> .*{file}\", or what lies"
            ):
                check_identity(saved, identity(config, source), tmp_path, **given)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    (tmp_path / "link").symlink_to(tmp_path)
    config = load_config(tmp_path / "run.yaml", [f"data.path={tmp_path / 'link' / 'a.jsonl'}"])  # another spelling
    given = {"changed": changed_settings(saved, config)}
    assert [*given["changed"]] == ["data.path"]
    with pytest.raises(UserError, match=r"^data.path: other data .*\); set it back"):
        check_identity(saved, identity(config, load_source(config.data)), tmp_path, **given)


def test_all_that_differs_is_named(finished: Path, configure: Configure) -> None:
    with pytest.raises(UserError, match=r"^model.dropout: 0.1, .* \(besides, train.seed 0 -> 1\); set it back"):
        train(configure("train.seed=1", "model.dropout=0.1"), finished)


@pytest.mark.slow
def test_forced(finished: Path, configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says so, notes it, and every later checkpoint remembers; without another change, force has nothing to do."""
    folder, force = copy(finished, tmp_path), "checkpoint.resume=force"
    changed = {"model.dropout": [0.0, 0.1], "train.seed": [0, 1]}
    assert train(configure("train.seed=1", "model.dropout=0.1", "train.steps=6", force), folder) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert line == (
        "warning: checkpoint.resume=force: goes on after step 4 as another run: model.dropout 0.0 -> 0.1, "
        "train.seed 0 -> 1"
    )
    [noted] = incidents(folder)
    assert (noted["step"], noted["action"], noted["changed"]) == (4, "forced", changed)
    assert meta_of(folder, 6)["forced"] == [{"step": 4, "changed": changed}]
    assert train(configure("train.seed=1", "model.dropout=0.1", "train.steps=7", force), folder) == 0
    assert "warning" not in capsys.readouterr().out and len(incidents(folder)) == 1
    assert meta_of(folder, 7)["forced"] == [{"step": 4, "changed": changed}]
    with pytest.raises(UserError, match=r"^model.dropout: 0.0, but .* started with 0.1 \(besides, train.seed 1 -> 0\)"):
        train(configure("train.steps=8"), folder)
    assert len(read_metrics(folder / "metrics.jsonl")) == 7


def test_the_page_shows_what_is_said_of_another_seed() -> None:
    with pytest.raises(UserError) as error:
        check_identity({"train": {"seed": 0}}, {"train": {"seed": 1}}, Path("runs/a"))
    on_page("docs/checkpoints.md", f"error: {error.value}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.width=32",
            r"checkpoint of step 4: params\.\S+ is float32\[.*16.*\], this configuration makes it"
            r" float32\[.*32.*\]",
        ),
        ("model.tied=false", r"checkpoint of step 4: \S+ is only in this configuration"),
        ("optimizer.name=sgd", r"checkpoint of step 4: opt_state\.\S+ is only in"),
        ("precision=O3", r"checkpoint of step 4: \S+ is float32\[.*\], this configuration makes it float16\["),
    ],
)
def test_what_cannot_work_is_not_forced(finished: Path, configure: Configure, override: str, message: str) -> None:
    """Shapes, leaves that one side lacks, types: one line that names the leaf; nothing is cast."""
    with pytest.raises(UserError, match="^" + message) as error:
        more = ("optimizer.eps=1e-4",) if "O3" in override else ()
        train(configure(override, *more, "checkpoint.resume=force"), finished)
    assert "\n" not in str(error.value)
    assert incidents(finished) == []
    if override == "model.width=32":
        on_page("docs/checkpoints.md", f"error: {error.value}")


def test_the_time_limit_knows_steps_and_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    save = [10.0]
    limit = TimeLimit(100.0, 1000.0, lambda: save[0])
    seen = []
    for seconds in (60, 1, 4, 1):  # the first is compiled
        now[0] += seconds
        seen.append(limit.is_near())
    assert seen == [False] * 4
    now[0] = 1000 + 100 - 10 - 2 * 4 - 0.5
    assert limit.is_near()
    now[0], save[0] = 1066.0, 30.0
    assert limit.is_near()
    assert not TimeLimit(None, 0.0, lambda: 0.0).is_near()


@pytest.mark.slow
def test_max_hours(configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Saved, with status 75, long before the last step. How early is the business of the test above."""
    options = ("train.steps=100000", "checkpoint.every=0", "optimizer.schedule=constant")
    assert train(configure(*options, "train.max_hours=0.002"), tmp_path) == 75
    lines = capsys.readouterr().out.splitlines()
    steps = len(read_metrics(tmp_path / "metrics.jsonl"))
    assert steps and [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(steps)]
    assert "train.max_hours: 0.002 hours are nearly over" in lines
    assert any(line.startswith(f"stopped after step {steps};") for line in lines)
    with pytest.raises(UserError, match=r"^train.max_hours: 0(.0)? is out of range"):
        configure("train.max_hours=0")


LAYOUTS = {
    "whole": ("mesh.data=8",),
    "8 devices": ("mesh.data=2", "mesh.fsdp=4", "parallel.strategy=zero3", "parallel.min_shard_bytes=0"),
    "2 devices": ("mesh.pipe=2", "parallel.schedule=one_f_one_b", "parallel.microbatches=4"),
    "4 devices": ("mesh.data=4", "parallel.microbatches=2"),
}
LOG = ("observe.samples=true", "train.steps=6", "model.dropout=0.1")


def stop_at(patch: pytest.MonkeyPatch, last: int) -> None:
    patch.setattr(StopSignal, "requested", lambda self, step: step == last)


def state_words(folder: Path, step: int) -> dict[str, bytes]:
    """The bits of every leaf of a checkpoint, by name."""
    stored = Stored(folder / "checkpoints" / str(step))
    return {name: stored.param(name).tobytes() for name in stored.params()}


def through(configure: Configure, folder: Path, legs: list[tuple[int, tuple[str, ...]]], *options: str) -> None:
    """A run whose layout changes: legs are (last step, overrides)."""
    for last, overrides in legs:
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, last)
            assert train(configure(*options, *overrides), folder) == (75 if last < 6 else 0)


@pytest.mark.slow
def test_layouts_change_samples_do_not(configure: Configure, tmp_path: Path) -> None:
    """8 -> 2 -> 4 devices, zero3 -> pipeline -> ddp, other microbatches each time."""
    through(configure, tmp_path / "whole", [(6, LAYOUTS["whole"])], *LOG)
    legs = [(2, LAYOUTS["8 devices"]), (4, LAYOUTS["2 devices"]), (6, LAYOUTS["4 devices"])]
    through(configure, tmp_path / "run", legs, *LOG)
    log = (tmp_path / "run" / "samples.jsonl").read_bytes()
    assert log == (tmp_path / "whole" / "samples.jsonl").read_bytes()
    rows = [row for line in log.splitlines() for row in json.loads(line)["samples"]]
    assert len(rows) == 6 * 8 == len(set(rows))
    ours, whole = (
        [record["loss"] for record in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("run", "whole")
    )
    np.testing.assert_allclose(ours, whole, rtol=1e-5)
    assert ours != whole  # orders of summation differ: that they are close is not a matter of course


EVALUATED = {
    "one": (),
    "ddp": ("mesh.data=4", "parallel.microbatches=2"),
    "zero3 and tensor": (
        "mesh.data=2",
        "mesh.fsdp=2",
        "mesh.tensor=2",
        "parallel.strategy=zero3",
        "parallel.min_shard_bytes=0",
    ),
    "pipeline": ("mesh.pipe=2", "mesh.fsdp=2", "parallel.schedule=one_f_one_b", "parallel.microbatches=4"),
    "zero2": ("mesh.fsdp=8", "parallel.strategy=zero2", "parallel.min_shard_bytes=0"),
}


@pytest.mark.slow
def test_an_evaluation_is_the_same_in_every_layout(finished: Path, configure: Configure) -> None:
    """The same parameters, restored into each: in fp32 to 1e-6, over batches that the text does not fill."""
    found = {}
    for layout, overrides in EVALUATED.items():
        config = configure(*overrides, "train.eval_every=1", "train.eval_batches=100")
        with ExitStack() as stack:
            run = build(config, finished, stack, Watch(), text_sampler)
            assert run.progress.first_step == 4
            found[layout] = Evaluator(run.plan, run.watch)(run.progress.state)["eval/loss"]
    for layout, loss in found.items():
        assert loss == pytest.approx(found["one"], rel=1e-6), layout
    assert 1 < found["one"] < 6


@pytest.mark.parametrize("before", ["~nobody-of-this-name/data", "a" * 300, "nul\0", 7])
def test_data_of_another_host_or_user_are_another_place(before: Any, tmp_path: Path) -> None:
    saved, now = ({"data": {"sha256": digit * 64}} for digit in "12")
    with pytest.raises(UserError, match=r"^data.path: other data .*perhaps by data.path "):
        check_identity(saved, now, tmp_path, changed={"data.path": [before, str(tmp_path)]})
