"""Mistakes that would train something else without a word are errors of one line; and what bf16 and remat promise."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import primitive_counts
from levels import others_slow

import jaxdist
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.errors import UserError
from jaxdist.init import init_state, state_target
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.step import make_train_step

SGD = optax.sgd(0.1)
CONFIG = ModelConfig(style="gpt2", layers=2, width=16, heads=4, vocab=32)
MODEL = gpt(CONFIG, max_length=8)


def make_batch(size: int = 8) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, 32, (size, 9)).astype(np.int32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((size, 8), np.float32)}


def square(params: Any, batch: Any, keys: Any) -> Any:
    return ((batch @ params["w"]) ** 2).sum(), batch.shape[0]


def run_foreign(loss: Any, params: Any = None, batch: Any = None, **options: Any) -> Any:
    mesh = make_mesh(data=2, fsdp=2)
    state = init_state({"w": jnp.ones((4, 4))} if params is None else params, SGD, mesh, strategy="zero3")
    step = make_train_step(loss, SGD, mesh, strategy="zero3", **options)
    return step(state, np.ones((8, 4), np.float32) if batch is None else batch)


@pytest.mark.parametrize("sizes", others_slow([{"pipe": 2}, {"context": 2}], {"context": 2}), ids=str)
def test_axes_that_no_layer_uses_are_refused(sizes: dict[str, int]) -> None:
    mesh = make_mesh(**sizes)
    with pytest.raises(
        UserError,
        match=f"mesh.{next(iter(sizes))}: .*(has one stage|no attention of the model is split over this axis)",
    ):
        make_train_step(MODEL, SGD, mesh)(init_state(MODEL, SGD, mesh), make_batch())


def test_state_of_another_strategy() -> None:
    mesh = make_mesh(fsdp=8)
    state = init_state({"w": jnp.ones((8,))}, SGD, mesh, strategy="zero3")
    step = make_train_step(lambda p, b, k: ((b * p["w"]).sum(), 1.0), SGD, mesh, strategy="ddp")
    with pytest.raises(UserError, match="'ddp' was given shards"):
        step(state, np.ones((8, 1), np.float32))


def test_state_of_another_mesh_dtype_or_layout() -> None:
    mesh, other = make_mesh(fsdp=8), make_mesh(data=8)
    params, rows = {"w": jnp.ones((8, 8))}, np.ones((8, 8), np.float32)
    step = make_train_step(square, SGD, mesh, strategy="zero3")
    with pytest.raises(UserError, match="state: made on another mesh"):
        step(init_state(params, SGD, other, strategy="zero3"), rows)
    step(init_state(params, SGD, mesh, strategy="zero3"), rows)
    with pytest.raises(UserError, match="state: laid out differently"):
        step(init_state(params, SGD, mesh, strategy="ddp"), rows)
    with pytest.raises(UserError, match="state: laid out differently"):
        step.lower(init_state(params, SGD, mesh, strategy="ddp"), rows)
    with pytest.raises(UserError, match=r"params.w: bfloat16, but this precision keeps parameters in float32"):
        run_foreign(square, {"w": jnp.ones((4, 4), jnp.bfloat16)})


def explicit(size: int) -> Mesh:
    return jax.make_mesh((size,), ("a",), devices=jax.devices()[:size], axis_types=(AxisType.Explicit,))


def test_complex_parameters_of_a_model_are_refused() -> None:
    model = gpt(ModelConfig(layers=1, width=8, heads=1, vocab=8), max_length=4)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.complex64), model.shapes)
    with pytest.raises(UserError, match=r"^params\.blocks\..*: complex64; allowed: real parameters"):
        state_target(model._replace(shapes=shapes), SGD, make_mesh(fsdp=8))


def test_without_compilation_nothing_can_be_laid_out() -> None:
    mesh, rows, params = make_mesh(fsdp=8), np.ones((8, 8), np.float32), {"w": jnp.ones((8, 8))}
    step, state = make_train_step(square, SGD, mesh), init_state(params, SGD, mesh)
    with jax.disable_jit(), pytest.raises(UserError, match="^jax.disable_jit: is on, "):
        init_state(params, SGD, mesh)
    with jax.disable_jit(), pytest.raises(UserError, match="^jax.disable_jit: is on, "):
        step(state, rows)
    step(state, rows)


@pytest.mark.parametrize("warm", [False, True])
def test_a_step_inside_of_jit(warm: bool) -> None:
    """The function of `jitted` is called there."""
    mesh, rows = make_mesh(fsdp=8), np.ones((8, 8), np.float32)
    step, make = (make_train_step(square, SGD, mesh), lambda: init_state({"w": jnp.ones((8, 8))}, SGD, mesh))
    if warm:
        step(make(), rows)
    line = r"^state: is traced by jax, .*; allowed there: what step.jitted\(state\) gives, called outside"
    for call in (jax.jit(lambda *given: step(*given)), lambda *given: jax.eval_shape(step, *given)):
        with pytest.raises(UserError, match=line):
            call(make(), rows)
    with pytest.raises(UserError, match=line):
        jax.lax.scan(step, make(), rows[None])
    state, metrics = jax.lax.scan(step.jitted(make()), make(), np.stack([rows] * 3))
    assert int(state.step) == 3 and metrics["loss"].shape == (3,)


@pytest.mark.parametrize(
    ("part", "change", "name"),
    [
        ("params", np.asarray, "params.w"),
        ("params", lambda leaf: jnp.asarray(np.asarray(leaf)), "params.w"),
        ("params", lambda leaf: 1.0, "params.w"),
        ("opt_state", np.asarray, "opt_state.0.trace.w"),
        ("step", np.asarray, "step"),
    ],
)
def test_leaves_without_a_layout_are_named(part: str, change: Any, name: str) -> None:
    mesh, tx = make_mesh(fsdp=8), optax.sgd(0.1, momentum=0.9)
    state = init_state({"w": jnp.ones((8, 8))}, tx, mesh, strategy="zero3")
    step = make_train_step(square, tx, mesh, strategy="zero3")
    loose = state._replace(**{part: jax.tree.map(change, getattr(state, part))})
    with pytest.raises(UserError, match=rf"^state: {name} is no array that is laid out .* give jax.device_"):
        step(loose, np.ones((8, 8), np.float32))
    old = getattr(state, part)
    new = jax.device_put(jax.tree.map(np.asarray, old), jax.tree.map(lambda x: x.sharding, old))
    step(state._replace(**{part: new}), np.ones((8, 8), np.float32))


NO_NUMBERS = "allowed: arrays of numbers, [rows, ...]"
ELSEWHERE = "is on another mesh than the step's, or on some of its devices; allowed: NumPy arrays"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda rows: ["a"] * 8, f"batch: t.0 is a str; {NO_NUMBERS}"),
        (lambda rows: np.array(["a"] * 8), f"batch: t is an array of <U1; {NO_NUMBERS}"),
        (lambda rows: np.array([None] * 8), f"batch: t is an array of object; {NO_NUMBERS}"),
        (lambda rows: rows.tolist(), "; give np.asarray of nested lists"),
        (lambda rows: jax.device_put(rows, jax.devices()[3]), f"batch: t {ELSEWHERE}"),
        (lambda rows: jax.device_put(rows, NamedSharding(explicit(8), P("a"))), f"batch: t {ELSEWHERE}"),
        (lambda rows: jax.device_put(rows, NamedSharding(explicit(4), P("a"))), f"batch: t {ELSEWHERE}"),
    ],
)
def test_leaves_that_are_no_batch(change: Any, line: str) -> None:
    mesh, rows = make_mesh(fsdp=8), np.ones((8, 8), np.float32)
    step = make_train_step(lambda p, b, k: square(p, b["x"], k), SGD, mesh)
    with pytest.raises(UserError) as found:
        step(init_state({"w": jnp.ones((8, 8))}, SGD, mesh), {"x": rows, "t": change(rows)})
    assert line in str(found.value) and "\n" not in str(found.value)


def test_a_key_error_of_the_loss_stays_one() -> None:
    mesh, rows = make_mesh(fsdp=8), np.ones((8, 8), np.float32)
    with pytest.raises(KeyError, match="v"):
        make_train_step(lambda p, b, k: p["v"], SGD, mesh)(init_state({"w": jnp.ones((8, 8))}, SGD, mesh), rows)


def test_inside_of_another_mesh() -> None:
    mesh, rows = make_mesh(fsdp=8), np.ones((8, 8), np.float32)
    line = "^jax.set_mesh: is of a mesh with the axes a; allowed: none, or that of jaxdist.make_mesh; "
    make, step = lambda: init_state({"w": jnp.ones((8, 8))}, SGD, mesh), make_train_step(square, SGD, mesh)
    state, before = make(), make_train_step(square, SGD, mesh)
    before(make(), rows)
    for call in (make, lambda: step(state, rows), lambda: before(state, rows)):
        with jax.set_mesh(explicit(8)), pytest.raises(UserError, match=line):
            call()
    with jax.set_mesh(mesh):
        step(make(), rows)


def test_what_is_wrong_with_a_batch_is_said_whatever_the_state() -> None:
    """Arrays that are committed nowhere are moved to where the step wants them; it is not the layout that is wrong."""
    mesh, rows = make_mesh(fsdp=8), np.ones((8, 8), np.float32)
    step = make_train_step(square, SGD, mesh, strategy="zero3")
    state, metrics = step(init_state({"w": jnp.eye(8)}, SGD, mesh, strategy="zero3"), rows)
    for loose in (jax.tree.map(jnp.asarray, jax.device_get(state)), jax.device_get(state)):
        with pytest.raises(UserError, match="^batch: 7 rows do not divide by 8"):
            step(loose, rows[:7])
    again = step(jax.device_get(state), rows)[1]["loss"]
    assert float(again) == float(step(state, rows)[1]["loss"]) != float(metrics["loss"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp17"}, "precision.policy: 'fp17' is not known; allowed: fp32, bf16, fp16, fp8, fp64, O0"),
        ({"precision": "fp64"}, "64-bit types need jax_enable_x64"),
        ({"grad_sync": GradSync("rong")}, "'rong' is not known"),
        ({"strategy": "zero9"}, "'zero9' is not known"),
        ({"schedule": "gpipes"}, "'gpipes' is not known"),
        ({"remat": "ful"}, "memory.remat: 'ful' is not known; allowed: one of none, full, dots, sqrt, offload, or a"),
    ],
    ids=str,
)
def test_unknown_names_on_one_device(options: dict[str, str], message: str) -> None:
    mesh = make_mesh()
    with pytest.raises(UserError, match=message):
        make_train_step(MODEL, SGD, mesh, **options)(init_state(MODEL, SGD, mesh), make_batch())  # type: ignore[arg-type]


@pytest.mark.parametrize("result", [lambda x: x.sum(), lambda x: (x, 1.0), lambda x: (x.sum(), x)])
def test_a_loss_returns_two_scalars(result: Any) -> None:
    with pytest.raises(UserError, match="loss_fn: must return two scalars"):
        run_foreign(lambda params, batch, keys: result(batch @ params["w"]))


def test_python_numbers_as_weight_and_weak_types_compile_once() -> None:
    mesh = make_mesh(data=2)
    state = init_state({"w": jnp.full((4, 4), 0.5)}, SGD, mesh)
    step = make_train_step(square, SGD, mesh)
    for _ in range(3):
        state, metrics = step(state, np.ones((8, 4), np.float32))
    assert float(metrics["weight"]) == 8
    assert step.jitted(state)._cache_size() == 1


def test_a_collective_in_a_custom_backward_is_found() -> None:
    @jax.custom_vjp
    def hidden(x: jax.Array) -> jax.Array:
        return x

    hidden.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.psum(g, "data"),))
    with pytest.raises(UserError, match="contains psum over data"):
        run_foreign(lambda params, batch, keys: (hidden(batch @ params["w"]).sum(), 1.0))


def test_a_mesh_that_leaves_a_process_out() -> None:
    devices = [type("Device", (), {"process_index": i // 4, "id": i, "platform": "cpu"})() for i in range(8)]
    with pytest.raises(UserError, match="4 devices leave process 1 without one"):
        make_mesh(data=4, devices=devices)


def test_weightless_batches_report_a_loss_of_zero() -> None:
    _, metrics = run_foreign(lambda params, batch, keys: (0 * (batch @ params["w"]).sum(), 0.0))
    assert float(metrics["loss"]) == 0.0


@pytest.mark.slow
def test_negative_targets_count_nothing() -> None:
    mesh, batch = make_mesh(tensor=2), make_batch()
    masked = {**batch, "weights": batch["weights"] * (np.arange(8) % 2)}
    ignored = {**batch, "targets": np.where(np.arange(8) % 2, batch["targets"], -100)}
    step = make_train_step(MODEL, SGD, mesh)
    state = init_state(MODEL, SGD, mesh)
    copy = jax.tree.map(jnp.copy, state)
    losses = [float(step(each, rows)[1]["loss"]) for each, rows in ((state, masked), (copy, ignored))]
    assert losses[0] == losses[1]


def test_a_single_array_as_the_parameters_is_sharded_like_any() -> None:
    target = state_target(jnp.ones((16, 3)), optax.adamw(1e-3), make_mesh(fsdp=8), strategy="zero3")
    specs = {leaf.sharding.spec for leaf in jax.tree.leaves((target.params, target.opt_state)) if leaf.ndim}
    assert specs == {jax.P("fsdp", None)}


@pytest.mark.parametrize("strategy", others_slow(["ddp", "zero3"], "zero3"))
def test_full_remat_recomputes_the_products(strategy: str) -> None:
    mesh = make_mesh(fsdp=2)

    def products(model: Any, source: Any, batch: Any, remat: str) -> int:
        step = make_train_step(model, SGD, mesh, strategy=strategy, remat=remat)
        state = state_target(source, SGD, mesh, strategy=strategy)
        return primitive_counts(step.jitted(state).trace(state, batch).jaxpr)["dot_general"]

    ours = [products(MODEL, MODEL, make_batch(), remat) for remat in ("none", "full")]
    assert ours[1] >= ours[0] + 5 * CONFIG.layers
    params, rows = {"w": jnp.ones((4, 4))}, np.ones((8, 4), np.float32)
    foreign = [products(lambda p, b, k: ((b @ p["w"] @ p["w"]).sum(), 1), params, rows, r) for r in ("none", "full")]
    assert foreign[1] > foreign[0]


@pytest.mark.slow
def test_bf16_gradients_are_near_fp32_even_of_frequent_tokens() -> None:
    """Sums over positions (embedding rows, biases) in bf16 would lose what is small beside the sum."""
    config = dataclasses.replace(CONFIG, tied=False)
    model, mesh = gpt(config, max_length=64), make_mesh(data=2, fsdp=2)
    ids = np.minimum(np.random.default_rng(0).zipf(1.5, (64, 65)) - 1, 31).astype(np.int32)
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((64, 64), np.float32)}

    def grads(precision: str) -> Any:
        step = make_train_step(model, SGD, mesh, strategy="zero3", precision=precision, return_grads=True)
        return jax.device_get(step(init_state(model, SGD, mesh, strategy="zero3"), batch)[1]["grads"])

    got, want = grads("bf16"), grads("fp32")
    for tree in (got, want):  # the gradient of a key bias is zero but for rounding
        qkv = tree["blocks"]["attention"]["qkv"]["linear"]
        qkv["bias"] = qkv["bias"][..., [0, 2], :]
    assert oracle.error(got, want) < 0.03
    token, true = got["embed"]["tokens"]["table"][0], want["embed"]["tokens"]["table"][0]
    assert float(np.vdot(token, true) / np.vdot(true, true)) == pytest.approx(1, abs=0.01)


def test_public_names() -> None:
    assert set(jaxdist.__all__) >= {"make_mesh", "make_train_step", "init_state", "load_config", "collectives"}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"microbatches": 0}, r"^microbatches: 0; allowed: an integer >= 1$"),
        ({"microbatches": 2.0}, r"^microbatches: 2\.0; allowed: an integer >= 1$"),
        ({"max_skips": -1}, r"^max_skips: -1; allowed: an integer >= 0$"),  # it would skip every step
        ({"min_shard_bytes": "1MB"}, r"^min_shard_bytes: '1MB'; allowed: an integer >= 0$"),
    ],
    ids=str,
)
def test_counts_of_a_step_that_are_none(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        jaxdist.StepOptions(**given)
    assert jaxdist.StepOptions(microbatches=np.int64(2)).microbatches == 2
