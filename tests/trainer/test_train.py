"""Whole training runs, small: what a run directory holds, stopping, resuming in another layout, what is refused."""

import json
import os
import runpy
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxdist import registry
from jaxdist.checkpoint import Checkpoints
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config, ModelConfig
from jaxdist.config.sections.optimizer import OptimizerConfig
from jaxdist.data import Loader
from jaxdist.errors import UserError
from jaxdist.init import init_state
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.observe import read_metrics
from jaxdist.optim.make import make_optimizer
from jaxdist.runtime.watch.stop import StopSignal
from jaxdist.specs import BATCH_SPEC, path_name
from jaxdist.step import make_train_step
from jaxdist.train_step import TrainStep
from jaxdist.trainer.recorder import Recorder
from jaxdist.trainer.resume import check_identity, identity
from jaxdist.trainer.train import train

pytestmark = pytest.mark.xdist_group("runs")  # runs and commands are shared by the tests of this file

ROOT = Path(__file__).parents[2]
ONE = ("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "parallel.strategy=ddp")
BARE = ("train.eval_every=0", "train.sample_tokens=0", "observe.report=false")  # nothing to compile but the step
YAML = """
model: {{layers: 2, width: 16, heads: 2}}
data: {{path: {path}, seq_len: 16, global_batch: 8}}
mesh: {{data: 2, fsdp: 2, tensor: 2}}
parallel: {{strategy: zero3, min_shard_bytes: 0}}
optimizer: {{lr: 1e-2}}
train: {{steps: 6, eval_every: 3, eval_batches: 2, sample_tokens: 8, sample_prompt: def}}
checkpoint: {{every: 3}}
devices: {{platform: cpu}}
observe: {{console: plain}}
"""

Configure = Callable[..., Config]


def text(seed: int) -> str:
    words = ["def", "return", "import", "x", "y", "0", "1", "+", ":"]
    return " ".join(np.random.default_rng(seed).choice(words, 2000))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with its text beside it."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "data").mkdir()
    for i in range(3):
        (folder / "data" / f"{i}.py").write_text(text(i))
    path = folder / "tiny.yaml"
    path.write_text(YAML.format(path=folder / "data"))
    return path


@pytest.fixture(scope="module")
def configure(file: Path) -> Configure:
    return lambda *overrides: load_config(file, overrides)


@pytest.fixture(scope="module")
def finished(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of six steps of zero3 on data=2, fsdp=2, tensor=2, with everything a run makes."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert train(configure(), folder) == 0
    return folder


def losses(folder: Path) -> list[float]:
    """The losses, after checking that each step has its line, once and in order."""
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def steps_saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_run_directory(finished: Path, configure: Configure) -> None:
    assert {path.name for path in finished.iterdir()} == {
        "config.yaml",
        "env.json",
        "metrics.jsonl",
        "samples.txt",
        "report.html",
        "checkpoints",
    }
    assert load_config(finished / "config.yaml") == configure()
    environment = json.loads((finished / "env.json").read_text())
    assert environment["devices"] == {"cpu": 8} and environment["compiler"]["optimization_level"] == "UNKNOWN"
    assert (finished / "samples.txt").read_text().startswith("def")
    assert "<html" in (finished / "report.html").read_text()
    assert steps_saved(finished) == ["3", "6"]


def test_metrics_of_a_run(finished: Path) -> None:
    values = losses(finished)
    assert len(values) == 6
    assert values[0] == pytest.approx(np.log(256), rel=0.05)
    assert values[-1] < values[0] - 0.3
    assert all(float(np.float32(value)) == value for value in values), "a float32 at full precision"
    records = read_metrics(finished / "metrics.jsonl")
    assert [record["step"] for record in records if "eval/loss" in record] == [3, 6]
    assert all({"grad_norm", "tokens_per_s", "lr"} <= record.keys() for record in records)
    assert records[2]["eval/loss"] > records[5]["eval/loss"]
    assert records[5]["eval/bits_per_byte"] == pytest.approx(records[5]["eval/loss"] / np.log(2))


@pytest.mark.slow
def test_finished_run_is_left_as_it_is(finished: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(TrainStep, "__call__", lambda *_: pytest.fail("a finished run was trained further"))
    assert train(configure("train.sample_tokens=0"), finished) == 0
    assert (finished / "metrics.jsonl").read_bytes() == before
    assert steps_saved(finished) == ["3", "6"]


@pytest.mark.slow
def test_resume_in_another_layout(
    finished: Path, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped on one device under ddp, resumed on eight under zero3."""
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "requested", lambda self, step: step == 3)
        assert train(configure(*ONE, *BARE, "checkpoint.every=0"), tmp_path) == 75
    assert steps_saved(tmp_path) == ["3"]
    assert len(losses(tmp_path)) == 3
    assert train(configure(*BARE), tmp_path) == 0
    np.testing.assert_allclose(losses(tmp_path), losses(finished), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", pytest.param("rich", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lost", [pytest.param("no room", marks=pytest.mark.slow), "no reader"])
def test_no_console_ends_a_run(
    lost: str, mode: str, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk loses lines. Without a reader, as in `train.py | head`, the run stops as by SIGTERM."""
    reads, writes = os.pipe()
    with Path("/dev/full").open("w") if lost == "no room" else os.fdopen(writes, "w") as stream:

        def look(self: StopSignal, step: int) -> bool:
            if step == 2:
                os.close(reads)
            while step == 4 and lost == "no reader" and not self.why:  # another thread hears of it
                time.sleep(0.01)
            return asked(self, step)

        asked = StopSignal.requested
        monkeypatch.setattr(StopSignal, "requested", look)
        monkeypatch.setattr(sys, "stdout", stream)
        options = (*ONE, *BARE, "checkpoint.every=0", "observe.log_every=1", f"observe.console={mode}")
        assert train(configure(*options), tmp_path) == (0 if lost == "no room" else 75)
    if lost == "no room":
        os.close(writes)
    (step,) = steps_saved(tmp_path)
    assert step == "6" if lost == "no room" else step in ("3", "4")  # it hears of a reader that went after step 2


def test_resume_after_a_crash_gives_the_same_bits(
    finished: Path, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was recorded after the last checkpoint is trained again, and recorded once."""

    def crash(self: StopSignal, step: int) -> bool:
        if step == 5:
            raise RuntimeError("planted")
        return False

    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "requested", crash)
        with pytest.raises(RuntimeError, match="planted"):
            train(configure(*BARE), tmp_path)
    assert len(losses(tmp_path)) == 4
    assert steps_saved(tmp_path) == ["3"]
    assert train(configure(*BARE), tmp_path) == 0
    assert losses(tmp_path) == losses(finished)


@pytest.mark.exhaustive  # slow runs have two processes do so, in tests/system/test_multiprocess.py
def test_uneven_stages_run_and_resume(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With evaluation and sampling; to the bit in the same stages, and with other stages, or one, all the same."""
    layout = (
        "mesh.pipe=2",
        "mesh.tensor=1",
        "parallel.schedule=one_f_one_b",
        "parallel.microbatches=2",
        "model.layers=3",
    )
    uneven = configure(*layout, "parallel.stages=[1,2]")
    assert train(uneven, tmp_path / "whole") == 0
    assert (tmp_path / "whole" / "samples.txt").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "requested", lambda self, step: step == 3)
        assert train(uneven, tmp_path / "stopped") == 75
    for name, other in (
        ("same", uneven),
        ("other", configure(*layout, "parallel.stages=[2,1]")),
        ("one", configure(*ONE, *BARE, "model.layers=3")),
    ):
        shutil.copytree(tmp_path / "stopped", tmp_path / name)
        assert train(other, tmp_path / name) == 0
        np.testing.assert_allclose(losses(tmp_path / name), losses(tmp_path / "whole"), rtol=1e-5)
    assert losses(tmp_path / "same") == losses(tmp_path / "whole")


def test_how_blocks_are_cut_is_no_part_of_a_run(configure: Configure, tmp_path: Path) -> None:
    """Older versions wrote it down; it is what says in which order their checkpoints hold blocks."""
    layers, pipe = "model.layers=4", ("mesh.pipe=2", "mesh.tensor=1", "parallel.schedule=gpipe")
    source = registry.load("jaxdist.data.sources", "text", key="data.source")(configure().data)
    plain, uneven = (
        identity(configure(layers, *overrides), source) for overrides in ((), (*pipe, "parallel.stages=[1,3]"))
    )
    assert plain == uneven
    check_identity(plain | {"parallel": {"chunks": 2, "stages": []}, "mesh": {"pipe": 2}}, plain, tmp_path)


def test_a_run_from_before_token_types_were_in_the_identity(tmp_path: Path) -> None:
    """Its ids may not be read as another type: their bytes, and so the hash, are the same."""
    now = {"data": {"source": "tokens", "dtype": "uint16"}}
    with pytest.raises(UserError, match="^data.dtype: 'uint16', but .* started with 'uint32'"):
        check_identity({"data": {"source": "tokens", "token_dtype": "uint32"}}, now, tmp_path)
    check_identity({"data": {"source": "tokens", "token_dtype": "uint16"}}, now, tmp_path)
    check_identity({"data": {"source": "text", "token_dtype": "uint16"}}, {"data": {"dtype": "uint8"}}, tmp_path)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.width=32", "model.width"),
        ("train.seed=1", "train.seed"),
        ("data.seq_len=8", "data.seq_len"),
        ("data.path=OTHER", "data.path"),
        ("optimizer.name=sgd", "optimizer.name"),
        ("precision=bf16", "precision.policy"),
    ],
)
def test_resume_refuses_another_experiment(
    finished: Path, configure: Configure, tmp_path: Path, override: str, key: str
) -> None:
    (tmp_path / "other.py").write_text(text(7))
    before = {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()}
    with pytest.raises(UserError, match=f"^{key}: ") as error:
        train(configure(*override.replace("OTHER", str(tmp_path)).split()), finished)
    assert "\n" not in str(error.value)
    assert {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()} == before


def test_resume_never_and_must(finished: Path, configure: Configure, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^checkpoint\.resume: 'never'.*step 6"):
        train(configure("checkpoint.resume=never"), finished)
    with pytest.raises(UserError, match=r"^checkpoint\.resume: 'must'"):
        train(configure("checkpoint.resume=must"), tmp_path)


def test_script_reports_what_the_user_can_mend(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train.py", "--config", str(file), "checkpoint.resume=must", "--run-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as status:
        runpy.run_path(str(ROOT / "scripts" / "train.py"), run_name="__main__")
    assert status.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: checkpoint.resume: 'must'")


class Watched:
    """Stands for an array of one step: says when somebody waits for its value."""

    def __init__(self, step: int, events: list[tuple[str, int]]) -> None:
        self._step, self._events = step, events

    def copy_to_host_async(self) -> None:
        """Allowed at any time."""

    def _read(self) -> None:
        if self._events[-1] != ("read", self._step):
            self._events.append(("read", self._step))

    def block_until_ready(self) -> "Watched":
        self._read()
        return self

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self._read()
        return np.array(1.0, np.float32)

    def __float__(self) -> float:
        self._read()
        return 1.0


def events_of_a_run(config: Config, folder: Path, patch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """("dispatch", step) and ("read", step) in the order in which the loop does them."""
    events: list[tuple[str, int]] = []

    def step(self: TrainStep, state: Any, batch: Any) -> tuple[Any, Any]:
        number = sum(kind == "dispatch" for kind, _ in events) + 1
        events.append(("dispatch", number))
        watched = Watched(number, events)
        return jax.tree.map(lambda _: watched, state), dict.fromkeys(("loss", "weight", "grad_norm"), watched)

    patch.setattr(TrainStep, "__call__", step)
    patch.setattr(Checkpoints, "save", lambda *_, **__: None)
    assert train(config, folder) == 0
    return events


def test_loop_reads_a_step_after_dispatching_the_next(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(*ONE, *BARE, "checkpoint.every=0")
    wanted = [("dispatch", 1)]
    for step in range(2, 7):
        wanted += [("dispatch", step), ("read", step - 1)]
    with monkeypatch.context() as patch:
        assert events_of_a_run(config, tmp_path / "a", patch) == [*wanted, ("read", 6)]
    early = Recorder.dispatched

    def read_at_once(self: Recorder, step: int, metrics: dict[str, Any]) -> None:
        float(metrics["loss"])
        early(self, step, metrics)

    with monkeypatch.context() as patch:  # the check itself sees an early read
        patch.setattr(Recorder, "dispatched", read_at_once)
        assert events_of_a_run(config, tmp_path / "b", patch)[:2] == [("dispatch", 1), ("read", 1)]


def test_implicit_transfer_in_the_loop_is_an_error(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the device; on a CPU, JAX does not guard the way back, which the test above watches."""
    monkeypatch.setattr(Recorder, "dispatched", lambda *_: jnp.sin(np.ones(3, np.float32)))
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        events_of_a_run(configure(*ONE, *BARE), tmp_path, monkeypatch)


def plant(monkeypatch: pytest.MonkeyPatch, key: str, at: int) -> None:
    """The metric `key` of step `at` is not a number."""
    real, calls = TrainStep.__call__, []

    def step(self: TrainStep, state: Any, batch: Any) -> tuple[Any, Any]:
        calls.append(1)
        state, metrics = real(self, state, batch)
        return state, metrics | ({key: jnp.log(-metrics[key])} if len(calls) == at else {})

    monkeypatch.setattr(TrainStep, "__call__", step)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["loss", "grad_norm"])
def test_non_finite_step_fails_and_is_not_saved(
    key: str, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        plant(patch, key, at=4)
        assert train(configure(*ONE, *BARE, "checkpoint.every=2"), tmp_path) == 1
    captured = capsys.readouterr()
    failed = [line for line in (captured.out + captured.err).splitlines() if "failed" in line]
    assert len(failed) == 1
    assert "step 4" in failed[0]
    assert "Traceback" not in captured.out + captured.err
    assert steps_saved(tmp_path) == ["2"]
    assert not np.isfinite(read_metrics(tmp_path / "metrics.jsonl")[-1][key])
    if key == "loss":
        assert train(configure(*ONE, *BARE, "checkpoint.every=2"), tmp_path) == 0  # the earlier checkpoint is whole
        assert len(losses(tmp_path)) == 6


@pytest.mark.slow
def test_bf16(finished: Path, configure: Configure, tmp_path: Path) -> None:
    assert train(configure(*BARE, "precision=bf16"), tmp_path) == 0
    assert losses(tmp_path) != losses(finished)
    np.testing.assert_allclose(losses(tmp_path), losses(finished), rtol=1e-2)


@pytest.mark.slow
def test_dropout_is_the_same_in_every_layout(finished: Path, configure: Configure, tmp_path: Path) -> None:
    options = (*BARE, "model.dropout=0.2", "train.steps=4")
    assert train(configure(*options), tmp_path / "eight") == 0
    assert train(configure(*options, *ONE), tmp_path / "one") == 0
    np.testing.assert_allclose(losses(tmp_path / "eight"), losses(tmp_path / "one"), rtol=1e-5)
    assert abs(losses(tmp_path / "one")[0] - losses(finished)[0]) > 1e-4  # it does something


@pytest.mark.slow
def test_tokens(configure: Configure, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).zipf(1.3, 4000) % 300
    (tmp_path / "ids").mkdir()
    for name, part in (("train", ids[:3000]), ("val", ids[3000:])):
        part.astype("<u2").tofile(tmp_path / "ids" / f"{name}.bin")
    source = ("data.source=tokens", f"data.path={tmp_path / 'ids'}")
    with pytest.raises(UserError, match=r"^model\.vocab: 256 is too small"):
        train(configure(*ONE, *source), tmp_path / "run")
    assert train(configure(*ONE, *source, "model.vocab=300"), tmp_path / "run") == 0
    assert len(losses(tmp_path / "run")) == 6
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert "eval/loss" in last
    assert "eval/bits_per_byte" not in last
    assert not (tmp_path / "run" / "samples.txt").exists()  # ids are not text


def five_steps(config: OptimizerConfig, strategy: str, **mesh_sizes: Any) -> tuple[list[float], Any]:
    """Losses of five steps of a small Llama in float64, and the last state."""
    small = ModelConfig(style="llama", layers=2, width=16, heads=4, kv_heads=2, mlp_width=32, vocab=64)
    model = gpt(small.resolved(), max_length=8, param_dtype=jnp.float64)
    mesh = make_mesh(**mesh_sizes)
    optimizer = make_optimizer(config, steps=5)
    state = init_state(model, optimizer, mesh, strategy=strategy, seed=3)
    step = make_train_step(model, optimizer, mesh, strategy=strategy, precision="fp64")
    ids = np.arange(2000) % 7 * 9  # something to learn
    loader = Loader(ids, seq_len=8, global_batch=8, sharding=NamedSharding(mesh, BATCH_SPEC))
    values = []
    for i in range(5):
        state, metrics = step(state, loader.batch(i))
        values.append(float(metrics["loss"]))
    return values, state


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("adafactor", "muon") else pytest.mark.exhaustive)
        for name in ("adafactor", "muon", "adamw", "sgd", "lion")
    ],
)
def test_optimizer_in_a_sharded_layout(name: str) -> None:
    config = OptimizerConfig(name=name, lr=1e-2, warmup_steps=2)
    with jax.enable_x64(True):
        whole, _ = five_steps(config, "ddp")
        split, state = five_steps(config, "zero3", data=2, fsdp=2, tensor=2)
    np.testing.assert_allclose(split, whole, rtol=1e-10)
    assert split[-1] < split[0]
    parameters = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)}
    mirrored = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        owner = next((n for n in parameters if f".{path_name(path)}".endswith(f".{n}")), None)
        if owner is not None and leaf.shape == parameters[owner].shape:
            mirrored.add(owner)
            assert leaf.sharding.is_equivalent_to(parameters[owner].sharding, leaf.ndim), path_name(path)
    assert mirrored == set(parameters)
    for held in (state.params, state.opt_state):
        kernels = [leaf for leaf in jax.tree.leaves(held) if leaf.size >= 256]
        assert len(kernels) >= 6
        assert all(4 * leaf.addressable_shards[0].data.nbytes == leaf.nbytes for leaf in kernels)  # fsdp * tensor
