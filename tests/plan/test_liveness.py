"""The estimate of temporary memory: small programs by hand, and whole steps beside the compiler's account."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxdist.config.load import load_config
from jaxdist.plan.explain import COMPILED_PEAK, ESTIMATED_PEAK, MEASURED, explain
from jaxdist.plan.report.text import explanation_text
from jaxdist.plan.traced.liveness import peak_bytes

ROOT = Path(__file__).parents[2]
SIDE = 16
ARRAY = SIDE * SIDE * 4  # bytes of a square


def arrays_of(function: Any, *shapes: tuple[int, ...]) -> float:
    """The peak of a program, in squares."""
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes or [(SIDE, SIDE)]]
    jaxpr = jax.make_jaxpr(function)(*given)
    return peak_bytes(jaxpr, [leaf.size * 4 for leaf in given]) / ARRAY


def product_of_sum(x: Any) -> Any:
    return (x + 1) @ (x * 2) @ x  # both operands, then the product in between


def one_after_the_other(x: Any) -> Any:
    for _ in range(5):
        x = x @ x
    return x


def all_kept(x: Any) -> Any:
    made = [x]
    for _ in range(3):
        made.append(made[-1] @ x)
    return made[1] @ made[2] @ made[3]


def two_readers(x: Any) -> Any:
    wave = jnp.tanh(x)  # not computed twice
    return (wave @ x) + wave


def one_reader(x: Any) -> Any:
    return jnp.tanh(x) + 1 + x


def in_rounds(x: Any) -> Any:
    return lax.scan(lambda h, _: (h @ x, h), x, None, length=6)[
        1
    ].sum()  # six rows and the carry; the next before its copy


def in_place(x: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda a: lax.dynamic_update_slice(a, a[:1] * 2, (0, 0)), lambda a: a, x @ x).sum()


def worst_branch(x: Any) -> Any:
    return lax.cond(x[0, 0] > 0, one_after_the_other, all_kept, x)


@pytest.mark.parametrize(
    ("function", "squares"),
    [
        (product_of_sum, 3),
        (one_after_the_other, 2),
        (all_kept, 4),
        (two_readers, 2),
        (one_reader, 0),
        (in_rounds, 8),
        (in_place, 1),
        (worst_branch, 4),
    ],
)
def test_the_largest_sum_of_arrays(function: Any, squares: float) -> None:
    assert arrays_of(function) == pytest.approx(squares, abs=0.1)


def test_a_call_is_no_place_of_its_own() -> None:
    assert arrays_of(jax.jit(all_kept)) == arrays_of(all_kept) == arrays_of(jax.checkpoint(all_kept))


def test_the_host_is_no_memory_of_the_device() -> None:
    space = jax.memory.Space

    def away(x: Any) -> Any:
        far = jax.device_put(x @ x, space.Host)
        rest = all_kept(x).sum()
        return rest + (jax.device_put(far, space.Device) @ x).sum()

    assert arrays_of(away) == pytest.approx(4, abs=0.1)  # 5, if it stayed
    fetched = lambda x: (jax.device_put(jax.device_put(x, space.Host), space.Device) + 1) @ x  # noqa: E731
    assert arrays_of(fetched) == pytest.approx(1, abs=0.1)  # the sum in place of what is fetched


SMALL = ("model.layers=2", "model.width=32", "model.vocab=256", "data.seq_len=32", "optimizer.name=adamw")
PIPES = ("mesh.pipe=2", "mesh.data=2", "mesh.fsdp=1", "mesh.tensor=2", "parallel.microbatches=4")
CASES = {
    "tiny": SMALL,
    "without a mesh": (*SMALL, "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1"),
    "zero3 of several blocks": ("model.layers=8", "optimizer.name=lion", "parallel.min_shard_bytes=0"),
    "full remat": ("memory.remat=full", "optimizer.name=adamw"),
    "gpipe": (*PIPES, "parallel.schedule=gpipe", "parallel.strategy=ddp", "optimizer.name=sgd"),
    "interleaved": (*PIPES, "parallel.schedule=interleaved", "parallel.chunks=2", "memory.remat=dots"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.slow] * (name != "tiny")) for name in CASES])
def test_the_estimate_is_near_what_is_compiled(case: str) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", CASES[case], planned=True)
    compiled = explain(config, compiled=True).memory[COMPILED_PEAK]
    assert 0.8 < compiled / explain(config).memory[ESTIMATED_PEAK] < 1.3


def test_the_table_says_what_is_not_in_it() -> None:
    """By the configurations that were measured."""
    data = json.loads((ROOT / "docs" / "measurements" / "explain_memory_cpu.json").read_text())
    assert data["summary"]["configurations"] == len(data["configurations"]) == 50
    assert tuple(round(data["summary"][name], 2) for name in ("tenth", "median", "ninetieth")) == MEASURED
    found = explain(load_config(ROOT / "configs" / "quickstart.yaml", SMALL, planned=True))
    missing = [size for name, size in found.memory.items() if name.startswith("not in this table")]
    assert missing == [round((MEASURED[-1] - 1) * found.memory[ESTIMATED_PEAK])]
    text = explanation_text(found)
    assert f"{MEASURED[0]:.2f} to {MEASURED[-1]:.2f} times the estimate" in text


@pytest.mark.slow
def test_a_loss_holds_at_least_what_it_keeps_for_the_backward_pass() -> None:
    """Its arrays are not taken to be computed again from the other pass; and no figure of GPTs stands beside it."""
    wide = ("model.blocks=[2]", "model.image_size=16", "mesh.fsdp=1")
    found = explain(load_config(ROOT / "configs" / "resnet_digits.yaml", wide, planned=True))
    memory, kept = found.memory, sum(size for name, size in found.memory.items() if "kept for backward" in name)
    held = sum(memory[name] for name in ("parameters", "optimizer state", "batch"))
    assert memory[ESTIMATED_PEAK] >= held + kept > 10 * held
    text = explanation_text(found)
    assert (
        "a lower bound, not measured" in text and "times the estimate" not in text and "not in this table" not in text
    )
