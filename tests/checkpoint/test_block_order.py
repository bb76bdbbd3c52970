"""Blocks in checkpoints: in the model's order, whatever pipeline saved them and whatever one goes on with them."""

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from levels import levels

from jaxdist import init_state, load_config, make_train_step, open_pretrained, state_target
from jaxdist.build import Parts, assemble
from jaxdist.checkpoint import Checkpoints
from jaxdist.checkpoint.background import _copier
from jaxdist.checkpoint.block_order import (
    NONE,
    _aside,
    _take,
    _taken,
    as_saved,
    between,
    in_model_order,
    in_order_of,
    order_of,
    stacked_dims,
)
from jaxdist.checkpoint.checksums import CHECKPOINT_FORMAT, RECORD
from jaxdist.checkpoint.huggingface.convert import export
from jaxdist.checkpoint.reader import open_steps
from jaxdist.cli.work.checkpoint import average
from jaxdist.config.schema import Config, MeshConfig, ModelConfig, ParallelConfig
from jaxdist.config.sections.optimizer import OptimizerConfig
from jaxdist.errors import UserError
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.observe import read_metrics
from jaxdist.parallel.pipeline.stages import arrange, arrange_rows, order_of_blocks, rows_of_blocks, take_rows
from jaxdist.runtime.watch.stop import StopSignal
from jaxdist.state import TrainState
from jaxdist.trainer.train import train

pytestmark = pytest.mark.xdist_group("checkpoint blocks")

LAYERS = 4
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one stage": ({}, {}),
    "interleaved": ({"pipe": 2, "fsdp": 2}, {"strategy": "zero3", "schedule": "interleaved", "chunks": 2}),
    "uneven": ({"pipe": 2, "tensor": 2}, {"schedule": "one_f_one_b", "stages": (1, 3)}),
    "uneven chunks": ({"pipe": 2}, {"schedule": "interleaved", "chunks": 2, "stages": (1, 2, 1, 1)}),
    "zero3": ({"fsdp": 8}, {"strategy": "zero3"}),
}


@contextmanager
def as_older(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A context in which checkpoints do not say in which order their blocks are, which is that of the run."""
    with monkeypatch.context() as patch:
        own = {RECORD: {"checksums": CHECKPOINT_FORMAT}}
        patch.setattr("jaxdist.checkpoint.manager.recorded", lambda meta, loss: meta | own)
        patch.setattr("jaxdist.checkpoint.manager.order_of", lambda state: None)
        yield


def parts_of(layout: str, optimizer: str = "adamw", layers: int = LAYERS) -> Parts:
    sizes, parallel = LAYOUTS[layout]
    config = Config(
        model=ModelConfig(layers=layers, width=16, heads=2),
        mesh=MeshConfig(**sizes),
        parallel=ParallelConfig(min_shard_bytes=0, microbatches=4, **parallel),
        optimizer=OptimizerConfig(name=optimizer, momentum=0.9),
    )
    return assemble(config, make_mesh(**asdict(config.mesh)))


def numbers(optimizer: str, layers: int = LAYERS) -> TrainState:
    """A state on the host, no two numbers alike, blocks in the order of the model."""
    rng = np.random.default_rng(0)
    target = parts_of("one stage", optimizer, layers).target
    return jax.tree.map(lambda leaf: np.asarray(rng.normal(size=leaf.shape) * 9, leaf.dtype), target)


def laid_out(state: TrainState, parts: Parts) -> TrainState:
    """A state on the host as a run has it."""

    def one(leaf: Any, dim: int, asked: Any) -> jax.Array:
        arranged = leaf if dim == NONE else take_rows(jnp.asarray(leaf), parts.order, dim=dim)
        return jax.device_put(arranged, asked.sharding)

    carried = {"model_state": parts.target.model_state}  # the order of the blocks
    return jax.tree.map(one, *(each._replace(**carried) for each in (state, stacked_dims(state), parts.target)))


def assert_same(got: TrainState, want: TrainState) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape, a.sharding) == (b.dtype, b.shape, b.sharding)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("optimizer", levels(["adamw", "lion", "adafactor", "sgd", "muon"], slow=2))
def test_any_pipeline_into_any_other(optimizer: str, tmp_path: Path) -> None:
    """Bit for bit, laid out as asked for; and what is stored is the model's order itself, for any reader."""
    names = ["one stage", "interleaved", "zero3", "uneven"]
    parts, state = {name: parts_of(name, optimizer) for name in names}, numbers(optimizer)
    for saving in names:
        with Checkpoints(tmp_path / saving, keep=1) as checkpoints:
            checkpoints.save(3, laid_out(state, parts[saving]), {})
        with Checkpoints(tmp_path / saving, keep=1) as checkpoints:
            assert_same(checkpoints.restore(3, parts["one stage"].target), laid_out(state, parts["one stage"]))
    for name in names:
        with Checkpoints(tmp_path / "interleaved", keep=1) as checkpoints:
            assert_same(checkpoints.restore(3, parts[name].target), laid_out(state, parts[name]))


@pytest.mark.slow
def test_empty_rows_of_several_chunks(tmp_path: Path) -> None:
    parts, state = parts_of("uneven chunks", layers=5), numbers("adamw", 5)
    assert parts.order.tolist() == [0, -1, 3, -1, 1, 2, 4, -1]
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(3, laid_out(state, parts), {})
        checkpoints.wait()
        assert_same(checkpoints.restore(3, parts.target), laid_out(state, parts))
    kernel = open_steps(tmp_path)[0].param("blocks.mlp.up.kernel")
    assert np.array_equal(kernel, state.params["blocks"]["mlp"]["up"]["kernel"])


OLDER = [
    ("uneven", "uneven"),
    ("interleaved", "one stage"),
    ("uneven", "interleaved"),
    ("interleaved", "uneven"),
    ("interleaved", "interleaved"),
    ("uneven", "one stage"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("older", "into"), levels(OLDER, everyday=9))
def test_checkpoints_of_older_versions(older: str, into: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These hold blocks as they lay, and say how."""
    (sizes, parallel), state = LAYOUTS[older], numbers("adamw")
    parts, now = parts_of(older), parts_of(into)
    meta = {
        "model": asdict(ModelConfig(layers=LAYERS)),
        "data": {"sha256": "ab"},
        "parallel": {"chunks": parallel.get("chunks", 1), "stages": list(parallel.get("stages", ()))},
        "mesh": {"pipe": sizes["pipe"]} if parallel.get("chunks") else {},
        "train": {},
        "optimizer": {},
    }
    with as_older(monkeypatch), Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(3, laid_out(state, parts), meta)
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        assert_same(checkpoints.restore(3, now.target), laid_out(state, now))
    (stored,) = open_steps(tmp_path)
    kernel = state.params["blocks"]["mlp"]["up"]["kernel"]
    assert np.array_equal(stored.param("blocks.mlp.up.kernel"), kernel)
    assert stored.params()["blocks.mlp.up.kernel"].shape == kernel.shape
    average(tmp_path, tmp_path / "mean", last=1)
    with Checkpoints(tmp_path / "mean" / "checkpoints", keep=1) as checkpoints:
        assert_same(checkpoints.restore(3, now.target), laid_out(state, now))
        assert checkpoints.meta(3).keys() == meta.keys()


OWN = {"model": {"layers": LAYERS, "depth": 2}, "data": {"a": 1}, "train": {"b": 1}, "optimizer": {"c": 1}}
OWN_RECORDS: dict[str, dict[str, Any]] = {
    "settings of a pipeline": {"parallel": {"chunks": 2, "stages": []}, "mesh": {"pipe": 2}},
    "a text": {"parallel": "ddp", "precision": "bf16"},
    "a number": {"parallel": {"stages": 2}},
    "no mesh": {"parallel": {"chunks": 4}},
}


@pytest.mark.parametrize("name", OWN_RECORDS)
def test_the_record_of_a_loop_of_ones_own_moves_no_blocks(name: str, tmp_path: Path) -> None:
    """Whatever it says under the names of a configuration, and it stays as it is."""
    parts, state, meta = parts_of("one stage"), numbers("adamw"), OWN | OWN_RECORDS[name]
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(3, laid_out(state, parts), meta)
        assert_same(checkpoints.restore(3, parts.target), laid_out(state, parts))
    (stored,) = open_steps(tmp_path)
    assert np.array_equal(stored.param("blocks.mlp.up.kernel"), state.params["blocks"]["mlp"]["up"]["kernel"])
    average(tmp_path, tmp_path / "mean", last=1)
    with Checkpoints(tmp_path / "mean" / "checkpoints", keep=1) as checkpoints:
        assert checkpoints.meta(3) == meta
    with pytest.raises(UserError, match="has a model with the key 'depth', which is not known here|does not say which"):
        export(stored, tmp_path / "out")


@pytest.mark.slow
def test_another_number_of_blocks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of("uneven")
    with Checkpoints(tmp_path / "new", keep=1) as checkpoints:
        checkpoints.save(3, laid_out(numbers("adamw"), parts), {})
    other = parts_of("uneven chunks", layers=5)
    with (
        Checkpoints(tmp_path / "new", keep=1) as checkpoints,
        pytest.raises(UserError, match=r"checkpoint of step 3: .*blocks.* is float32\[4, .* makes it float32\[5, "),
    ):
        checkpoints.restore(3, other.target)
    meta = {
        "model": {"layers": 4},
        "parallel": {"chunks": 1, "stages": [1, 3]},
        "data": {},
        "train": {},
        "optimizer": {},
    }
    with as_older(monkeypatch), Checkpoints(tmp_path / "old", keep=1) as checkpoints:
        checkpoints.save(3, laid_out(numbers("adamw"), parts), meta)
    for name in ("zero3", "uneven chunks"):
        other = parts_of(name, layers=5)
        with (
            Checkpoints(tmp_path / "old", keep=1) as checkpoints,
            pytest.raises(UserError, match=r"^model.layers: 5, but the checkpoint holds 4 blocks"),
        ):
            checkpoints.restore(3, other.target)


@pytest.mark.parametrize("arrangement", [{"chunks": 2}, {"blocks": (1, 3)}], ids=["interleaved", "uneven"])
def test_a_loop_of_ones_own_need_not_know_the_order(arrangement: dict[str, Any], tmp_path: Path) -> None:
    """The state tells it. A step whose model has another one is refused: it would run blocks in a wrong order."""
    config = ModelConfig(layers=4, width=16, heads=2, vocab=32)
    model, tx = gpt(config, max_length=8), optax.adam(1e-2)
    piped = arrange(model, stages=2, **arrangement)
    one, two = make_mesh(devices=jax.devices()[:1]), make_mesh(pipe=2, devices=jax.devices()[:2])
    first, both = init_state(model, tx, one, strategy="ddp"), {}
    with Checkpoints(tmp_path / "one", keep=1) as checkpoints:
        checkpoints.save(1, first, {})
        moved = checkpoints.restore(1, state_target(piped, tx, two, strategy="ddp"))
    for state, name in ((moved, "restored"), (init_state(piped, tx, two, strategy="ddp"), "fresh")):
        with Checkpoints(tmp_path / name, keep=1) as checkpoints:
            checkpoints.save(1, state, {})
            both[name] = checkpoints.restore(1, state_target(model, tx, one, strategy="ddp"))
        assert_same(both[name], first)
    assert_same(moved, state)
    with open_pretrained(tmp_path / "one") as found:
        loaded = found.load(state_target(piped, optax.identity(), two, strategy="ddp"))
    assert_same(state._replace(params=loaded), state)
    rows = {**first.params, "blocks": arrange_rows(first.params["blocks"], np.array(piped.arranged.rows))}
    rows = jax.device_put(jax.device_get(rows), jax.tree.map(lambda leaf: leaf.sharding, state.params))
    assert_same(init_state(piped, tx, two, strategy="ddp")._replace(params=rows), moved)
    refused = r"^state: the rows of its blocks are as blocks \[.*\], and this step's model has them in the order of the"
    with pytest.raises(UserError, match=refused):
        make_train_step(model, tx, two, schedule="gpipe", microbatches=2)(moved, {"inputs": np.zeros((4, 8), np.int32)})
    for again in (arrangement, {}):
        with pytest.raises(UserError, match="^model: is arranged for 2 stages already"):
            arrange(piped, stages=2, **again)


def test_an_order_that_is_the_model_s_is_none() -> None:
    """Nothing is moved to be saved, and steps take states of either."""
    model, tx, one = gpt(ModelConfig(layers=4, width=16, heads=2), max_length=8), optax.sgd(0.1), make_mesh()
    chunked = arrange(model, stages=1, chunks=2)
    for mine, other in ((chunked, model), (model, chunked)):
        state = init_state(mine, tx, one)
        assert state.model_state == () and order_of(state) is None
        make_train_step(other, tx, one).jitted(state)
        make_train_step(other, tx, one).jitted(state._replace(model_state={}))
    with pytest.raises(UserError, match=r"^mesh.pipe: 2 is given, but the model was arranged for 1 stages"):
        make_train_step(chunked, tx, make_mesh(pipe=2, devices=jax.devices()[:2]))


def test_rows_between_orders() -> None:
    uneven = [order_of_blocks(7, stages=2, blocks=sizes) for sizes in ((3, 4), (5, 2))]
    chunks = order_of_blocks(7, stages=2, chunks=2, blocks=(1, 2, 3, 1))
    blocks = np.arange(100, 107)
    for saved in (None, *uneven, chunks):
        for wanted in (None, *uneven, chunks):
            lies = blocks if saved is None else np.where(saved >= 0, blocks[saved], 0)
            want = blocks if wanted is None else np.where(wanted >= 0, blocks[wanted], 0)
            rows = between(saved, wanted)
            assert (rows is None) == (saved is wanted)
            assert np.array_equal(lies if rows is None else np.asarray(take_rows(jnp.asarray(lies), rows)), want)
    assert between(None, np.arange(7)) is None and between(np.arange(7), None) is None


def test_which_dim_blocks_are_stacked_along() -> None:
    """Also of Adafactor's factors, which lack a dim, and of residuals, which have one more."""
    config = Config(model=ModelConfig(layers=4, width=128, heads=2), optimizer=OptimizerConfig(name="adafactor"))
    target = assemble(config, make_mesh()).target
    copies = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), target.params)
    dims = stacked_dims(target._replace(residual=copies))
    assert set(jax.tree.leaves(dims.params["blocks"])) == {0} and set(jax.tree.leaves(dims.residual["blocks"])) == {1}
    outside = [tree[unit] for tree in (dims.params, dims.residual) for unit in ("embed", "head")]
    assert set(jax.tree.leaves((outside, dims.step, dims.guard))) == {NONE}
    leaves = jax.tree_util.tree_leaves_with_path(target.opt_state)
    named = {
        jax.tree_util.keystr(path): (leaf.shape, dim)
        for (path, leaf), dim in zip(leaves, jax.tree.leaves(dims.opt_state), strict=True)
    }
    factors = {key: found for key, found in named.items() if "v_row" in key or "v_col" in key}
    assert {found for key, found in factors.items() if "mlp" in key and "up" in key and "kernel" in key} == {
        ((4, 128), 0),
        ((4, 512), 0),
    }
    assert all(dim == (0 if "blocks" in key and shape[:1] == (4,) else NONE) for key, (shape, dim) in named.items())


@pytest.mark.parametrize(
    "order",
    [order_of_blocks(16, stages=4, chunks=2), order_of_blocks(13, stages=4, blocks=(2, 4, 4, 3))],
    ids=["chunks", "uneven"],
)
def test_no_device_holds_a_whole_leaf(order: np.ndarray) -> None:
    """One all-to-all each way, and no more than two more copies of the device's own part."""
    sharding = NamedSharding(make_mesh(pipe=4, fsdp=2), P("pipe", None, "fsdp"))
    aside = _aside(sharding, (order.size, 256, 512), 0)
    assert aside.spec == P(None, "pipe", "fsdp")
    for rows, before, after, count in (
        (rows_of_blocks(order), sharding, aside, order.size),
        (order, aside, sharding, int((order >= 0).sum())),
    ):
        leaf = jax.ShapeDtypeStruct((count, 256, 512), jnp.float32, sharding=before)
        made = jax.jit(_take, static_argnames=("rows", "dim", "aside"), out_shardings=after)
        compiled = made.lower(leaf, rows=tuple(rows.tolist()), dim=0, aside=aside).compile()
        found = re.findall(r" (all-to-all|all-gather|all-reduce|collective-permute|gather-start)\(", compiled.as_text())
        assert found == ["all-to-all"]
        own = order.size * 256 * 512 * 4 / 8
        assert compiled.memory_analysis().temp_size_in_bytes <= 2 * own + 1024


def test_leaves_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a state is put into its order, there is room for one more leaf, not for one more state."""
    parts, order = parts_of("uneven"), parts_of("uneven").order
    asked = as_saved(parts.target, order, None)
    made = [jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding) for leaf in jax.tree.leaves(asked)]
    dims = jax.tree.leaves(stacked_dims(parts.target))
    moved = [weakref.ref(leaf) for leaf, dim in zip(made, dims, strict=True) if dim != NONE]
    alive = []

    def counted(*arguments: Any, **options: Any) -> Any:
        alive.append(sum(each() is not None for each in moved))
        return _taken(*arguments, **options)

    monkeypatch.setattr("jaxdist.checkpoint.block_order._taken", counted)
    treedef = jax.tree.structure(asked)
    states = [jax.tree.unflatten(treedef, made)]
    del made
    in_order_of(parts.target, states.pop(), order)
    assert alive == list(range(len(moved), 0, -1)) and len(alive) > 20


def test_leaves_that_stay_are_copied_by_one_program() -> None:
    parts = parts_of("uneven")
    make = lambda leaf: jax.device_put(np.ones(leaf.shape, leaf.dtype), leaf.sharding)  # noqa: E731
    state = jax.tree.map(make, parts.target)
    assert jax.tree.leaves(stacked_dims(state)).count(NONE) > 5
    _copier.cache_clear()
    saved = in_model_order(state, parts.order)
    assert _copier.cache_info().misses == 1
    for dim, before, after in zip(*map(jax.tree.leaves, (stacked_dims(state), state, saved)), strict=True):
        if dim == NONE:
            assert after.sharding == before.sharding and after is not before
            np.testing.assert_array_equal(after, before)


YAML = """
model: {{layers: 4, width: 16, heads: 2, dropout: 0.1}}
data: {{path: {path}, seq_len: 16, global_batch: 8}}
parallel: {{min_shard_bytes: 0, microbatches: 4}}
optimizer: {{lr: 1e-2, schedule: constant}}
train: {{steps: 12, eval_every: 0, sample_tokens: 0}}
checkpoint: {{every: 0}}
devices: {{platform: cpu}}
observe: {{report: false}}
"""
STAGES = {
    3: ["mesh.pipe=2", "mesh.fsdp=2", "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.strategy=zero3"],
    5: [],
    7: ["mesh.pipe=2", "mesh.tensor=2", "parallel.schedule=one_f_one_b", "parallel.stages=[1,3]"],
    9: ["mesh.pipe=4", "mesh.data=2", "parallel.schedule=zero_bubble"],
    12: ["mesh.fsdp=8", "parallel.strategy=zero3", "parallel.microbatches=1"],
}


@pytest.mark.exhaustive
def test_a_run_goes_on_with_any_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interleaved 2 x 2, one stage, uneven, four stages, zero3 on 8: with dropout, the losses of one device."""
    words = np.random.default_rng(0).choice(["def", "return", "x", "y", "+", ":"], 2000)
    (tmp_path / "text.py").write_text(" ".join(words))
    (tmp_path / "tiny.yaml").write_text(YAML.format(path=tmp_path / "text.py"))
    config: Callable[..., Config] = lambda *options: load_config(tmp_path / "tiny.yaml", options)  # noqa: E731
    losses = lambda name: [each["loss"] for each in read_metrics(tmp_path / name / "metrics.jsonl")]  # noqa: E731
    assert train(config(), tmp_path / "whole") == 0
    for stop, layout in STAGES.items():
        with monkeypatch.context() as patch:
            if stop < 12:
                patch.setattr(StopSignal, "requested", lambda self, step, stop=stop: step == stop)
            assert train(config(*layout), tmp_path / "moved") == (75 if stop < 12 else 0)
    assert len(losses("moved")) == 12
    np.testing.assert_allclose(losses("moved"), losses("whole"), rtol=1e-5)
