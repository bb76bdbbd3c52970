"""The ledger against closed forms, written unit by unit, and against what is compiled."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import jaxdist
from jaxdist import make_mesh, make_train_step, registry, state_target
from jaxdist.collectives import psum
from jaxdist.config import ModelConfig, load_config
from jaxdist.errors import UserError
from jaxdist.mesh import abstract_mesh
from jaxdist.models.gpt import gpt
from jaxdist.nn.mlp import MLP
from jaxdist.plan.budget import over_budget, read_budget
from jaxdist.plan.explain import explain, to_json
from jaxdist.plan.hlo import compiled_collectives
from jaxdist.plan.ledger import BETWEEN, INSIDE, ledger
from jaxdist.plan.sharding import sharding_rows
from jaxdist.specs import BATCH_SPEC
from jaxdist.state import specs_of_arrays

ROOT = Path(__file__).parent.parent
NAMES = registry.names("jaxdist.parallel.strategies")
LAYERS, WIDTH, VOCAB, LENGTH, ROWS = 3, 32, 64, 8, 96
LOSS = 2 * 4  # bytes: loss and weight, together


def model(style: str = "llama", *, tied: bool = False, layers: int = LAYERS) -> Any:
    config = ModelConfig(style=style, layers=layers, width=WIDTH, heads=4, vocab=VOCAB, mlp_width=64, tied=tied)
    return gpt(config, max_length=LENGTH)


def batch(rows: int = ROWS) -> dict[str, jax.ShapeDtypeStruct]:
    grid = (rows, LENGTH)
    return {"inputs": jax.ShapeDtypeStruct(grid, np.int32), "targets": jax.ShapeDtypeStruct(grid, np.int32),
            "weights": jax.ShapeDtypeStruct(grid, np.float32)}  # fmt: skip


def ledger_of(definition: Any, strategy: str, **options: Any) -> Any:
    """On a mesh without devices. options: sizes of the mesh, and arguments of `make_train_step`."""
    sizes = {axis: options.pop(axis) for axis in ("data", "fsdp", "tensor") if axis in options}
    mesh, tx = abstract_mesh(**sizes), optax.adamw(1e-3)
    step = make_train_step(definition, tx, mesh, strategy=strategy, **options)
    return ledger(step, state_target(definition, tx, mesh, strategy=strategy), batch())


def unit_bytes(definition: Any) -> dict[str, int]:
    """Bytes of each unit, in fp32; "table": of the embedding's, which a tied head reads."""
    size = lambda tree: sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))  # noqa: E731
    units = {name: size(tree) for name, tree in definition.shapes.items()}
    return units | {"table": size(definition.shapes["embed"]["tokens"])}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("n", "microbatches"), [
    (16, 3), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((16, 1), (2, 3), (2, 1)))
])  # fmt: skip
@pytest.mark.parametrize("strategy", NAMES)
def test_wire_bytes_are_the_closed_forms(strategy: str, n: int, microbatches: int, tied: bool) -> None:
    definition = model(tied=tied)  # Llama: a GPT-2 block ends with a bias, which its backward pass does not read
    found = ledger_of(definition, strategy, fsdp=n, microbatches=microbatches, remat="full").total("op")
    units, share = unit_bytes(definition), (n - 1) / n
    whole = units["embed"] + units["blocks"] + units["head"]
    again = units["table"] if tied else 0  # the head's use of it
    loss = 2 * share * LOSS
    want = {
        "ddp": {"psum": 2 * share * whole + loss},
        "zero1": {"all_gather": share * whole, "reduce_scatter": share * whole, "psum": loss},
        "zero2": {
            "all_gather": share * whole, "reduce_scatter": microbatches * share * (whole + again), "psum": loss,
        },
        # Forward and, for the backward pass, again; but a look-up's backward does not read the table.
        "zero3": {
            "all_gather": microbatches * share * (2 * whole - units["embed"] + 2 * again),
            "reduce_scatter": microbatches * share * (whole + again), "psum": loss,
        },
    }[strategy]  # fmt: skip
    assert found == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("strategy", [name for name in NAMES if name != "ddp"])
def test_hybrid_sharding_adds_an_all_reduce_of_shards(strategy: str) -> None:
    definition, f, d = model(), 4, 8
    found = ledger_of(definition, strategy, fsdp=f, data=d)
    units = unit_bytes(definition)
    whole = units["embed"] + units["blocks"] + units["head"]
    assert found.total("axes")[("data",)] == 2 * (d - 1) / d * whole / f
    assert found.total("axes")[("data", "fsdp")] == 2 * (d * f - 1) / (d * f) * LOSS
    alone = ledger_of(definition, strategy, fsdp=f).total("axes")
    loss = 2 * (f - 1) / f * LOSS
    assert found.total("axes")[("fsdp",)] == alone[("fsdp",)] - loss


@pytest.mark.parametrize(("remat", "of_a_block"), [("none", 4), ("full", 5)])
@pytest.mark.parametrize("t", [2, 4])
def test_tensor_parallelism_sums_activations(t: int, remat: str, of_a_block: int) -> None:
    """Four all-reduces of activations a block, one more where the forward pass runs again; embedding and head: one of
    activations forward, one backward, and three of a number a token for the loss (and again)."""
    found = ledger_of(model(), "ddp", tensor=t, remat=remat)
    activations, tokens = ROWS * LENGTH * WIDTH * 4, ROWS * LENGTH * 4
    calls = [each for each in found.collectives if each.axes == ("tensor",)]
    assert len(calls) == len(found.collectives)  # nothing else
    large = sum(each.calls for each in calls if each.bytes_per_call == activations)
    assert large == of_a_block * LAYERS + 2
    small = sum(each.calls for each in calls if each.bytes_per_call == tokens)
    assert large + small == sum(each.calls for each in calls) and small == (3 if remat == "none" else 5)


@pytest.mark.parametrize("strategy", NAMES)
def test_the_compiled_program_agrees(strategy: str) -> None:
    mesh, tx, definition = make_mesh(data=2, fsdp=2, tensor=2), optax.adamw(1e-3), model()
    state = state_target(definition, tx, mesh, strategy=strategy)
    step = make_train_step(definition, tx, mesh, strategy=strategy)
    data = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, BATCH_SPEC))
            for name, leaf in batch().items()}  # fmt: skip
    compiled = compiled_collectives(step.lower(state, data).compile().as_text())
    found: dict[str, float] = {}
    for each in compiled:
        if not each.added:
            found[each.op] = found.get(each.op, 0) + each.wire_bytes
    if strategy == "zero3" and jax.__version_info__ < (0, 11):  # its XLA merges the head's two gathers, side by side
        head = sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(definition.shapes["head"]["norm"]))
        found["all_gather"] += (head + 4 * VOCAB * WIDTH // 2) / 2  # the table is split over tensor
    assert found == ledger(step, state, data).total("op")
    added = [each for each in compiled if each.added]  # for the norm of the gradient
    assert {each.op for each in added} <= {"psum"} and sum(each.wire_bytes for each in added) < 500


def test_what_the_compiler_adds_is_told_apart() -> None:
    mesh, tx, definition = make_mesh(fsdp=4), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), model()
    state = state_target(definition, tx, mesh, strategy="zero3")
    step = make_train_step(definition, tx, mesh, strategy="zero3")
    data = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, BATCH_SPEC))
            for name, leaf in batch().items()}  # fmt: skip
    added = [each for each in compiled_collectives(step.lower(state, data).compile().as_text()) if each.added]
    assert added and {each.op for each in added} == {"psum"} and sum(each.wire_bytes for each in added) < 1000


def test_lines_say_where_and_what_for() -> None:
    found = ledger_of(model(), "zero3", fsdp=8, data=4, tensor=2)
    by_purpose = {(each.purpose, each.phase): each for each in found.collectives}
    gather = by_purpose["blocks.mlp.up.kernel", "recompute"]
    assert (gather.op, gather.axes, gather.group_size, gather.calls) == ("all_gather", ("fsdp",), 8, LAYERS)
    assert gather.source.startswith("jaxdist/parallel/strategy.py:")
    assert by_purpose["gradient of blocks.mlp.up.kernel", "backward"].op == "reduce_scatter"
    assert by_purpose["activations of blocks.attention", "forward"].source.startswith("jaxdist/nn/linear.py:")
    assert by_purpose["gradients", "once a step"].axes == ("data",)
    # 64 devices, 8 on a host: tensor pairs are neighbours, an fsdp group of 8 spreads over two hosts.
    assert {each.axes: each.link for each in found.collectives} == {
        ("tensor",): INSIDE, ("fsdp",): BETWEEN, ("data",): BETWEEN, ("data", "fsdp"): BETWEEN,
    }  # fmt: skip


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_hand_written_algorithms_are_counted_by_their_messages(algorithm: str) -> None:
    found = ledger_of(model(), "ddp", data=4, grad_sync=jaxdist.GradSync(algorithm))
    hops = [each for each in found.collectives if each.op == "ppermute"]
    assert hops and {each.purpose for each in hops} == {"gradients"}
    if algorithm == "ring":
        units = unit_bytes(model())
        whole = units["embed"] + units["blocks"] + units["head"]
        assert sum(each.wire_bytes for each in hops) == 2 * 3 / 4 * whole


def test_a_loop_of_unknown_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = MLP.__call__

    def patched(self: Any, x: Any) -> Any:
        x = plain(self, x)
        return jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: x + psum(x, "tensor"), jax.lax.stop_gradient(x))

    monkeypatch.setattr(MLP, "__call__", patched)
    with pytest.raises(UserError, match=r"test_ledger.py:\d+ communicates, and its length is not in the program"):
        ledger_of(model(), "ddp", tensor=2)


def test_a_hand_made_psum_is_over_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", planned=True)
    allowed = read_budget(ROOT / "configs" / "budgets" / "quickstart.json")
    assert over_budget(explain(config).ledger, allowed) == []
    plain = MLP.__call__

    def patched(self: Any, x: Any) -> Any:
        return plain(self, x) + 0 * psum(x, ("data", "fsdp"))

    monkeypatch.setattr(MLP, "__call__", patched)
    lines = over_budget(explain(config).ledger, allowed)
    rows, nbytes = 32 // 4, 32 // 4 * 128 * 128 * 4 * 4  # of one device; four blocks
    assert rows == 8 and len(lines) >= 1
    texts = "test_ledger.py:", f"{nbytes:,} bytes a step, not in the budget", "activations of blocks.mlp (forward)"
    assert any(all(text in line for text in texts) for line in lines), lines
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UserError, match="not a budget"):
        read_budget(tmp_path / "broken.json")


@pytest.mark.parametrize("name", [path.stem for path in (ROOT / "configs").glob("*.yaml")])
def test_shipped_configurations_stay_in_their_budgets(name: str) -> None:
    found = explain(load_config(ROOT / "configs" / f"{name}.yaml", planned=True)).ledger
    allowed = read_budget(ROOT / "configs" / "budgets" / f"{name}.json")
    assert over_budget(found, allowed) == [], f"scripts/explain.py --config configs/{name}.yaml --write-budget ..."


def test_state_of_a_large_model_is_twelve_bytes_a_parameter() -> None:
    """7.5 billion parameters on 64 devices, as in the ZeRO paper's figure 1 (theirs are in mixed precision)."""
    config = ModelConfig(style="gpt2", layers=36, width=4096, heads=32, vocab=50304)
    definition, mesh, tx = gpt(config, max_length=1024), abstract_mesh(fsdp=64), optax.adamw(1e-3)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(definition.shapes))
    assert 7.3e9 < count < 7.7e9
    for strategy, shards in (("ddp", 1), ("zero1", 64), ("zero2", 64), ("zero3", 64)):
        target = state_target(definition, tx, mesh, strategy=strategy)
        rows = sharding_rows(target.params, specs_of_arrays(target.params), mesh)
        assert sum(row.bytes_per_device for row in rows) == 4 * count // shards
        moments = sharding_rows(target.opt_state, specs_of_arrays(target.opt_state), mesh)
        assert sum(row.bytes_per_device for row in moments if row.shape) == 8 * count // shards


def test_the_table_is_what_devices_hold() -> None:
    mesh, tx = make_mesh(data=2, fsdp=2, tensor=2), optax.sgd(0.1)
    state = jaxdist.init_state(model("gpt2"), tx, mesh, strategy="zero3")
    text = jaxdist.sharding_table(state.params, specs_of_arrays(state.params), mesh)
    rows = sharding_rows(state.params, specs_of_arrays(state.params), mesh)
    for row, leaf in zip(rows, jax.tree.leaves(state.params), strict=True):
        assert row.shard == leaf.addressable_shards[0].data.shape
        assert row.bytes_per_device == leaf.addressable_shards[0].data.nbytes
        assert row.copies == sum(shard.index == leaf.addressable_shards[0].index for shard in leaf.addressable_shards)
        assert row.path in text
    assert f"{sum(row.bytes_per_device for row in rows):,}" in text


def test_explain_answers_for_a_thousand_devices(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "explain.py"), "--config", "configs/llama_8b_fsdp.yaml"]
    done = subprocess.run([*command, "--json", tmp_path / "out.json", "--plot", tmp_path / "out.png", "--parameters"],
                          cwd=ROOT, capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert set(found["collectives"][0]) >= {
        "op", "axes", "group_size", "dtype", "bytes_per_call", "calls", "wire_bytes", "source",
    }  # fmt: skip
    assert {each["op"] for each in found["collectives"]} == {"psum", "all_gather", "reduce_scatter"}
    assert found["mesh"]["data"] * found["mesh"]["fsdp"] == 1024
    assert sum(each["bytes_per_device"] for each in found["parameters"]) == found["memory"]["parameters"]
    assert (tmp_path / "out.png").stat().st_size > 10_000
    assert "A device sends" in done.stdout and "Memory of a device" in done.stdout


def test_readme_shows_what_is_printed() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme[readme.index("$ python scripts/explain.py") :].partition("```")[0].splitlines()
    command = shown[0].removeprefix("$ python ").split()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    lines = re.compile(r":\d+$")  # they move with every edit
    assert [lines.sub("", text) for text in done.stdout.splitlines()] == [lines.sub("", text) for text in shown[1:]]


@pytest.mark.parametrize(("arguments", "message"), [
    (["mesh.data=-1"], "mesh.data: -1, but nothing says how many devices"),
    (["mesh.dta=2"], "mesh.dta: unknown key"),
    (["--budget", "nowhere.json"], "--budget nowhere.json: not a budget"),
])  # fmt: skip
def test_explain_refuses_in_one_line(arguments: list[str], message: str) -> None:
    command = [sys.executable, "scripts/explain.py", "--config", "configs/quickstart.yaml", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


def test_memory_of_a_step_is_that_of_the_strategy() -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", ["mesh.tensor=1", "mesh.data=1", "mesh.fsdp=4"],
                         planned=True)  # fmt: skip
    def memory(strategy: str) -> dict[str, int]:
        parallel = replace(config.parallel, strategy=strategy, min_shard_bytes=0)
        return to_json(explain(replace(config, parallel=parallel)))["memory"]

    whole = memory("ddp")["parameters"]
    assert [memory(name)["gradients"] for name in NAMES] == [whole, whole, whole // 4, whole // 4]
    assert [memory(name)["gathered copies, the whole step"] for name in NAMES] == [0, whole, whole, 0]
    only_head = replace(config, optimizer=replace(config.optimizer, freeze=("embed.*", "blocks.*")))
    assert explain(only_head).memory["gradients"] == 2 * 128 * 4  # of a norm that is too small to shard


def test_a_strategy_of_somebody_elses_is_one_file() -> None:
    found = ledger_of(model(), "embedding_only.embedding_only", fsdp=4)
    assert {each.purpose for each in found.collectives if each.op == "all_gather"} == {"embed.tokens.table"}
