"""`GradSync(deterministic=True)`: the same bits on any number of devices, in ddp and zero3, in fp32 and bf16."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from levels import levels

from jaxdist import init_state, make_mesh, make_train_step, state_target
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.errors import UserError
from jaxdist.models.gpt import gpt
from jaxdist.optim import clip_by_ordered_norm, ordered_norm, ordered_sum
from jaxdist.optim.rounding import with_rounded_products
from jaxdist.precision.policy import make_precision
from jaxdist.precision.reproducible import erf_inv, products_rounded, rounded

ROOT = Path(__file__).parents[2]
ROWS, LENGTH, VOCAB, STEPS = 16, 8, 64, 10
DETERMINISTIC = GradSync(deterministic=True)


class Case(NamedTuple):
    strategy: str
    mesh: tuple[int, int, int]  # data, fsdp, tensor
    microbatches: int = 1


CASES = [
    Case("ddp", (8, 1, 1)),
    Case("zero3", (2, 2, 1), 2),
    Case("ddp", (2, 1, 1)),
    Case("zero3", (1, 2, 1)),
    Case("zero3", (2, 4, 1)),
    Case("zero3", (1, 1, 1), 4),
    Case("ddp", (4, 1, 1)),
    Case("ddp", (2, 2, 1), 2),
    Case("ddp", (1, 1, 1), 8),
    Case("zero3", (1, 4, 1), 2),
    Case("zero3", (1, 8, 1)),
    Case("zero3", (2, 2, 1)),
    Case("zero3", (4, 2, 1)),
    Case("zero1", (2, 4, 1)),
    Case("zero1", (1, 4, 1), 2),
    Case("zero2", (2, 2, 1), 2),
]


def model_config(style: str, dropout: float = 0.1) -> ModelConfig:
    return ModelConfig(style=style, layers=2, width=32, heads=4, vocab=VOCAB, mlp_width=64, dropout=dropout)


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "inputs": rng.integers(0, VOCAB, (ROWS, LENGTH), np.int32),
            "targets": rng.integers(0, VOCAB, (ROWS, LENGTH), np.int32),
            "weights": (rng.random((ROWS, LENGTH)) < 0.8).astype(np.float32),
        }
        for _ in range(STEPS)
    ]


def bits(tree: Any) -> np.ndarray:
    """All words of all leaves."""
    return np.concatenate([np.asarray(leaf).ravel().view(np.uint32) for leaf in jax.tree.leaves(tree)])


OPTIMIZERS = {
    "clip and adamw": lambda: optax.chain(clip_by_ordered_norm(1.0), optax.adamw(1e-2)),
    "native clip and adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "adamw": lambda: optax.adamw(1e-2),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "lion": lambda: optax.lion(1e-3, weight_decay=0.1),
}


@functools.cache
def run(
    case: Case, precision: str, style: str, deterministic: bool = True, name: str = "clip and adamw", steps: int = STEPS
) -> tuple[np.ndarray, np.ndarray]:
    """(words of parameters and optimizer state after the last step, words of every loss and gradient norm)."""
    data, fsdp, tensor = case.mesh
    optimizer, mesh = OPTIMIZERS[name](), make_mesh(data=data, fsdp=fsdp, tensor=tensor)
    sync, model = GradSync(deterministic=deterministic), gpt(model_config(style), max_length=LENGTH)
    state = init_state(model, optimizer, mesh, strategy=case.strategy)
    step = make_train_step(
        model,
        optimizer,
        mesh,
        strategy=case.strategy,
        precision=precision,
        microbatches=case.microbatches,
        grad_sync=sync,
    )
    seen = []
    for batch in batches()[:steps]:
        state, metrics = step(state, batch)
        seen.append(np.float32([metrics["loss"], metrics["grad_norm"]]))
    return bits((state.params, state.opt_state)), np.concatenate(seen).view(np.uint32)


pytestmark = pytest.mark.usefixtures("as_users_compile")
ONE = Case("ddp", (1, 1, 1))


def check_same(case: Case, precision: str, style: str) -> None:
    want, got = run(ONE, precision, style), run(case, precision, style)
    assert (got[1] != want[1]).sum() == 0, "losses or gradient norms differ"
    assert (got[0] != want[0]).sum() == 0, "parameters or optimizer state differ"


@pytest.mark.xdist_group("deterministic-fp32")
@pytest.mark.parametrize(
    "case",
    [pytest.param(CASES[0], marks=pytest.mark.slow), pytest.param(CASES[1], marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_same_bits_in_fp32(case: Case) -> None:
    check_same(case, "fp32", "gpt2")


@pytest.mark.slow
@pytest.mark.xdist_group("deterministic-bf16")
def test_same_bits_in_bf16() -> None:
    check_same(CASES[1], "bf16", "llama")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("precision", "style"), [("fp32", "llama"), ("bf16", "gpt2")])
def test_same_bits_in_every_layout(precision: str, style: str) -> None:
    for case in CASES:
        check_same(case, precision, style)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param("momentum", Case("zero3", (1, 8, 1)), marks=pytest.mark.slow),
        pytest.param("lion", Case("ddp", (2, 1, 1)), marks=pytest.mark.exhaustive),
        pytest.param("momentum", Case("ddp", (2, 1, 1)), marks=pytest.mark.exhaustive),
        pytest.param("adamw", Case("zero3", (1, 8, 1)), marks=pytest.mark.exhaustive),
    ],
)
def test_same_bits_with_other_optimizers(name: str, case: Case) -> None:
    """Nothing clips: what divides the gradients by the weight meets the optimizer's sums."""
    want, got = (run(each, "fp32", "gpt2", True, name, 3) for each in (ONE, case))
    assert (got[1] != want[1]).sum() == 0 and (got[0] != want[0]).sum() == 0


@pytest.mark.parametrize("width", levels([24, 32], slow=2))
def test_parameters_start_with_the_same_bits_in_every_layout(width: int) -> None:
    """Shards of 3, 4, 6, 12 and 16 columns: loops that a compiler rounds each in its own way."""
    model = gpt(dataclasses.replace(model_config("gpt2"), width=width), max_length=LENGTH)
    meshes = [make_mesh(), make_mesh(fsdp=2), make_mesh(data=2, fsdp=4), make_mesh(fsdp=8), make_mesh(tensor=4)]
    want, *others = (bits(init_state(model, optax.sgd(1.0), mesh, strategy="zero3").params) for mesh in meshes)
    for got in others:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("columns", [1, 3, 4, 6, 8, 32])
def test_inverse_error_function_is_the_same_bits_in_every_shape(columns: int) -> None:
    x = np.linspace(-1, 1, 96 * 257, dtype=np.float32)
    want = np.asarray(jax.jit(erf_inv)(x))
    np.testing.assert_array_equal(np.asarray(jax.jit(erf_inv)(x.reshape(-1, columns))).ravel(), want)
    exact = [NormalDist().inv_cdf((1 + float(each)) / 2) / 2**0.5 for each in x[1:-1:16]]
    np.testing.assert_allclose(want[1:-1:16], exact, rtol=1e-6)
    assert want[0] == -np.inf and want[-1] == np.inf


def test_what_is_drawn_is_what_the_model_draws() -> None:
    """Also under a setting that holds for a part of it, and of a number that is no array."""

    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        with jax.threefry_partitionable(False):
            old = jax.random.normal(key, (7,))
        return old, jax.random.truncated_normal(key, -2, 2, (7,)), jax.lax.erf_inv(0.5)

    key = jax.random.key(0)
    for want, got in zip(draw(key), jax.jit(products_rounded(draw))(key), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_products_of_an_optimizer_are_rounded_wherever_they_stand() -> None:
    params = {"w": jnp.arange(-3.0, 3.0), "v": jnp.float32([np.inf, np.nan, -0.0])}
    inside = optax.stateless(lambda grads, params: jax.tree.map(lambda leaf: jax.nn.relu(leaf) * 2 + 1, grads))
    apart = with_rounded_products(inside)
    assert str(jax.make_jaxpr(apart.update)(params, inside.init(params), params)).count(" max ") == 4  # and two relus
    want, got = (tx.update(params, inside.init(params), params)[0] for tx in (inside, apart))
    jax.tree.map(np.testing.assert_array_equal, want, got)
    assert rounded(params["v"]).tobytes() == params["v"].tobytes()


@pytest.mark.exhaustive
@pytest.mark.xdist_group("deterministic-fp32")
def test_native_sums_differ_from_one_device() -> None:
    """What the others would show if the order of sums were left to chance; also that dropout is on."""
    want, got = (run(case, "fp32", "gpt2", False, "native clip and adamw") for case in (ONE, Case("ddp", (8, 1, 1))))
    assert (got[0] != want[0]).mean() > 0.5
    assert (got[1] != want[1]).any()


@pytest.mark.slow
def test_ordered_sum_is_the_sum_and_the_same_in_every_layout() -> None:
    mesh = make_mesh(data=2, fsdp=4)
    for shape in [(), (0,), (1,), (7,), (8, 6), (24, 5), (3, 16, 8)]:
        x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
        np.testing.assert_allclose(ordered_sum(x), np.asarray(x, np.float64).sum(), rtol=1e-5, atol=1e-6)
        alone = jax.jit(ordered_sum)(x)
        for dim, size in enumerate(shape):
            if size and size % 4 == 0:
                spec = jax.sharding.PartitionSpec(*[None] * dim, "fsdp")
                placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
                assert np.asarray(jax.jit(ordered_sum)(placed)).tobytes() == np.asarray(alone).tobytes()
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4)}
    np.testing.assert_allclose(ordered_norm(tree), optax.tree.norm(tree), rtol=1e-6)


def test_clip_by_ordered_norm_is_optax_clip() -> None:
    grads = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4)}
    for limit in (0.5, 100.0):
        want, _ = optax.clip_by_global_norm(limit).update(grads, optax.EmptyState())
        got, _ = clip_by_ordered_norm(limit).update(grads, optax.EmptyState())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


@pytest.mark.parametrize(
    ("sync", "mesh", "microbatches", "message"),
    [
        (GradSync("ring", deterministic=True), {"data": 2}, 1, "sums by algorithm ordered"),
        (GradSync(deterministic=True), {"data": 3}, 1, "mesh: data x fsdp: 3 is no power of two"),
        (GradSync(deterministic=True, virtual_shards=6), {"data": 2}, 1, "virtual_shards: 6 is no power of two"),
        (GradSync(deterministic=True, virtual_shards=0), {"data": 1}, 1, "virtual_shards: 0 is out of range"),
        (GradSync(deterministic=True), {"data": 2, "expert": 2}, 1, "mesh.expert"),
        (GradSync(bucket_mb=0), {"data": 2}, 1, "bucket_mb"),
        (
            GradSync(deterministic=True, virtual_shards=4),
            {"data": 4},
            2,
            "virtual_shards: 4 does not divide by 4 batch shards x 2",
        ),
        (GradSync("ring", wire_dtype="fp8"), {"data": 2}, 1, "'fp8' is not known"),
        (GradSync(wire_dtype="int8"), {"data": 2}, 1, "native"),
        (GradSync("tree", wire_dtype="int8"), {"data": 2}, 1, "balanced_fusion, .*ring"),
        (GradSync("auto", link="fast"), {"data": 2}, 1, "'fast' is not known"),
    ],
)
def test_what_does_not_go_together_is_named(sync: GradSync, mesh: Any, microbatches: int, message: str) -> None:
    model = gpt(model_config("gpt2"), max_length=LENGTH)
    with pytest.raises(UserError, match=message):
        make_train_step(model, optax.sgd(0.1), make_mesh(**mesh), grad_sync=sync, microbatches=microbatches)


def test_a_narrow_reduce_dtype_is_refused() -> None:
    model, precision = gpt(model_config("gpt2"), max_length=LENGTH), make_precision("bf16", "bfloat16")
    with pytest.raises(UserError, match="at least float32"):
        make_train_step(model, optax.sgd(0.1), make_mesh(), grad_sync=DETERMINISTIC, precision=precision)


@pytest.mark.slow
def test_same_bits_for_a_loss_of_ones_own() -> None:
    """It sums over a parameter that is split along dim 1, too."""
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 16), "v": (16,), "c": (5, 8)}
    params = {name: jnp.float32(rng.normal(size=shape)) for name, shape in shapes.items()}
    batch = {"x": rng.normal(size=(16, 8)).astype(np.float32), "y": rng.normal(size=16).astype(np.float32)}

    def loss(params: Any, batch: Any, keys: jax.Array) -> Any:
        error = jnp.tanh(batch["x"] @ params["w"]) @ params["v"] * params["c"].sum() - batch["y"]
        return (error * error).sum(), jnp.float32(error.size)

    found = set()
    layouts = (("ddp", {}), ("ddp", {"data": 8}), ("zero3", {"fsdp": 4}), ("zero3", {"data": 2, "fsdp": 2}))
    for strategy, sizes in (*layouts, ("zero1", {"fsdp": 2}), ("zero2", {"fsdp": 8})):
        optimizer, mesh = optax.chain(clip_by_ordered_norm(1.0), optax.adamw(1e-2)), make_mesh(**sizes)
        state = init_state(params, optimizer, mesh, strategy=strategy)
        step = make_train_step(loss, optimizer, mesh, strategy=strategy, grad_sync=DETERMINISTIC)
        for _ in range(5):
            state, metrics = step(state, batch)
        found.add((bits(state.params).tobytes(), float(metrics["loss"])))
    assert len(found) == 1


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        optax.contrib.muon(1e-3),
        optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),  # products inside a condition
    ],
)
def test_an_optimizer_that_sums_over_shards_is_refused(optimizer: Any) -> None:
    model, mesh = gpt(model_config("gpt2"), max_length=LENGTH), make_mesh(fsdp=2)
    step = make_train_step(model, optimizer, mesh, strategy="zero3", grad_sync=DETERMINISTIC)
    with pytest.raises(UserError, match="clip_by_ordered_norm"):
        step.jitted(state_target(model, optimizer, mesh, strategy="zero3"))


@pytest.mark.slow
def test_the_example_prints_what_readme_shows() -> None:
    """But for the losses and the words that differ without it, which are this compiler's."""
    example = ROOT / "docs" / "examples" / "same_bits.py"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    deterministic, native = done.stdout.removeprefix("deterministic\n").split("native sums\n")
    differ = {
        name: [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) of 34,176 words differ", text)]
        for name, text in (("deterministic", deterministic), ("native", native))
    }
    assert differ["deterministic"] == [0, 0, 0] and len(differ["native"]) == 3 and all(differ["native"])
    page = (ROOT / "docs" / "same_bits.md").read_text(encoding="utf-8")
    shown = page[page.index("deterministic\n  ddp") :].partition("```")[0]
    figures = re.compile(r"loss [\d.]+, [\d,]+ of")
    assert figures.sub("", shown) == figures.sub("", done.stdout)
