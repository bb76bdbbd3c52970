"""Float8 products of linear layers: what they round, what they cannot hide, where they are, and who is refused."""

import dataclasses
import functools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from batches import random_tokens
from jax.sharding import PartitionSpec as P
from jaxprs import equations, floats
from levels import levels

from jaxdist.build import make_model
from jaxdist.config.schema import Config, DataConfig, MemoryConfig, ModelConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.config.sections.precision import PrecisionConfig
from jaxdist.errors import UserError
from jaxdist.init import init_state, state_target
from jaxdist.mesh import abstract_mesh, make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.nn import ModelDef, product
from jaxdist.nn.matmul.float8 import E4M3, E5M2, fits, float8_product, quantise
from jaxdist.plan.explain import explain
from jaxdist.precision.float8_devices import has_float8
from jaxdist.precision.policy import make_precision
from jaxdist.runtime.start import start
from jaxdist.step import make_train_step

GPT2 = ModelConfig(style="gpt2", layers=2, width=32, heads=2, vocab=32)
LLAMA = ModelConfig(style="llama", layers=2, width=32, heads=2, vocab=32, mlp_width=64)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for a device that multiplies float8: XLA widens the operands."""
    monkeypatch.setattr("jaxdist.precision.float8_devices.has_float8", lambda device: True)


@jax.jit
def product_and_gradients(x: jax.Array, k: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    y, pull = jax.vjp(float8_product, x, k)
    return y, *pull(dy)


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    """Normal values of sizes from 2^-12 to 2^4: some are below the smallest normal number of their tensor."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) * 2.0 ** rng.integers(-12, 2, shape), jnp.float32)


def allowed(x: jax.Array, dtype: Any) -> np.ndarray:
    """What quantising may change of each value: half the distance of two neighbours."""
    limits, scale = jnp.finfo(dtype), float(quantise(x, dtype)[1])
    half = 2.0 ** -(limits.nmant + 1)
    return np.maximum(half * np.abs(np.asarray(x, np.float64)), half * float(limits.tiny) * scale)


def product_error(x: Any, k: Any, dx: np.ndarray, dk: np.ndarray) -> np.ndarray:
    """How far off x @ k may be where its operands are off by these."""
    x, k = np.abs(np.asarray(x, np.float64)), np.abs(np.asarray(k, np.float64))
    return dx @ k + x @ dk + dx @ dk + 1e-5 * (x @ k)  # fp32 sums


def test_products_are_within_the_rounding_of_the_format() -> None:
    x, k, dy = drawn(32, 64), drawn(64, 16, seed=1), drawn(32, 16, seed=2)
    y, dx, dk = product_and_gradients(x, k, dy)
    off_x, off_k, off_dy = allowed(x, E4M3), allowed(k, E4M3), allowed(dy, E5M2)
    wide = [np.asarray(value, np.float64) for value in (x, k, dy)]
    for got, (a, b), (off_a, off_b) in (
        (y, wide[:2], (off_x, off_k)),
        (dx, (wide[2], wide[1].T), (off_dy, off_k.T)),
        (dk, (wide[0].T, wide[2]), (off_x.T, off_dy)),
    ):
        error = np.abs(np.asarray(got, np.float64) - a @ b)
        assert (error <= product_error(a, b, off_a, off_b)).all()
        assert 1e-3 < np.linalg.norm(error) / np.linalg.norm(a @ b) < 0.1  # rounded, and no more than that


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_powers_of_two_are_exact(dtype: Any) -> None:
    """Each result has one part. float8_e4m3fn holds 15 of them beside the largest, float8_e5m2 more."""
    sizes = 2.0 ** np.arange(-15, 1)
    x, k, dy = (jnp.asarray(np.diag(unit * sizes), dtype) for unit in (2.0**9, -3.0, 2.0**-30))
    y, dx, dk = product_and_gradients(x, k, dy)
    for got, a, b in ((y, x, k), (dx, dy, k.T), (dk, x.T, dy)):
        assert got.dtype == dtype
        want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
        np.testing.assert_array_equal(np.asarray(got, np.float64), want)


def test_zeros_stay_zeros_and_sizes_do_not_matter() -> None:
    x, k = drawn(16, 16), drawn(16, 16, seed=1)
    nothing = jnp.zeros((16, 16))
    for a, b in ((nothing, k), (x, nothing), (nothing, nothing)):
        y, *grads = product_and_gradients(a, b, k)
        assert not np.asarray(y).any() and all(np.isfinite(each).all() for each in grads)
    want = np.asarray(product_and_gradients(x, k, x)[0])
    for factor in (2.0**-90, 2.0**100):
        np.testing.assert_array_equal(np.asarray(product_and_gradients(x * factor, k, x)[0]), want * factor)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_seen(bad: float) -> None:
    """By the guard of the loss: nothing that such a tensor was multiplied into is finite."""
    x, k, dy = drawn(16, 16), drawn(16, 16, seed=1), drawn(16, 16, seed=2)
    for spoilt in (x.at[3, 4].set(bad), k), (x, k.at[3, 4].set(bad)):
        assert not np.isfinite(product_and_gradients(*spoilt, dy)[0]).any()
    _, dx, dk = product_and_gradients(x, k, dy.at[3, 4].set(bad))
    assert not np.isfinite(dx).any() and not np.isfinite(dk).any()


@pytest.mark.parametrize(
    ("sizes", "fit"),
    [((16, 16, 16), True), ((8, 16, 16), False), ((16, 24, 16), False), ((16, 16, 40), False), ((0, 16, 16), False)],
)
def test_products_of_other_sizes_are_not_in_float8(sizes: tuple[int, int, int], fit: bool) -> None:
    tokens, inputs, outputs = sizes
    assert fits(*sizes) == fit
    x, k = drawn(2, tokens // 2, inputs), drawn(inputs, 2, outputs // 2)
    for fp8 in (True, False):
        jaxpr = jax.make_jaxpr(functools.partial(product, fp8=fp8))(x, k)
        types = [floats(each) for _, each in equations(jaxpr) if each.primitive.name == "dot_general"]
        assert types == [{E4M3.name} if fp8 and fit else {"float32"}]


@pytest.mark.parametrize("split", ["column", "row"])
def test_shards_have_scales_of_their_own_and_gradients_are_summed(split: str) -> None:
    """Over `tensor`: powers of two of another size on each device, so that one scale for all would lose the small."""
    mesh, x, k = make_mesh(tensor=2), jnp.ones((16, 32)), jnp.ones((32, 32))
    if split == "column":
        specs, k = (P(), P(None, "tensor"), P(None, "tensor")), k.at[:, 16:].mul(2.0**-30)
    else:
        specs, k = (P(None, "tensor"), P("tensor"), P()), k.at[16:].mul(2.0**-30)

    def run(x: jax.Array, k: jax.Array) -> Any:
        y, pull = jax.vjp(functools.partial(product, fp8=True), x, k)
        y = y if split == "column" else jax.lax.psum(y, "tensor")
        dy = jnp.ones((16, y.shape[1]))
        return y, *pull(jax.lax.pcast(dy, ("tensor",), to="varying"))

    x_spec, k_spec, y_spec = specs
    region = jax.shard_map(run, mesh=mesh, in_specs=(x_spec, k_spec), out_specs=(y_spec, x_spec, k_spec))
    y, dx, dk = jax.jit(region)(x, k)
    np.testing.assert_array_equal(y, x @ k)
    np.testing.assert_array_equal(dx, jnp.ones((16, 32)) @ k.T)
    np.testing.assert_array_equal(dk, jnp.full((32, 32), 16.0))


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_linear_layers_multiply_in_float8_and_nothing_else_does(config: ModelConfig) -> None:
    """Four layers of a block, each once forward and twice backward; scores, mixing and head, each the same, do not.
    What is lowered for GPUs has the float8 products in it."""
    mesh, tx = make_mesh(fsdp=2), optax.sgd(0.1)
    model = gpt(config, max_length=8, fp8=True)
    target = state_target(model, tx, mesh, strategy="zero3")
    traced = (
        make_train_step(model, tx, mesh, strategy="zero3", precision="fp8")
        .jitted(target)
        .trace(target, random_tokens())
    )
    found: Counter[str] = Counter()
    for _, equation in equations(traced.jaxpr):
        if equation.primitive.name == "dot_general":
            found["+".join(sorted({str(x.aval.dtype) for x in equation.invars}))] += 1
    assert (found.pop("float8_e4m3fn"), found.pop("float8_e4m3fn+float8_e5m2")) == (4, 8)
    # Attention multiplies twice, and five times in the backward pass; the head thrice.
    assert found.pop("bfloat16") == 10 and not found
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line and "f8E4M3FN" in line]
    assert len(products) == 12 and sum("f8E5M2" in line for line in products) == 8
    assert all(line.endswith("xbf16>") for line in products)


def trained(precision: str) -> float:
    """The mean loss of the last 10 of 50 steps. The next token is one of four: ln 4 = 1.39 is the best there is."""
    mesh, tx, losses = make_mesh(), optax.adamw(1e-2, eps=1e-6), []
    model = gpt(dataclasses.replace(GPT2, layers=1), max_length=8, fp8=precision == "fp8")
    step, state = make_train_step(model, tx, mesh, precision=precision), init_state(model, tx, mesh)
    for i in range(50):
        rng = np.random.default_rng(i)
        ids = np.cumsum(rng.integers(0, 4, (32, 9)) + 5, axis=1).astype(np.int32) % 32
        weights = np.ones((32, 8), np.float32)
        state, metrics = step(state, {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": weights})
        losses.append(float(metrics["loss"]))
    return float(np.mean(losses[-10:]))


@pytest.mark.slow
def test_training_ends_where_bf16_ends(emulated: None) -> None:
    loss, other = trained("fp8"), trained("bf16")
    assert 1.3 < other < 1.7 and 0 < abs(loss / other - 1) < 0.01


@functools.cache
def first_step(strategy: str, schedule: str, remat: str, axes: tuple[tuple[str, int], ...], fp8: bool = True) -> Any:
    mesh, tx = make_mesh(**dict(axes)), optax.sgd(0.1)
    model = gpt(GPT2, max_length=8, fp8=fp8)
    step = make_train_step(
        model,
        tx,
        mesh,
        strategy=strategy,
        schedule=schedule,
        precision="fp8" if fp8 else "bf16",
        remat=remat,
        return_grads=True,
        microbatches=2 if mesh.shape["pipe"] > 1 else 1,
    )
    metrics = step(init_state(model, tx, mesh, strategy=strategy), random_tokens(16))[1]
    return jax.device_get((metrics["loss"], metrics["grads"]))


LAYOUTS = [
    ("zero3", "one_f_one_b", "none", {"pipe": 2, "tensor": 2}),
    ("zero1", "accumulate", "none", {"data": 2, "fsdp": 2}),
    ("zero2", "accumulate", "dots", {"data": 2, "fsdp": 2}),
    ("zero3", "accumulate", "full", {"data": 2, "fsdp": 2}),
    ("zero3", "accumulate", "none", {"fsdp": 2, "tensor": 2}),
    ("zero3", "zero_bubble", "none", {"pipe": 2, "fsdp": 2}),
]


def test_a_pipeline_of_shards_is_typed() -> None:
    """Traced: each cast between what is the same on all devices and what is not is where it belongs."""
    mesh, tx = make_mesh(pipe=2, fsdp=2, tensor=2), optax.sgd(0.1)
    model = gpt(GPT2, max_length=8, fp8=True)
    target = state_target(model, tx, mesh, strategy="zero3")
    options = {"strategy": "zero3", "schedule": "one_f_one_b", "microbatches": 2, "precision": "fp8"}
    traced = make_train_step(model, tx, mesh, **options).jitted(target).trace(target, random_tokens())
    assert any(floats(each) == {E4M3.name, E5M2.name} for _, each in equations(traced.jaxpr))


@pytest.mark.parametrize(("strategy", "schedule", "remat", "axes"), levels(LAYOUTS, slow=4, common=2))
def test_layouts_agree(emulated: None, strategy: str, schedule: str, remat: str, axes: dict[str, int]) -> None:
    """A device's scales are those of its shards, so layouts round differently: by float8_e5m2's 2^-3 in a single
    gradient, by less in a sum. A missing or doubled sum is off by 0.5 and more."""
    loss, grads = first_step(strategy, schedule, remat, tuple(axes.items()))
    alone, alone_grads = first_step("ddp", "accumulate", "none", ())
    assert abs(loss - alone) < 2.0**-8 * alone
    for tree in grads, alone_grads:  # softmax ignores a shift of all scores: that gradient is roundings only
        bias = np.array(tree["blocks"]["attention"]["qkv"]["linear"]["bias"])
        bias[..., -2, :] = 1
        tree["blocks"]["attention"]["qkv"]["linear"]["bias"] = bias
    assert oracle.error(grads, alone_grads) < 0.2


@pytest.mark.slow
def test_deterministic_runs_have_the_same_bits(emulated: None) -> None:
    """Scales are those of a virtual shard, whatever devices compute it."""
    found = []
    for axes in ({}, {"data": 2}, {"fsdp": 4}):
        mesh, tx, sync = make_mesh(**axes), optax.sgd(0.1), GradSync(deterministic=True, virtual_shards=8)
        model = gpt(GPT2, max_length=8, fp8=True)
        step = make_train_step(model, tx, mesh, precision="fp8", grad_sync=sync, return_grads=True)
        found.append(jax.device_get(step(init_state(model, tx, mesh, grad_sync=sync), random_tokens(16))[1]["grads"]))
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[0], other)


@pytest.mark.parametrize(
    ("platform", "capability", "has"),
    [
        ("cpu", None, False),
        ("gpu", "8.0", False),
        ("gpu", "8.6", False),
        ("gpu", "8.9", True),
        ("gpu", "9.0", True),
        ("gpu", "12.0", True),
        ("gpu", "gfx90a", False),
        ("gpu", "gfx942", False),
        ("gpu", "gfx950", True),
        ("tpu", None, False),
    ],
)
def test_devices_with_float8(platform: str, capability: str | None, has: bool) -> None:
    given = {} if capability is None else {"compute_capability": capability}
    assert has_float8(SimpleNamespace(platform=platform, **given)) == has


def refused(message: str, work: Any) -> str:
    """What was said."""
    with pytest.raises(UserError, match=message) as caught:
        work()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.slow
def test_devices_without_float8_are_refused_but_plans_are_made() -> None:
    message = (
        r"precision.policy: 'fp8' needs GPUs .*8\.9.*, this is a CPU; allowed here: fp32, bf16, fp16, fp64, O0,"
        " O1, O2, O3$"
    )
    config = Config(model=GPT2, data=DataConfig(seq_len=8, global_batch=4), precision=PrecisionConfig("fp8"))
    refused(message, lambda: start(config))
    mesh, tx = make_mesh(), optax.sgd(0.1)
    model = gpt(GPT2, max_length=8, fp8=True)
    step, target = make_train_step(model, tx, mesh, precision="fp8"), state_target(model, tx, mesh)
    refused(message, lambda: step(target, random_tokens()))
    config, bf16 = (
        dataclasses.replace(config, precision=PrecisionConfig(policy), memory=MemoryConfig(remat="dots"))
        for policy in ("fp8", "bf16")
    )  # what is kept and communicated is the same: no remat policy stops at the rule of a product
    found, other = explain(config), explain(bf16)
    assert found.ledger.wire_bytes == other.ledger.wire_bytes
    for name, size in found.memory.items():  # what is estimated counts the scales of float8, of a few bytes each
        rough = "estimated" in name or "not in" in name
        assert size == pytest.approx(other.memory[name], rel=1e-3 if rough else 0), name


def test_a_gpu_without_float8_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100")
    monkeypatch.setattr(jax, "devices", lambda: [old])
    config = Config(precision=PrecisionConfig("fp8"))
    said = refused("this is NVIDIA A100, 8.0; allowed here: fp32, bf16", lambda: start(config))
    assert said.startswith("precision.policy: 'fp8'")


def without_option(config: ModelConfig, *, max_length: int, param_dtype: Any) -> ModelDef:
    """A model of somebody else's, which knows nothing of float8."""
    return gpt(config, max_length=max_length, param_dtype=param_dtype)


def with_others(config: ModelConfig, **options: Any) -> ModelDef:
    """One that hands on what it is given."""
    return gpt(config, **options)


def test_models_and_policies_agree_on_float8() -> None:
    def build(name: str, policy: str) -> ModelDef:
        config = Config(model=ModelConfig(name=name, layers=1, width=32, heads=2, vocab=32))
        return make_model(config, make_precision(policy), stages=1, training=True)

    assert not build("test_float8.without_option", "bf16").fp8 and build("test_float8.with_others", "fp8").fp8
    refused(
        "'fp8' needs a model that takes the option fp8, and model.name 'test_float8.without_option' takes no",
        lambda: build("test_float8.without_option", "fp8"),
    )
    mesh, tx = abstract_mesh(fsdp=2), optax.sgd(0.1)
    for fp8, policy, message in ((False, "fp8", "build it with fp8=True"), (True, "bf16", "or build it without")):
        model = gpt(GPT2, max_length=8, fp8=fp8)
        target = state_target(model, tx, mesh)
        step = make_train_step(model, tx, mesh, precision=policy)
        refused(message, lambda step=step, target=target: step.jitted(target).trace(target, random_tokens()))
    own, data = {"w": np.ones((16, 16), np.float32)}, np.ones((8, 16), np.float32)
    target = state_target(own, tx, mesh)
    step = make_train_step(lambda params, x, keys: ((x @ params["w"]).sum(), x.size), tx, mesh, precision="fp8")
    refused(r"jaxdist.nn.product\(x, kernel, fp8=True\)", lambda: step.jitted(target).trace(target, data))
