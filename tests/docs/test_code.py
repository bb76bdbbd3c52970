"""The parts of programs on the pages run, within the smallest program that they need."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from child import QUICK, environment
from pages import PAGES, blocks
from syntax import ROOT

import jaxdist
from jaxdist.config.load import load_config
from jaxdist.errors import UserError
from jaxdist.observe import read_metrics
from jaxdist.trainer.train import train

NET = """
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdist
from jaxdist.config.entries import ModelFacts


def load(i):
    return np.full(8, i / 1000, np.float32)


class Net(nnx.Module):
    def __init__(self, width, rngs, dtype):
        self.up = nnx.Linear(8, width, rngs=rngs, param_dtype=dtype)
        self.down = nnx.Linear(width, 10, rngs=rngs, param_dtype=dtype)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def classify(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"])
    return losses.sum(), jnp.float32(losses.size)
"""
CONFIG = """
model: {name: my_package.models.tower, width: 16}
data: {source: iterable, path: my_package.models.Numbers, global_batch: 20, buffer: 100}
mesh: {data: 1, fsdp: 4}
train: {steps: 4, eval_every: 0, sample_tokens: 0}
devices: {platform: cpu}
"""
SCHEDULE = """
from jaxdist.config.entries import ScheduleFacts
from jaxdist.parallel.schedules.accumulate import accumulate as mine
"""


def on_these_devices(text: str) -> str:
    """A block without the line that asks for devices, which JAX takes only at its start."""
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith('jax.config.update("jax_num_cpu_devices"')]
    assert len(kept) == len(lines) - 1
    return "".join(kept)


def block(page: str, start: str) -> str:
    """The block of a page that has these words."""
    [text] = [each for each in blocks(page) if start in each]
    return text


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder my_package, in the folder that the test stands in."""
    folder = tmp_path / "my_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("my_package", "my_package.models", "my_package.schedules", "my_package.others"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def test_a_model_and_samples_of_ones_own_from_a_configuration(package: Path) -> None:
    model, samples = block("docs/own_loss.md", "def tower("), block("docs/data.md", "class Numbers:")
    (package / "models.py").write_text("\n\n".join([NET, model, samples]))
    Path("own.yaml").write_text(CONFIG)
    assert train(load_config("own.yaml"), Path("run")) == 0
    losses = [each["loss"] for each in read_metrics(Path("run") / "metrics.jsonl")]
    assert len(losses) == 4 and losses[0] == pytest.approx(np.log(10), rel=0.2)
    with pytest.raises(UserError, match="pipe"):  # by the fact: a loss has no stages
        load_config("own.yaml", ["mesh={data: 1, fsdp: 1, pipe: 2}"])


def test_a_key_of_its_own(package: Path) -> None:
    (package / "models.py").write_text(block("docs/extending.md", "class Options:"))
    Path("own.yaml").write_text(block("docs/extending.md", "depth: 3"))
    assert load_config("own.yaml").model.depth == 3
    with pytest.raises(UserError, match=r"^model\.depth: 0 is out of range; allowed: .*1"):
        load_config("own.yaml", ["model.depth=0"])


def test_facts_of_a_schedule(package: Path) -> None:
    """A schedule of one stage is refused a pipeline when the configuration is read."""
    (package / "schedules.py").write_text(SCHEDULE)  # without facts
    (package / "others.py").write_text(SCHEDULE + block("docs/extending.md", "FACTS = ScheduleFacts"))
    Path("own.yaml").write_text("model: {layers: 4}\ndevices: {platform: cpu, simulated: 8}\n")
    mesh = "mesh={data: 1, tensor: 1, pipe: 2}"
    load_config("own.yaml", [mesh, "parallel.schedule=my_package.schedules.mine"])
    with pytest.raises(UserError, match="pipe"):
        load_config("own.yaml", [mesh, "parallel.schedule=my_package.others.mine"])


def test_a_teacher_in_a_loss_of_ones_own() -> None:
    key, mesh = jax.random.key(0), jaxdist.make_mesh(fsdp=4)
    weights = {name: jax.random.normal(jax.random.fold_in(key, i), (8, 5)) for i, name in enumerate("st")}
    params = {"student": {"w": weights["s"]}, "teacher": {"w": weights["t"]}}
    apply = lambda params, inputs: inputs @ params["w"]  # noqa: E731
    given: dict[str, Any] = {"jax": jax, "jnp": jnp, "jaxdist": jaxdist, "apply_student": apply, "apply_teacher": apply}
    given |= {"mesh": mesh, "optimizer": optax.sgd(0.5)}
    exec(block("docs/distillation.md", "apply_teacher("), given)
    freeze = ("teacher.*",)
    state = jaxdist.init_state(params, given["optimizer"], mesh, strategy="zero3", freeze=freeze)
    batch = {"inputs": jax.random.normal(key, (16, 8)), "targets": jnp.arange(16) % 5}
    losses = []
    for _ in range(20):
        state, metrics = given["step"](state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_array_equal(state.params["teacher"]["w"], weights["t"])


def test_generation_from_python(capsys: pytest.CaptureFixture[str]) -> None:
    exec(on_these_devices(block("docs/generation.md", "jaxdist.generate(")), {})
    assert capsys.readouterr().out == "['max_tokens', 'max_tokens']\n"


def test_a_long_context_from_python() -> None:
    given: dict[str, Any] = {}
    exec(on_these_devices(block("docs/long_context.md", 'context="all_to_all")')), given)
    tokens = np.arange(4 * 65).reshape(4, 65) % 50
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((4, 64), np.float32)}
    state, metrics = given["step"](given["state"], batch)
    assert int(state.step) == 1 and 0 < float(metrics["loss"]) < 10


def test_imports_in_sentences_work() -> None:
    found = [
        line for page in PAGES for line in re.findall(r"`((?:from|import) jaxdist[^`]*)`", (ROOT / page).read_text())
    ]
    assert len(found) > 2
    for line in found:
        exec(line, {})


@pytest.mark.slow
def test_the_example_of_a_hung_rank() -> None:
    done = subprocess.run(
        [sys.executable, "docs/examples/hung_rank.py"],
        cwd=ROOT,
        env=environment() | QUICK,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert re.search(r"stuck: rank 1 in data of step \d+ for 5\.\d s; rank 0 in wait of step", done.stderr), done.stderr
    assert re.search(r'of the stacks of rank 1: .*hung_rank\.py", line \d+ in __iter__', done.stdout), done.stdout


@pytest.mark.slow
def test_the_classifier_of_lines_prints_what_the_page_shows(tmp_path: Path) -> None:
    """With its numbers, as far as two steps of training can tell: those of the majority and of the bag of words."""
    config = ["--config", "configs/bert_stdlib.yaml", "train.steps=2", "train.eval_every=0", "checkpoint.every=2"]
    for program in (
        ["scripts/train.py", *config, "observe.report=false", "--run-dir", str(tmp_path / "bert")],
        ["docs/examples/bert_lines.py", "--pretrained", str(tmp_path / "bert"), "--steps", "2"],
    ):
        command = [sys.executable, *program]
        done = subprocess.run(
            command, cwd=ROOT, env=environment() | QUICK, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-5:]
    shown = block("docs/bert.md", "bag of words").splitlines()[-5:]
    assert said[0] == shown[0].replace("200 steps", "2 steps")
    assert [line[:-5] for line in said[1:]] == [line[:-5] for line in shown[1:]]
    for line, wanted in zip(said[1:3], shown[1:3], strict=True):  # of other lines in another Python's library
        assert float(line[-5:]) == pytest.approx(
            float(wanted[-5:]), abs=0.0 if sys.version_info[:2] == (3, 11) else 0.05
        )


def test_a_pipeline_of_ones_own_blocks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    pipeline = block("docs/own_model.md", "model = jaxdist.model_def(GPT, tied=True)\ntrain(")
    exec("import jaxdist\nfrom own_blocks import GPT, train\n" + pipeline, {})
    assert capsys.readouterr().out.count("\n") == 1
