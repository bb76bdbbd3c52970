"""What a model tells of itself beside its loss, arrays too: in metrics.jsonl, in a run's sinks, in its report."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import jaxdist
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.model import ModelDef
from jaxdist.models.gpt import gpt
from jaxdist.observe import read_metrics
from jaxdist.observe.report import read_run, write_report
from jaxdist.parallel.pipeline.stages import arrange, arrange_rows, order_of_blocks
from jaxdist.specs import BATCH_SPEC
from jaxdist.step import make_train_step
from jaxdist.trainer.train import train

pytestmark = pytest.mark.xdist_group("figures")  # the finished run is shared

ROOT = Path(__file__).parents[2]
TINY = (
    "model.layers=4", "model.width=16", "model.heads=2", "model.moe.experts=4", "model.moe.dispatch=capacity",
    "model.moe.group=8", "data.seq_len=16", "data.global_batch=8", "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1",
    "optimizer.name=adamw", "optimizer.lr=1e-3", "train.steps=4", "train.eval_every=3", "train.eval_batches=1",
    "train.sample_tokens=0", "checkpoint.every=2", "devices.platform=cpu", "observe.console=plain",
    "observe.report=false",
)  # fmt: skip
ONE = ("parallel.strategy=ddp", "observe.report=true", "observe.tensorboard=true")
FIGURES = {f"experts/{name}" for name in ("max_load", "dropped", "entropy", "balance_loss", "z_loss")}
TOKEN = 4 / (2 * 8 * 16)  # a token's part of a load: 4 experts, 2 of them for each of 8 x 16 tokens
Configure = Callable[..., Config]


@pytest.fixture(scope="module")
def configure(tmp_path_factory: pytest.TempPathFactory) -> Configure:
    """The quickstart, of a mixture of experts, so small that it takes seconds."""
    folder = tmp_path_factory.mktemp("text")
    words = np.random.default_rng(0).choice(["def", "return", "x", "y", "0", "1", "+", ":"], 4000)
    (folder / "text.py").write_text(" ".join(words))
    given = [*TINY, f"data.path={folder / 'text.py'}"]
    return lambda *overrides: load_config(ROOT / "configs" / "quickstart.yaml", [*given, *overrides])


@pytest.fixture(scope="module")
def finished(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on one device, with a report. Tests copy it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert train(configure(*ONE), folder) == 0
    return folder


def loads(folder: Path) -> dict[int, np.ndarray]:
    """The loads in metrics.jsonl, by step, in tokens."""
    found = {line["step"]: line.get("arrays", {}) for line in read_metrics(folder / "metrics.jsonl")}
    return {step: np.array(arrays["experts/load"]) / TOKEN for step, arrays in found.items() if arrays}


def same_tokens(found: Path, wanted: Path) -> None:
    made, whole = loads(found), loads(wanted)
    assert {2, 4} <= set(made) <= set(whole)
    for step, load in made.items():
        np.testing.assert_allclose(load, whole[step], atol=0.1)  # a token is 1


@pytest.mark.slow
def test_arrays_stand_where_the_loop_waits(finished: Path) -> None:
    """Numbers in every line; arrays in those with an evaluation or a checkpoint, whose last is that of the session."""
    lines = read_metrics(finished / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and all(set(line) >= FIGURES for line in lines)
    found = loads(finished)
    assert list(found) == [2, 3, 4]
    for step, load in found.items():
        assert load.shape == (4, 4) and load.sum(1) == pytest.approx(2 * 8 * 16, abs=0.5)
        assert load.max() * TOKEN == pytest.approx(lines[step - 1]["experts/max_load"], abs=1e-3)


@pytest.mark.slow
def test_a_resumed_run_writes_them_again(
    finished: Path, configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    assert train(configure(*ONE, "observe.report=false"), tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert "after step 2" in said and "warning" not in said
    same_tokens(tmp_path / "run", finished)


@pytest.mark.slow
def test_the_report_and_the_console_tell_of_them(
    finished: Path, configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (finished / "report.html").read_text()
    assert '<section id="experts">' in page and "Load of every expert at step 4" in page
    assert list((finished / "tensorboard").glob("*.report")) and not (finished / "incidents.jsonl").exists()
    write_report(tmp_path / "again.html", read_run(finished))  # as `jaxdist report` does
    assert "Load of 4 blocks of 4 experts at step 4" in (tmp_path / "again.html").read_text()
    shutil.copytree(finished, tmp_path / "run")
    assert train(configure(*ONE), tmp_path / "run") == 0  # there is no step left to take
    largest, dropped = (
        read_metrics(finished / "metrics.jsonl")[-1][f"experts/{name}"] for name in ("max_load", "dropped")
    )
    said = f"experts: the busiest got {largest:.3g} times the mean, {100 * dropped:.3g}% of choices dropped\n"
    assert said in capsys.readouterr().out and dropped > 0


PIPE = ("mesh.pipe=2", "parallel.microbatches=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("mesh.expert=2",), id="expert"),
        pytest.param(
            (*PIPE, "parallel.schedule=interleaved", "parallel.chunks=2"), id="interleaved", marks=pytest.mark.slow
        ),
        pytest.param((*PIPE, "parallel.schedule=gpipe", "parallel.stages=[3,1]"), id="uneven", marks=pytest.mark.slow),
    ],
)
def test_rows_are_blocks_in_the_order_of_the_model(
    finished: Path, configure: Configure, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    """In every layout the same experts get the same tokens, whichever rows and devices their blocks are on."""
    assert train(configure("parallel.strategy=ddp", "train.eval_every=0", *layout), tmp_path / "run") == 0
    same_tokens(tmp_path / "run", finished)


@pytest.mark.slow
def test_replicas_that_train_by_themselves(configure: Configure, tmp_path: Path) -> None:
    """Their figures are means over replicas, also after an outer step, whose other metrics are those of all. With one
    step in a round, and without the biases that balance experts, all is as in steps with all rows."""
    given = ("mesh.data=2", "parallel.strategy=ddp", "optimizer.name=sgd", "optimizer.clip_norm=0", "optimizer.lr=0.1")
    given = (*given, "train.eval_every=0", "model.moe.bias_rate=null")
    for name, every in (("local", 1), ("whole", 0)):
        assert train(configure(*given, f"parallel.local.every={every}"), tmp_path / name) == 0
    same_tokens(tmp_path / "local", tmp_path / "whole")
    lines = read_metrics(tmp_path / "local" / "metrics.jsonl")
    assert all(set(line) >= {*FIGURES, "outer_norm"} for line in lines)


# ---------------------------------------------------------------- figures of the user's own


def norms(grads: Any) -> dict[str, jax.Array]:
    """The gradients' squared norm of each row, of one kernel, and of all rows."""
    rows = jnp.square(grads["blocks"]["mlp"]["up"]["kernel"]).sum((1, 2))
    return {"mine": rows, "mine/whole": rows.sum()}


def own_model(figures: Any = norms, layers: int = 4, **options: Any) -> ModelDef:
    config = layouts.model_config(layouts.Case("llama", False, "ddp", 1, (1, 1, 1))).replace(layers=layers, mlp="gelu")
    return arrange(gpt(config, max_length=layouts.SEQ)._replace(figures=figures), **options)


def test_arrays_of_rows_become_arrays_of_blocks() -> None:
    """Two stages of two chunks, and rows without a block: what is told is that of the model as it is."""
    plain = own_model(layers=5, stages=1)
    grads = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), plain.shapes)
    wanted = norms(grads)
    assert wanted["mine"].shape == (5,) and len(set(wanted["mine"].tolist())) == 5
    for layout in ({"blocks": [3, 2]}, {"chunks": 2, "blocks": [2, 1, 1, 1]}):
        model = own_model(layers=5, stages=2, **layout)
        order = order_of_blocks(5, stages=2, **layout)
        assert order.tolist() != [0, 1, 2, 3, 4] and model.figures is not None
        found = model.figures({**grads, "blocks": arrange_rows(grads["blocks"], order)})
        np.testing.assert_array_equal(found["mine"], wanted["mine"])
        np.testing.assert_allclose(found["mine/whole"], wanted["mine/whole"], rtol=1e-5)


def test_fit_gives_them_to_callbacks_and_its_result(tmp_path: Path) -> None:
    told: list[Any] = []
    batches = [layouts.make_batch(8, step) for step in range(3)]
    done = jaxdist.fit(
        own_model(stages=1),
        optax.sgd(0.1),
        batches,
        steps=3,
        mesh=make_mesh(),
        run_dir=tmp_path / "run",
        callbacks=[lambda step, metrics: told.append(metrics["mine"])],
        settings={"observe.console": "plain"},
    )
    assert [each.shape for each in told] == [(4,)] * 3 and (done.metrics["mine"] == told[-1]).all()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line.get("arrays") is not None for line in lines] == [False, False, True]
    assert lines[-1]["arrays"]["mine"] == pytest.approx(told[-1], rel=5e-4)
    assert lines[0]["mine/whole"] == pytest.approx(told[0].sum(), rel=1e-5)


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        (
            lambda grads: {"mine": jnp.zeros(5)},
            r"^figures: 'mine' has the shape \[5\]; allowed in this pipeline: .* 6 rows",
        ),
        (lambda grads: {"loss": jnp.zeros(())}, r"^figures: metric 'loss' is jaxdist's own; give it another name"),
    ],
    ids=["shape", "name"],
)
def test_figures_that_are_wrong(figures: Any, line: str) -> None:
    model, tx, mesh = own_model(figures, stages=2, blocks=[3, 1]), optax.sgd(0.1), make_mesh(pipe=2)
    given = {"schedule": "gpipe", "microbatches": 2}
    batch = jax.device_put(layouts.make_batch(8, 0), NamedSharding(mesh, BATCH_SPEC))
    with pytest.raises(UserError, match=line):
        make_train_step(model, tx, mesh, **given).trace(state_target(model, tx, mesh, **given), batch)
