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

from jaxdist.checkpoint import Checkpoints
from jaxdist.config.load import load_config
from jaxdist.errors import UserError
from jaxdist.observe import read_metrics
from jaxdist.plan.explain import explain
from jaxdist.runtime.watch.watchdog import Watch
from jaxdist.trainer.batches.load import load_data
from jaxdist.trainer.evaluation import Evaluator, text_sampler
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
