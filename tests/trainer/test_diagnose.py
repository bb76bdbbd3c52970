"""A step that is not finite changes nothing, on no device, and is found by block, device, microbatch and pass."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from levels import levels, others_slow
from pages import on_page
from poisoned import GRADIENT, LEAF, OUTPUT, poisoned

from jaxdist import init_state, make_mesh, make_train_step
from jaxdist.config.schema import ModelConfig
from jaxdist.mesh import AXES, batch_shards
from jaxdist.models.gpt import gpt
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.pipeline.stages import arrange
from jaxdist.precision.policy import Precision
from jaxdist.specs import STACKED, batch_spec
from jaxdist.state import TrainState, shardings_of
from jaxdist.trainer.failures.diagnose import Finding, make_diagnosis

CONFIG = ModelConfig(layers=4, width=32, heads=4, vocab=64)
LENGTH = 8
EVERYDAY = {"data": 2, "fsdp": 2, "tensor": 2}


@dataclasses.dataclass
class Bench:
    """A model that can be poisoned, its step and what looks into it, all compiled once."""

    mesh: Any
    step: Any
    diagnose: Any
    make: Any
    batch: Any


def bench(
    sizes: dict[str, int], *, strategy: str, schedule: str, microbatches: int, build: Any = poisoned, **options: Any
) -> Bench:
    mesh, tx, arrangement = make_mesh(**sizes), optax.adamw(1e-3), options.pop("arrangement", {})
    model = build(dataclasses.replace(CONFIG, **options.pop("model", {})), max_length=LENGTH)
    model = arrange(model, stages=mesh.shape["pipe"], **arrangement)
    chosen = StepOptions(strategy=strategy, schedule=schedule, microbatches=microbatches, **options)
    step = make_train_step(model, tx, mesh, chosen)
    rows = batch_shards(mesh) * microbatches * 2
    draw = np.random.default_rng(0)
    grid = {name: draw.integers(0, 63, (rows, LENGTH), dtype=np.int32) for name in ("inputs", "targets")}
    batch = put({**grid, "weights": np.ones((rows, LENGTH), np.float32)}, mesh)
    first = init_state(model, tx, mesh, strategy=strategy)
    copy = jax.jit(lambda state: jax.tree.map(jnp.copy, state), out_shardings=shardings_of(first))
    return Bench(mesh, step, make_diagnosis(model, mesh, options=chosen), lambda: copy(first), batch)


def put(batch: dict[str, np.ndarray], mesh: Any) -> dict[str, jax.Array]:
    return {name: jax.device_put(x, NamedSharding(mesh, batch_spec(mesh))) for name, x in batch.items()}


def with_poison(state: TrainState, unit: str, kind: int, device: int, block: int = 0) -> TrainState:
    """A copy of the state in which one unit is poisoned for one device."""
    params = jax.tree.map(lambda leaf: leaf, state.params)
    leaf = np.array(params[unit]["poison"])
    leaf[(block, ...) if unit == STACKED else ...] = (kind, device)
    params[unit] = {**params[unit], "poison": jax.device_put(leaf, state.params[unit]["poison"].sharding)}
    return state._replace(params=params)


def words(tree: Any) -> list[bytes]:
    """Every byte on every device."""
    return [np.asarray(shard.data).tobytes() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]


def place(mesh: Any, device: int) -> dict[str, int]:
    found = np.unravel_index(device, [mesh.shape[axis] for axis in AXES])
    return {axis: int(n) for axis, n in zip(AXES, found, strict=True) if mesh.shape[axis] > 1}


SHARED = pytest.mark.xdist_group("forensics")  # one compiled step


@pytest.fixture(scope="module")
def everyday() -> Bench:
    return bench(EVERYDAY, strategy="zero3", schedule="accumulate", microbatches=2)


def trial(bench: Bench, unit: str, kind: int, device: int, block: int) -> Finding:
    """Poison, run, compare every byte, look into it."""
    state = with_poison(bench.make(), unit, kind, device, block)
    before = words((state.params, state.opt_state))
    after, metrics = bench.step(state, bench.batch)
    assert words((after.params, after.opt_state)) == before
    assert (int(after.step), int(after.guard.skipped), int(after.guard.in_a_row)) == (1, 1, 1)
    seen = math.isfinite(metrics["loss"]), math.isfinite(metrics["grad_norm"])
    assert not all(seen) and int(metrics["skipped_in_a_row"]) == 1
    found = bench.diagnose(after, bench.batch)
    kinds = {OUTPUT: "loss" if unit == "head" else "activation", GRADIENT: "gradient"}
    assert found is not None
    assert (found.kind, found.unit, found.block) == (kinds[kind], unit, block if unit == STACKED else None), str(found)
    assert found.microbatch == 0  # all of them: the first is named
    one = place(bench.mesh, device)
    spread = unit != STACKED or kind == OUTPUT  # what is the same on all of tensor goes wrong on all of it
    wanted = [one | {"tensor": n} for n in range(bench.mesh.shape["tensor"])] if spread and "tensor" in one else [one]
    assert sorted(map(str, found.devices)) == sorted(map(str, wanted)), str(found)
    if kind == GRADIENT:
        assert found.parameter == ".".join((unit, *LEAF[unit]))
        assert found.parameter in str(found)
        if unit == STACKED:
            shown = {r"block \d": "block 1", r"gradient: \S+;": "gradient: blocks.mlp.up.kernel;"}
            on_page("docs/precision.md", f"found: {found}", shown | {r"\(.*\)": "(data=1 fsdp=0 tensor=1)"})
    return found


# Every device of the mesh once and more, every block, every unit and kind.
PLACES = [
    *[(STACKED, GRADIENT, device, device % 4) for device in range(8)],
    *[(STACKED, OUTPUT, device, 3 - device % 4) for device in (0, 2, 5, 7)],
    *[("embed", OUTPUT, 3, 0), ("embed", OUTPUT, 6, 0), ("embed", GRADIENT, 1, 0), ("embed", GRADIENT, 4, 0)],
    *[("head", OUTPUT, 0, 0), ("head", OUTPUT, 7, 0), ("head", GRADIENT, 2, 0), ("head", GRADIENT, 5, 0)],
]


@pytest.mark.slow
@SHARED
@pytest.mark.parametrize(("unit", "kind", "device", "block"), PLACES)
def test_what_is_not_finite_is_skipped_and_named(
    everyday: Bench, unit: str, kind: int, device: int, block: int
) -> None:
    assert trial(everyday, unit, kind, device, block).unit == unit


@pytest.mark.slow
@SHARED
def test_a_good_step_is_not_looked_into(everyday: Bench) -> None:
    state, metrics = everyday.step(everyday.make(), everyday.batch)
    assert (int(state.guard.skipped), int(metrics["skipped_in_a_row"])) == (0, 0)
    assert everyday.diagnose(state, everyday.batch) is None


@pytest.mark.slow
@SHARED
def test_the_microbatch_is_named(everyday: Bench) -> None:
    check_a_token(everyday)


@pytest.mark.parametrize("style", levels(["gpt2", "llama"], slow=2))
def test_with_prefetching(style: str) -> None:
    """Where the embedding is looked up by columns, of all devices' tokens; the probes' model is not."""
    sizes = {"data": 2, "fsdp": 2}
    ahead = bench(
        sizes, strategy="zero3", schedule="accumulate", microbatches=2, build=gpt, prefetch=1, model={"style": style}
    )
    check_a_block(ahead)
    if style == "gpt2":  # an RMSNorm of an infinite deviation is zero, and so is its gradient
        check_a_token(ahead)


def check_a_block(everyday: Bench) -> None:
    """A block whose output overflows, on every device."""
    state = everyday.make()
    down = state.params[STACKED]["mlp"]["down"]
    kernel = np.array(down["kernel"])
    kernel[2] = 3e38
    mlp = {**state.params[STACKED]["mlp"], "down": {**down, "kernel": jax.device_put(kernel, down["kernel"].sharding)}}
    state = state._replace(params={**state.params, STACKED: {**state.params[STACKED], "mlp": mlp}})
    state, _ = everyday.step(state, everyday.batch)
    assert int(state.guard.skipped) == 1
    found = everyday.diagnose(state, everyday.batch)
    assert found is not None and (found.kind, found.block, found.microbatch) == ("activation", 2, 0), str(found)
    assert len(found.devices) == everyday.mesh.size


def check_a_token(everyday: Bench) -> None:
    """A token whose row of the table is so large that its variance overflows, in one microbatch of one device."""
    state = everyday.make()
    table = np.array(state.params["embed"]["tokens"]["table"])
    table[63] = 1e30 * (-1.0) ** np.arange(table.shape[1])
    embed = {
        **state.params["embed"],
        "tokens": {"table": jax.device_put(table, state.params["embed"]["tokens"]["table"].sharding)},
    }
    state = state._replace(params={**state.params, "embed": embed})
    rows = {name: np.array(x) for name, x in everyday.batch.items()}
    rows["inputs"][4 * 2 + 3, 5] = 63  # device data=1 fsdp=0 has rows 8 to 11, its microbatch 1 rows 10 and 11
    batch = put(rows, everyday.mesh)
    state, _ = everyday.step(state, batch)
    assert int(state.guard.skipped) == 1
    found = everyday.diagnose(state, batch)
    # A norm divides by its infinite deviation: finite forward, not backward. The first such one backward is the head's.
    assert found is not None and (found.kind, found.unit, found.microbatch) == ("gradient", "head", 1)
    assert {(each["data"], each["fsdp"]) for each in found.devices} == {(1, 0)}


@pytest.mark.slow
@SHARED
def test_a_parameter_that_was_not_finite_before(everyday: Bench) -> None:
    check_a_scale(everyday, row=2, block=2)


def check_a_scale(bench: Bench, *, row: int, block: int) -> None:
    """A NaN in a row of a stacked parameter, which is found as one of this block."""
    state = bench.make()
    before = state.params["blocks"]["norm2"]
    scale = np.array(before["scale"])
    scale[row, 3] = np.nan
    norm = {**before, "scale": jax.device_put(scale, before["scale"].sharding)}
    state = state._replace(params={**state.params, "blocks": {**state.params["blocks"], "norm2": norm}})
    state, _ = bench.step(state, bench.batch)
    found = bench.diagnose(state, bench.batch)
    assert found is not None
    assert (found.kind, found.block, found.parameter) == ("parameter", block, "blocks.norm2.scale")


ARRANGED = [("interleaved", {"chunks": 2}, 1, 2), ("one_f_one_b", {"blocks": (1, 3)}, 3, 1)]


@pytest.mark.parametrize(("schedule", "arrangement", "row", "block"), others_slow(ARRANGED, ARRANGED[0]))
def test_blocks_of_a_pipeline_have_their_numbers(
    schedule: str, arrangement: dict[str, Any], row: int, block: int
) -> None:
    other = bench({"pipe": 2}, strategy="ddp", schedule=schedule, microbatches=2, build=gpt, arrangement=arrangement)
    check_a_scale(other, row=row, block=block)


OTHERS = [
    ({"pipe": 2, "data": 2, "tensor": 2}, "ddp", "one_f_one_b", {}),
    ({"pipe": 4, "fsdp": 2}, "zero2", "zero_bubble", {"model": {"style": "llama"}}),
    ({"data": 4, "tensor": 2}, "zero1", "accumulate", {"remat": "full"}),
    (
        {"data": 2, "fsdp": 4},
        "zero3",
        "accumulate",
        {"precision": Precision(np.float32, jax.numpy.float16, np.float32, loss_scale="dynamic")},
    ),
]


@pytest.mark.parametrize(("sizes", "strategy", "schedule", "options"), levels(OTHERS, slow=4))
def test_in_other_layouts(sizes: dict[str, int], strategy: str, schedule: str, options: dict[str, Any]) -> None:
    other = bench(sizes, strategy=strategy, schedule=schedule, microbatches=2, **options)
    stages = other.mesh.shape["pipe"]
    for unit, kind, device, block in PLACES:
        # Only the stage that has a unit computes it.
        own = {"embed": 0, "head": stages - 1, STACKED: block * stages // 4}[unit]
        assert trial(other, unit, kind, own * 8 // stages + device % (8 // stages), block).unit == unit
