"""A run whose `model.name` gives a loss with state: it resumes exactly, and is evaluated by its running statistics."""

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import child
import jax
import numpy as np
import pytest
from levels import others_slow

from jaxdist.checkpoint import Checkpoints
from jaxdist.config.load import load_config
from jaxdist.errors import UserError
from jaxdist.observe import read_metrics
from jaxdist.plan.explain import explain
from jaxdist.runtime.watch.watchdog import Watch
from jaxdist.specs import leaves_by_name
from jaxdist.trainer.batches.load import load_data
from jaxdist.trainer.evaluation import Evaluator, averaged, text_sampler
from jaxdist.trainer.run import build
from jaxdist.trainer.train import train

ROOT = Path(__file__).parents[2]
YAML = """
model: {{name: outsider.normed.normed}}
data: {{source: images, path: {path}, global_batch: 16, held_out: 0.2}}
mesh: {{data: 2, fsdp: 2}}
parallel: {{strategy: zero3, min_shard_bytes: 0, microbatches: 2}}
train: {{steps: 4, eval_every: 4}}
checkpoint: {{every: 2}}
devices: {{platform: cpu}}
observe: {{console: plain, report: false}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    image = rng.normal(size=(100, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", image=image, label=(image[:, 0] > 0).astype(np.int32))
    (tmp_path / "run.yaml").write_text(YAML.format(path=tmp_path / "data.npz"))
    return tmp_path / "run.yaml"


@pytest.mark.slow
def test_it_resumes_to_the_bit_and_is_evaluated_in_evaluation_mode(file: Path, tmp_path: Path) -> None:
    config, whole, resumed = load_config(file), tmp_path / "whole", tmp_path / "resumed"
    assert train(config, whole) == 0
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "4")
    assert train(config, resumed) == 0
    with ExitStack() as stack:
        run = build(config, whole, stack, Watch(), text_sampler)
        state, loss = run.progress.state, run.plan.parts.model
        found = Evaluator(run.plan, run.watch)(state)
        with Checkpoints(resumed / "checkpoints", keep=3) as checkpoints:
            again = checkpoints.restore(4, run.plan.parts.target)
        state, again = jax.device_get((state, again))
    jax.tree.map(np.testing.assert_array_equal, again, state)
    statistics = state.model_state["norm"]
    assert statistics.keys() == {"mean", "var"} and np.abs(statistics["mean"]).min() > 0
    logged = read_metrics(whole / "metrics.jsonl")
    assert len(logged) == 4 and all(0 <= record["accuracy"] <= 1 for record in logged)
    assert {key: logged[-1][key] for key in found} == found
    held = load_data(config).held_out
    batch = held.read(np.arange(held.size)) | {"weights": np.ones(held.size, np.float32)}
    total, weight, metrics, _ = jax.jit(loss.evaluation)(state.params, batch, None, state.model_state)
    assert found["eval/loss"] == pytest.approx(float(total / weight), rel=1e-5)
    assert found["eval/accuracy"] == pytest.approx(float(metrics["accuracy"][0] / weight), rel=1e-6)


@pytest.mark.parametrize("ema", others_slow([False, True], True))
def test_a_run_starts_from_its_parameters_and_statistics(ema: bool, file: Path, tmp_path: Path) -> None:
    assert train(load_config(file, ["train.ema=0.5"]), tmp_path / "first") == 0
    keys = [f"init.from={tmp_path / 'first'}", f"init.ema={str(ema).lower()}"]
    with ExitStack() as stack:
        run = build(load_config(file, ["train.ema=0.5"]), tmp_path / "first", stack, Watch(), text_sampler)
        before = averaged(run.progress.state) if ema else (run.progress.state.params, run.progress.state.model_state)
    with ExitStack() as stack:
        state = build(load_config(file, keys), tmp_path / "second", stack, Watch(), text_sampler).progress.state
    assert int(state.step) == 0 and jax.tree.leaves(state.model_state)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((before, (state.params, state.model_state))))


def test_a_file_has_no_running_statistics(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed here")
    with ExitStack() as stack:
        new = build(load_config(file), tmp_path / "new", stack, Watch(), text_sampler).progress.state
        doubled = jax.tree.map(lambda leaf: 2 * np.asarray(leaf), new.params)
        numpy.save_file(leaves_by_name(doubled), str(tmp_path / "some.safetensors"))
    config = load_config(file, [f"init.from={tmp_path / 'some.safetensors'}"])
    with ExitStack() as stack:
        state = build(config, tmp_path / "second", stack, Watch(), text_sampler).progress.state
    assert "has no running statistics (model_state); they are those of a new run\n" in capsys.readouterr().out
    jax.tree.map(
        np.testing.assert_array_equal, *jax.device_get(((doubled, new.model_state), (state.params, state.model_state)))
    )


def test_what_needs_logits_or_shapes_is_one_line(file: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"^data.source: 'images' gives samples whose shapes are known only.*; or a model whose .* sample",
    ):
        explain(load_config(file))
    config = load_config(file, ["data.source=text", "data.path=stdlib"])
    with (
        pytest.raises(UserError, match=r"^train.sample_tokens: 200, but model.name 'outsider.normed.normed' is a loss"),
        ExitStack() as stack,
    ):
        build(config, file.parent / "run", stack, Watch(), text_sampler)


@pytest.mark.slow
def test_a_resnet_is_explained() -> None:
    """With the gather of each sharded kernel, and the sums of batch statistics in either pass."""
    found = explain(load_config(ROOT / "configs" / "resnet_digits.yaml", planned=True))
    gathered = [each for each in found.ledger.collectives if each.op == "all_gather"]
    assert gathered and all(each.axes == ("fsdp",) for each in gathered)
    sums = [each for each in found.ledger.collectives if "batch_mean" in each.purpose]
    calls = sum(each.calls for each in sums)  # of mean and square of nine norms: sum and weight, and a gradient
    assert calls == (2 + 1) * 2 * 9


@pytest.mark.slow
def test_a_resnet_reads_digits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed here; no ResNet was trained on digits")
    command = [sys.executable, str(ROOT / "scripts/train.py"), "--config", str(ROOT / "configs/resnet_digits.yaml")]
    env = child.environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--run-dir", str(tmp_path / "run")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 300 and last["eval/accuracy"] >= 0.97
