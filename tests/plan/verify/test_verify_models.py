"""`verify` of models and configurations: clean where the layout trains as one device, and a line where it does not."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import child
import jax
import numpy as np
import pytest
from flax import nnx
from levels import levels

import jaxdist
from jaxdist.cli.runs.verify import main
from jaxdist.config.load import load_config
from jaxdist.errors import UserError
from jaxdist.mesh import make_mesh
from jaxdist.plan.verify import configs
from jaxdist.plan.verify.layout import Training, differences

SMALL = ["model.layers=4", "model.width=16", "model.heads=4", "data.global_batch=16", "data.seq_len=8"]
OFF = ["mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1"]
LAYOUTS = {
    "tensor": ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"],
    "interleaved": [
        "mesh.pipe=2",
        "mesh.fsdp=2",
        "parallel.schedule=interleaved",
        "parallel.chunks=2",
        "parallel.microbatches=4",
        "model.dropout=0.2",
    ],
    "uneven": ["mesh.pipe=2", "parallel.schedule=one_f_one_b", "parallel.stages=[1,3]", "parallel.microbatches=2"],
    "context": ["mesh.context=2", "mesh.fsdp=2", "optimizer.name=adamw"],
    "bf16": ["mesh.fsdp=4", "precision.policy=bf16", "optimizer.name=adamw", "optimizer.freeze=[embed.*]"],
}


def verified(overrides: list[str]) -> Any:
    config = load_config("configs/quickstart.yaml", [*SMALL, *OFF, *overrides], planned=True)
    sizes = dataclasses.asdict(config.mesh)
    mesh = make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    drawn = configs.synthetic(config, mesh)
    return configs.verify_config(config, mesh, [next(drawn) for _ in range(3)], lambda _: None)


@pytest.mark.parametrize("name", levels(LAYOUTS, slow=2))
def test_layouts_of_a_configuration_train_as_one_device(name: str) -> None:
    found = verified(LAYOUTS[name])
    assert found.clean, str(found)
    assert "unknown" not in str(found)
    assert ("left out, as it rounds: precision.policy bf16" in str(found)) == (name == "bf16")


@pytest.mark.slow
def test_an_optimizer_that_takes_signs_of_rounding_is_not_blamed() -> None:
    """The gradient of a key's bias is 0 but for rounding, and Lion makes full steps of its sign."""
    found = verified(["model.layers=1", "mesh.fsdp=2", "mesh.tensor=2", "optimizer.name=lion"])
    assert found.clean, str(found)


def test_an_update_that_is_missing_in_a_layout_is_found() -> None:
    """Parameters are compared where a gradient is more than rounding, and where it is exactly 0, as weights decay."""
    grads = {"w": np.array([1.0, 0.0, 1e-17])}
    want = Training([1.0], [grads], {"w": np.array([0.9, 0.8, 0.7])}, (), (8, []), {})
    for place, clean in enumerate((False, False, True)):
        params = np.where(np.arange(3) == place, 1.0, want.params["w"])
        got = want._replace(grads=[{"w": np.array([1.0, 0.0, -2e-17])}], params={"w": params})
        assert (differences(got, want, [], 1e-9) == []) == clean


@pytest.mark.parametrize(
    ("overrides", "message"),
    [(["parallel.local.every=4", "mesh.data=2"], "parallel.local.every: no layout of one device trains so")],
)
def test_what_no_single_device_does_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        verified([*overrides, "optimizer.name=adamw"])


@pytest.mark.slow
def test_the_page_shows_what_verify_prints(tmp_path: Path) -> None:
    text = (child.ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
    module, program = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    [(command, shown)] = re.findall(r"^```console\n\$ jaxdist (.*?)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_loss.py").write_text(module, encoding="utf-8")
    for words in (["-m", "jaxdist", *command.split()], ["-c", program]):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(child.ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (int("jaxdist" in words), shown), done.stderr


def test_a_ratio_near_1_is_told_as_the_largest_difference() -> None:
    grads, params = {"w": np.array([1.0, 2.0])}, {"w": np.zeros(2)}
    told = {
        factor: differences(
            Training([1.0], [{"w": factor * grads["w"]}], params, (), (8, []), {}),
            Training([1.0], [grads], params, (), (8, []), {}),
            [],
            1e-9,
        )
        for factor in (1 + 1e-7, 2.0)
    }
    assert [line.rpartition("used: ")[2] for [line] in told.values()] == [
        "w, 2e-07 apart, of 2",
        "w, 2 times that of one device",
    ]


class Block(nnx.Module):
    """mixes: whether a sample reads the mean of its device's."""

    def __init__(self, rngs: nnx.Rngs, mixes: bool) -> None:
        self.linear, self.mixes = nnx.Linear(8, 8, rngs=rngs), mixes

    def __call__(self, h: Any, keys: Any) -> Any:
        h = h + jax.nn.tanh(self.linear(h))
        return h - h.mean(0) if self.mixes else h


class Embed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 8, rngs=rngs)

    def __call__(self, batch: Any, keys: Any) -> Any:
        return self.linear(batch["x"])


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, h: Any, batch: Any, embed: Any) -> Any:
        return (batch["weights"] * (self.linear(h)[:, 0] - 1) ** 2).sum(), batch["weights"].sum()


class Whole(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, mixes: bool) -> None:
        self.embed, self.head = Embed(rngs), Head(rngs)
        self.blocks = nnx.List([Block(rngs, mixes) for _ in range(2)])


@pytest.mark.slow
@pytest.mark.parametrize("mixes", [False, True])
def test_a_block_that_reads_other_samples_is_found(mixes: bool) -> None:
    model, rng = jaxdist.model_def(lambda rngs: Whole(rngs, mixes)), np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 4)).astype(np.float32), "weights": rng.random(8).astype(np.float32)}
    found = jaxdist.verify(model, None, batch, make_mesh(fsdp=4), strategy="zero3")
    assert [each.cause for each in found.findings] == ["layouts differ"] * mixes, str(found)
    if mixes:
        assert "differ; the first that is used: embed.linear." in str(found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: CONFIG, or MODULE:LOSS"),
        (["mine:loss_fn"], "--example: is missing for mine:loss_fn"),
        (["mine:loss_fn", "--example", "mine:e", "data.seq_len=8"], "data.seq_len=8: is no key of a layout"),
        (["mine:loss_fn", "--example", "mine:e", "mesh.fsdp=-1"], "mesh: has a -1; allowed: numbers of devices"),
        (["quickstart", "--example", "mine:e"], "--example: mine:e, but 'quickstart' is a configuration"),
        (["math:sin", "--example", "math:cos"], "--example: math:cos: missing a required"),
        (["no_such"], "config: 'no_such' is neither a file nor a configuration"),
    ],
    ids=str,
)
def test_wrong_command_lines_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1
