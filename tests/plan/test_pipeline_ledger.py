"""What the ledger and `scripts/explain.py` say of pipelines: sends to the byte, and what they are for."""

import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from batches import token_shapes
from jax.sharding import NamedSharding, PartitionSpec
from levels import levels, others_slow

from jaxdist import make_mesh, make_train_step, registry, state_target
from jaxdist.collectives import psum, to_varying
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config, ModelConfig
from jaxdist.errors import UserError
from jaxdist.jaxpr.evaluate import without_dead_code
from jaxdist.mesh import abstract_mesh
from jaxdist.models.gpt import gpt
from jaxdist.parallel.pipeline.stages import arrange
from jaxdist.parallel.pipeline.table import SCHEDULES, Ticks, allocate_slots
from jaxdist.plan.compiled.hlo import compare, compiled_collectives
from jaxdist.plan.explain import ESTIMATED_PEAK, ESTIMATED_TEMPORARY, NOT_HERE, explain
from jaxdist.plan.report.pipeline import configured_ticks, described, show_pipeline
from jaxdist.plan.report.text import explanation_text
from jaxdist.plan.traced.ledger import BETWEEN, INSIDE, Ledger, collectives_of, hosts_of, ledger, pytorch_term
from jaxdist.specs import BATCH_SPEC

ROOT = Path(__file__).parents[2]
MODULES = {name: importlib.import_module(f"{SCHEDULES}.{name}") for name in registry.names(SCHEDULES)}
NAMES = [name for name, module in MODULES.items() if hasattr(module, "table") and hasattr(module, name)]
LAYERS, WIDTH, VOCAB, LENGTH, ROWS = 4, 32, 64, 8, 96
LOSS = 2 * 4  # bytes: loss and weight, together
TO_NEXT, TO_BEFORE = ("forward", "activations to the next stage"), ("backward", "gradients to the stage before")


def model(*, tied: bool = False, layers: int = LAYERS) -> Any:
    config = ModelConfig(style="llama", layers=layers, width=WIDTH, heads=4, vocab=VOCAB, mlp_width=64, tied=tied)
    return gpt(config, max_length=LENGTH)


def ledger_of(
    schedule: str,
    *,
    strategy: str = "ddp",
    tied: bool = False,
    microbatches: int,
    precision: str = "fp32",
    **sizes: int,
) -> Ledger:
    """On a mesh of these sizes, without devices."""
    mesh, tx, definition = abstract_mesh(**sizes), optax.adamw(1e-3), model(tied=tied)
    step = make_train_step(
        definition, tx, mesh, strategy=strategy, schedule=schedule, microbatches=microbatches, precision=precision
    )
    return ledger(step, state_target(definition, tx, mesh, strategy=strategy), token_shapes(ROWS))


def table(schedule: str, stages: int, microbatches: int) -> Ticks:
    made: Ticks = MODULES[schedule].table(stages, microbatches)
    return made


def unit_bytes(definition: Any, *names: str) -> int:
    """Bytes of these units in fp32."""
    return sum(4 * math.prod(leaf.shape) for name in names for leaf in jax.tree.leaves(definition.shapes[name]))


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "tied"),
    levels(
        (
            (name, *sizes, tied)
            for name in NAMES
            for sizes in ((2, 1), (2, 6), (4, 2), (4, 8))
            for tied in (False, True)
        ),
        everyday=24,
    ),
)
def test_every_tick_sends_one_microbatch_each_way(schedule: str, stages: int, microbatches: int, tied: bool) -> None:
    """But for the last stage, which sends nothing on, and the first, which sends nothing back. And once a step
    embedding and head are gathered from the stages and their gradients scattered, and the loss is summed; nothing else.
    """
    found = ledger_of(schedule, pipe=stages, microbatches=microbatches, tied=tied)
    ticks = table(schedule, stages, microbatches).length
    h = ROWS // microbatches * LENGTH * WIDTH * 4
    sends = [each for each in found.collectives if each.op == "ppermute"]
    assert [(each.phase, each.purpose) for each in sends] == [TO_NEXT, TO_BEFORE]
    for each in sends:
        assert (each.axes, each.group_size, each.conditional) == (("pipe",), stages, False)
        assert (each.bytes_per_call, each.calls, each.wire_bytes) == (h, ticks, ticks * h)
        some = (ticks,) * (stages - 1)
        assert each.stages == ((*some, 0) if each.phase == "forward" else (0, *some))
        assert each.used == microbatches
        assert each.source.startswith("jaxdist/parallel/pipeline/relay.py:") and pytorch_term(each) == "point to point"
    others, spread = (stages - 1) / stages, unit_bytes(model(tied=tied), "embed", "head")
    assert found.total("op") == pytest.approx(
        {
            "ppermute": (1 if stages == 2 else 2) * ticks * h,
            "all_gather": others * spread,
            "reduce_scatter": others * spread,
            "psum": 2 * others * LOSS,
        },
        rel=1e-12,
    )


@pytest.mark.parametrize("schedule", others_slow(NAMES, "gpipe"))
def test_a_microbatch_is_that_of_a_device_in_the_policys_type(schedule: str) -> None:
    found = ledger_of(schedule, strategy="zero3", pipe=2, data=2, fsdp=4, tensor=2, microbatches=3, precision="bf16")
    sends = [each for each in found.collectives if each.op == "ppermute"]
    h = ROWS // (2 * 4 * 3) * LENGTH * WIDTH * 2  # whole over tensor
    assert [(each.bytes_per_call, each.dtype) for each in sends] == [(h, "bfloat16")] * 2
    assert [each.calls for each in sends] == [table(schedule, 2, 3).length] * 2
    # 32 devices, 8 on a host: 16 on a stage.
    assert {each.axes: each.link for each in found.collectives if len(each.axes) == 1} == {
        ("pipe",): BETWEEN,
        ("data",): BETWEEN,
        ("fsdp",): INSIDE,
        ("tensor",): INSIDE,
    }


@pytest.mark.slow
@pytest.mark.parametrize("schedule", others_slow(NAMES, "one_f_one_b"))
def test_what_happens_in_ticks_does_not_happen_once(schedule: str) -> None:
    found = ledger_of(schedule, strategy="zero3", tied=True, pipe=2, fsdp=2, tensor=2, microbatches=4)
    once = [each for each in found.collectives if each.phase == "once a step"]
    spread = {"embed.tokens.table", "head.norm.scale"}
    assert {each.purpose for each in once} == spread | {f"gradient of {name}" for name in spread} | {"loss_and_weight"}
    assert {each.stages for each in once} == {(1, 1)}
    ticks = table(schedule, 2, 4).length
    assert all(each.at_most % ticks == 0 for each in found.collectives if each.phase != "once a step")
    purposes = {(each.phase, each.purpose) for each in found.collectives}
    assert {
        ("forward", "activations of embed"),
        ("forward", "activations of blocks.mlp"),
        ("forward", "blocks.mlp.up.kernel"),
        ("recompute", "blocks.mlp.up.kernel"),
        ("backward", "gradient of blocks.mlp.up.kernel"),
        ("backward", "gradients of activations of blocks.mlp"),
    } <= purposes
    assert not any("pipeline" in each.purpose for each in found.collectives)


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "chunks"),
    others_slow([*((name, 4, 6, 1) for name in NAMES), ("interleaved", 2, 4, 2)], ("zero_bubble", 4, 6, 1)),
)
def test_what_stands_in_a_branch_is_counted_as_often_as_it_is_taken(
    schedule: str, stages: int, microbatches: int, chunks: int
) -> None:
    """Collectives of a block: once a microbatch and block on every stage; of embedding and head on one stage."""
    sizes = {"pipe": stages, "fsdp": 2, "tensor": 2}
    mesh, tx = abstract_mesh(**sizes), optax.adamw(1e-3)
    definition = arrange(model(layers=8), stages=stages, chunks=chunks)
    step = make_train_step(definition, tx, mesh, strategy="zero3", schedule=schedule, microbatches=microbatches)
    rows = token_shapes(microbatches * 2)
    found = ledger(step, state_target(definition, tx, mesh, strategy="zero3"), rows)
    inside = [each for each in found.collectives if each.phase != "once a step" and each.op != "ppermute"]
    assert len(inside) > 20 and not any(each.conditional for each in inside)
    for each in inside:
        unit = each.purpose.rpartition(" ")[2].partition(".")[0]
        if unit == "blocks":
            assert each.stages == (8 // stages * microbatches,) * stages, each
        else:
            first, last = (microbatches * (unit == wanted) for wanted in ("embed", "head"))
            assert each.stages == (first, *[0] * (stages - 2), last), each
        assert each.calls == max(each.stages) < each.at_most


def test_what_depends_on_data_counts_as_the_branch_that_sends_most() -> None:
    mesh = make_mesh(data=2)

    def summed(x: jax.Array, times: int) -> jax.Array:
        for _ in range(times):
            x = to_varying(psum(x, "data"), ("data",))
        return x

    def body(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0] > 0, lambda: summed(x, 1), lambda: summed(x, 2))

    f = jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
    [each] = collectives_of(jax.make_jaxpr(f)(np.zeros(8, np.float32)), mesh, hosts_of(mesh, 8), set())
    assert (each.calls, each.stages, each.at_most, each.conditional) == (2, (2,), 2, True)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", levels(reversed(NAMES), everyday=4))
def test_the_compiled_program_sends_as_much(schedule: str) -> None:
    mesh, tx, definition = make_mesh(pipe=4, data=2), optax.sgd(1e-3), model()
    step = make_train_step(definition, tx, mesh, schedule=schedule, microbatches=4)
    data = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, BATCH_SPEC))
        for name, leaf in token_shapes(ROWS).items()
    }
    state = state_target(definition, tx, mesh)
    compiled = compiled_collectives(step.lower(state, data).compile().as_text())
    found = compare(ledger(step, state, data), compiled)
    assert found.keys() == {"ppermute", "psum", "all_gather", "reduce_scatter"}
    assert all(each.agrees for each in found.values())
    assert found["ppermute"].compiled_calls == 2 * table(schedule, 4, 4).length


def configured(*overrides: str) -> Config:
    """The quickstart on a pipeline of 4 stages and 8 microbatches, unless overridden."""
    usual = ("mesh.pipe=4", "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "parallel.microbatches=8")
    return load_config(ROOT / "configs" / "quickstart.yaml", [*usual, *overrides], planned=True)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", levels(["gpipe", "one_f_one_b", "zero_bubble"], everyday=3))
def test_a_pipeline_lists_its_slots_and_buffers(schedule: str) -> None:
    """With full remat: inputs of blocks, for each microbatch in flight; what arrives from both sides; and, from B to W,
    more. To the byte, but for the keys of random numbers."""
    found = explain(configured(f"parallel.schedule={schedule}", "memory.remat=full"))
    slots, one = allocate_slots(table(schedule, 4, 8)), 32 // 8 * 128 * 128 * 4  # a microbatch between two blocks
    kinds = dict.fromkeys(("residuals of blocks", "from B to W", "gradient of the head", "received from"), 0)
    for each in found.activations:
        kinds[next(kind for kind in kinds if each.what.startswith(kind))] += each.bytes_per_device
    keys = slots.residuals.size * 32 // 8 * 8
    assert slots.residuals.size * one <= kinds["residuals of blocks"] <= slots.residuals.size * one + keys
    assert kinds["received from"] == 2 * one == found.memory["buffers between stages"]
    assert kinds["gradient of the head"] == one * (slots.residuals.size if slots.late_loss else 1)
    assert (kinds["from B to W"] > 0) == bool(slots.cotangents.size)
    total = sum(kinds.values()) - 2 * one
    assert found.memory["activations, kept for backward"] == total < found.memory[ESTIMATED_PEAK]
    text = explanation_text(found, rows=0, activations=True)
    assert "Kept for the backward passes of all microbatches that a stage has begun" in text


@pytest.mark.slow
def test_a_pipeline_of_one_stage_has_its_slots() -> None:
    alone = explain(configured("parallel.schedule=gpipe", "mesh.pipe=1"))
    assert alone.activations and not [each for each in alone.ledger.collectives if each.op == "ppermute"]


@pytest.mark.slow
def test_a_timeline_is_that_of_the_configuration(tmp_path: Path) -> None:
    config = configured("parallel.schedule=one_f_one_b")
    ticks = configured_ticks(config)
    assert (ticks.stages, ticks.microbatches, ticks.chunks, ticks.length) == (4, 8, 1, 14)
    text = show_pipeline(config, ticks, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
    for part in (
        "one_f_one_b: 4 stages, 8 microbatches\n14 ticks",
        "bubble 27.3 %",
        "stage 3  F ",
        "one a tick",
        "up to 7 microbatches, the first 7, the last 1",
        "once forward and once back: 8 of the",
    ):
        assert part in text
    large = replace(config, mesh=replace(config.mesh, pipe=512))  # no device is needed
    ticks = configured_ticks(large)
    assert ticks.length == 8 + 2 * 512 - 2 and "stage 3" not in described(ticks, name="a")


@pytest.mark.slow
def test_a_microbatch_goes_round_once_a_chunk() -> None:
    config = configured("parallel.schedule=interleaved", "parallel.chunks=2", "mesh.pipe=2")
    ticks = configured_ticks(config)
    assert (ticks.chunks, ticks.length) == (2, 8 * 2 + 2 * 2 + 2 - 2)
    sends = [each for each in explain(config).ledger.collectives if each.op == "ppermute"]
    assert [(each.purpose, each.calls, each.used) for each in sends] == [(TO_NEXT[1], 20, 16), (TO_BEFORE[1], 20, 16)]
    assert "activations to the next stage, 16 of 20 used" in explanation_text(explain(config))


def test_chunks_and_split_backward_passes_are_described() -> None:
    text = described(MODULES["interleaved"].table(4, 8, 2), name="interleaved")
    for part in (
        "8 microbatches, 2 chunks a stage",
        "F in 16 of them and B in 16",
        "bubble 15.8 %, if all stages are",
        "up to 11 chunks of microbatches",
        "2 times forward and 2 times back: 16 of the 26",
    ):
        assert part in text
    text = described(MODULES["zero_bubble"].table(4, 8), name="zero_bubble")
    assert "bubble 11.1 %" in text and "F, B and W cost the same" in text and "what up to 6 B leave for W" in text


@pytest.mark.slow
def test_uneven_stages_are_described(tmp_path: Path) -> None:
    """The state to the byte, with the rows that hold no block; equal sizes as without."""
    uneven = configured("parallel.schedule=gpipe", "model.layers=6", "parallel.stages=[1,2,2,1]")
    text = show_pipeline(uneven, configured_ticks(uneven), tmp_path / "a.svg")
    assert "if a stage takes the time of its blocks, 1, 2, 2, 1, and B costs two F" in text
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "stages 4 (1 + 2 + 2 + 1 blocks)" in drawn
    found, full = explain(uneven), explain(configured("parallel.schedule=gpipe", "model.layers=8"))
    for name in found.memory.keys() - {
        ESTIMATED_TEMPORARY,
        ESTIMATED_PEAK,
        NOT_HERE,
    }:  # it takes memory to tell rows apart
        assert found.memory[name] == full.memory[name]
    assert found.memory.keys() == full.memory.keys() and (found.empty_rows, full.empty_rows) == (2, 0)
    note = "parallel.stages: 2 rows of every parameter of the blocks hold no block"
    assert note in explanation_text(found) and note not in explanation_text(full)
    equal = configured("parallel.schedule=gpipe", "parallel.stages=[1,1,1,1]")
    assert "if all stages are equally fast" in show_pipeline(equal, configured_ticks(equal), tmp_path / "b.svg")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mesh.pipe=1"], "parallel.schedule: 'accumulate' is no pipeline.*: .*gpipe, .*interleaved, "),
        (["mesh.pipe=1", "parallel.schedule=gpipe"], "mesh.pipe: 1 is one stage"),
        (["mesh.pipe=1", "parallel.schedule=jaxdist.parallel.schedules.accumulate.accumulate"], "is no pipeline"),
    ],
)
def test_what_has_no_timeline_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        configured_ticks(configured(*overrides))
    assert "\n" not in str(caught.value)


def test_a_schedule_of_somebody_elses_may_have_a_table() -> None:
    assert configured_ticks(configured("parallel.schedule=jaxdist.parallel.schedules.gpipe.gpipe")).length == 22


@pytest.mark.slow
@pytest.mark.parametrize("remat", others_slow(["none", "full"], "full"))
def test_an_embedding_is_not_computed_again(remat: str) -> None:
    """Its gradient needs neither the table nor the looked up rows: not in the ledger, not in the program that runs."""
    mesh, tx, definition = abstract_mesh(pipe=2, fsdp=2, tensor=2), optax.adamw(1e-3), model()
    options: dict[str, Any] = {"strategy": "zero3", "schedule": "one_f_one_b", "microbatches": 4, "remat": remat}
    step = make_train_step(definition, tx, mesh, **options)
    target = state_target(definition, tx, mesh, strategy="zero3", min_shard_bytes=0)
    rows = ledger(step, target, token_shapes(ROWS)).collectives
    assert {each.phase for each in rows if each.purpose.endswith("embed")} == {"forward"}
    gathers = {each.phase for each in rows if "table" in each.purpose and each.op == "all_gather"}
    assert gathers == {"once a step", "forward"}
    traced = step.jitted(target).trace(target, token_shapes(ROWS)).jaxpr
    assert len(collectives_of(traced, mesh, hosts_of(mesh, 8), set())) == len(
        collectives_of(without_dead_code(traced), mesh, hosts_of(mesh, 8), set())
    )


def test_a_collective_whose_result_nothing_reads_is_not_counted() -> None:
    """At any depth: in a loop, in a function that is differentiated, beside a result that is read."""

    def body(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        return x * 2, psum(x, "data")

    def region(x: jax.Array) -> jax.Array:
        both = jax.checkpoint(lambda x: (psum(x, "data") ** 2, x * 3))
        return jax.lax.scan(body, x, None, length=3)[0] + jax.grad(lambda x: both(x)[1].sum())(x)

    mesh = abstract_mesh(data=4)
    run = jax.shard_map(region, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
    traced = jax.make_jaxpr(run)(jax.ShapeDtypeStruct((8,), np.float32))
    assert len(collectives_of(traced, mesh, hosts_of(mesh, 8), set())) >= 1
    assert collectives_of(without_dead_code(traced), mesh, hosts_of(mesh, 8), set()) == ()
