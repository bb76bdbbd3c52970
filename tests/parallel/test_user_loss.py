"""A user's own loss under every strategy: exact against one device, and what it may not contain is refused."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from levels import levels, others_slow

import jaxdist
from jaxdist import init_state, make_mesh, make_train_step, registry
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.errors import UserError

STRATEGIES = registry.names("jaxdist.parallel.strategies")
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "own_model.py"


def rnn_loss(params: Any, batch: Any, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ordinary code that the check would not pass: a scan from zeros. Ragged: rows count as their weights say."""
    start = jnp.zeros((batch["x"].shape[0], 16), batch["x"].dtype)

    def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ params["w"] + x[:, None] * params["v"]), None

    h, _ = lax.scan(cell, start, batch["x"].T)
    noise = jax.vmap(lambda key: jax.random.normal(key, (16,), h.dtype))(keys)
    return (((h + 0.1 * noise).sum(-1) - batch["y"]) ** 2 * batch["w"]).sum(), batch["w"].sum()


def make_params() -> Any:
    rng = np.random.default_rng(0)
    return {"w": jnp.asarray(rng.normal(size=(16, 16)) * 0.2), "v": jnp.asarray(rng.normal(size=(1, 16)))}


def make_batch(step: int) -> Any:
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(32, 5)), "y": rng.normal(size=32), "w": rng.random(32) ** 4}


def train(loss: Any, params: Any, **options: Any) -> tuple[list[float], Any, Any]:
    sizes = options.pop("sizes", {})
    mesh, tx = jaxdist.make_mesh(**sizes), optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-6))
    state = jaxdist.init_state(params, tx, mesh, strategy=options.get("strategy", "ddp"))
    step = jaxdist.make_train_step(loss, tx, mesh, precision="fp64", return_grads=True, **options)
    losses, grads = [], None
    for i in range(3):
        state, metrics = step(state, make_batch(i))
        losses.append(float(metrics["loss"]))
        grads = metrics["grads"] if grads is None else grads
    return losses, jax.device_get(grads), jax.device_get(state.params)


SIZES = ({"data": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 8})
WORK = ((1, "native"), (4, "native"), (4, "ring"))


EVERYDAY = {(2, 2)}  # zero2 over fsdp=8


def every_pair() -> list[Any]:
    """All of them; but for exhaustive runs a Latin square, so that each pair of choices occurs."""
    marks = {0: [], 1: pytest.mark.exhaustive, 2: pytest.mark.exhaustive}
    return [
        pytest.param(
            strategy, sizes, *work, marks=marks[(i + j + k) % 3] or ([] if (i, j) in EVERYDAY else [pytest.mark.slow])
        )
        for i, strategy in enumerate(STRATEGIES)
        for j, sizes in enumerate(SIZES)
        for k, work in enumerate(WORK)
    ]


@pytest.mark.parametrize(("strategy", "sizes", "microbatches", "algorithm"), every_pair(), ids=str)
def test_foreign_loss_equals_one_device(strategy: str, sizes: Any, microbatches: int, algorithm: str) -> None:
    with jax.enable_x64(True):
        want = train(rnn_loss, make_params())
        got = train(
            rnn_loss,
            make_params(),
            sizes=sizes,
            strategy=strategy,
            microbatches=microbatches,
            grad_sync=GradSync(algorithm),
        )
        np.testing.assert_allclose(got[0], want[0], rtol=1e-12)
        assert oracle.error(got[1], want[1]) < 1e-10
        assert oracle.error(got[2], want[2]) < 1e-10


def test_one_device_equals_plain_jax() -> None:
    with jax.enable_x64(True):
        batch, params = make_batch(0), make_params()
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(jax.random.key(0), 0), jnp.arange(32))
        mean = lambda params: (lambda total, weight: total / weight)(*rnn_loss(params, batch, keys))  # noqa: E731
        loss, grads = jax.value_and_grad(mean)(params)
        losses, got, _ = train(rnn_loss, params)
        assert losses[0] == pytest.approx(float(loss), rel=1e-12)
        assert oracle.error(got, grads) < 1e-12


def psum_loss(params: Any, batch: Any, keys: Any) -> Any:
    return lax.psum((params["v"] ** 2).sum(), "data"), jnp.ones(())


def index_loss(params: Any, batch: Any, keys: Any) -> Any:
    scale = lax.axis_index("fsdp").astype(jnp.float64)
    return lax.cond(True, lambda: (params["v"] ** 2).sum() * scale, lambda: 0.0 * scale), jnp.ones(())


@pytest.mark.parametrize(("loss", "what"), [(psum_loss, "psum.*over data"), (index_loss, "axis_index over fsdp")])
def test_collectives_in_a_foreign_loss_are_refused(loss: Any, what: str) -> None:
    with jax.enable_x64(True), pytest.raises(UserError, match=f"loss_fn: contains {what}"):
        train(loss, make_params(), sizes={"data": 2, "fsdp": 2})


def test_axes_that_a_foreign_loss_cannot_use_are_refused() -> None:
    with jax.enable_x64(True), pytest.raises(UserError, match="mesh.tensor=2"):
        train(rnn_loss, make_params(), sizes={"tensor": 2})


def test_a_batch_that_does_not_divide_is_named() -> None:
    with (
        jax.enable_x64(True),
        pytest.raises(
            UserError,
            match=r"^batch: 32 rows do not divide by 24 \(.*microbatches 3\).*work: 24, 48; micro.*with 32: 1, 2, 4",
        ),
    ):
        train(rnn_loss, make_params(), sizes={"data": 8}, microbatches=3)


def test_an_empty_batch_changes_nothing_into_nan() -> None:
    def weightless(params: Any, batch: Any, keys: Any) -> Any:
        return (params["v"] * 0).sum(), jnp.zeros(())

    with jax.enable_x64(True):
        _, grads, params = train(weightless, make_params(), sizes={"data": 2})
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((grads, params)))


@pytest.mark.slow
def test_the_example_of_thirty_lines_runs() -> None:
    code = [line for line in EXAMPLE.read_text().splitlines() if line.strip()]
    assert len(code) <= 30
    assert EXAMPLE.read_text() in (EXAMPLE.parents[1] / "own_loss.md").read_text()  # what is shown is what runs
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    out = done.stdout.splitlines()
    assert len(out) == 2 and all("fsdp" in line for line in out)
    assert float(out[0].split()[1]) < 1.0  # from about log 4


@pytest.mark.slow
def test_rules_say_where_parameters_rest() -> None:
    params = {"w": jnp.ones((8, 16)), "v": jnp.ones((16, 8)), "b": jnp.ones(16), "c": jnp.ones(8)}
    mesh, tx = make_mesh(fsdp=4), optax.sgd(0.1)
    rules = [("w", P("fsdp", None)), ("b", P()), ("?", P(None, "fsdp"))]
    with pytest.raises(UserError, match="c: spec .* has more entries than the shape"):
        init_state(params, tx, mesh, strategy="zero3", rules=rules)
    state = init_state(params, tx, mesh, strategy="zero3", rules=[*rules[:2], ("v", P(None, "fsdp"))])
    found = {name: leaf.sharding.spec for name, leaf in state.params.items()}
    assert found == {"w": P("fsdp", None), "b": P(None), "v": P(None, "fsdp"), "c": P("fsdp")}  # c: from its shape

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        rows = batch.shape[0]
        total = ((batch @ params["w"] @ params["v"] + params["c"]) ** 2).sum() + rows * params["b"].sum()
        return total, jnp.float32(rows)

    data, want = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32), None
    cases = ((make_mesh(), "ddp", ()), (mesh, "zero3", rules[:2]), (mesh, "zero2", rules[:1]))
    for mesh, strategy, chosen in cases:
        state = init_state(params, tx, mesh, strategy=strategy, rules=chosen)
        state, _ = make_train_step(loss, tx, mesh, strategy=strategy)(state, data)
        want = want or jax.device_get(state.params)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), jax.device_get(state.params), want)


@pytest.mark.parametrize("make", [lambda key: {"w": jnp.ones((8, 4))}, {"w": jnp.ones((8, 4))}], ids=["init", "tree"])
def test_rules_may_keep_everything_whole(make: Any) -> None:
    """A state that is whole for no such reason is refused: tests/test_messages.py."""
    mesh, tx = make_mesh(fsdp=4), optax.sgd(0.1)
    state = init_state(make, tx, mesh, strategy="zero3", rules=[("w", P())])
    step = make_train_step(lambda params, batch, keys: ((batch @ params["w"]).sum(), 8.0), tx, mesh, strategy="zero3")
    state, _ = step(state, np.ones((8, 8), np.float32))
    assert state.params["w"].sharding.is_fully_replicated


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("w", P("data"))], "rules: 'w': .*allowed: one dim over fsdp"),
        ([("*", P()), ("w", P("fsdp"))], "rules: 'w' is reached by no parameter"),
        ([("w", P(None, "fsdp"))], "w: dim 1 of .* not divisible by fsdp=4"),
    ],
)
def test_rules_that_make_no_sense(rules: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        init_state(
            {"w": jnp.ones((8, 6)), "b": jnp.ones(8)}, optax.sgd(0.1), make_mesh(fsdp=4), strategy="zero3", rules=rules
        )


@pytest.mark.parametrize("rows", [4, 3])
@pytest.mark.parametrize("as_function", [False, True])
def test_two_parameters_of_one_name_are_refused_before_training(rows: int, as_function: bool) -> None:
    """A checkpoint could not tell them apart."""
    params = {"a.b": jnp.ones(4), "a": {"b": jnp.ones(rows)}}
    with pytest.raises(UserError, match=r"^a\.b: two leaves of the tree have this path; rename a key"):
        init_state((lambda key: params) if as_function else params, optax.sgd(0.1), make_mesh(fsdp=4))


def test_an_empty_parameter_is_refused_before_training() -> None:
    """A checkpoint could not hold it."""
    params = {"w": jnp.ones(4), "heads": [jnp.ones((0, 4))]}
    with pytest.raises(UserError, match=r"^params\.heads\.0: float32\[0, 4\] is empty, which no checkpoint can hold"):
        init_state(params, optax.sgd(0.1), make_mesh(fsdp=4))


@pytest.mark.parametrize("strategy", others_slow(["zero1", "zero2", "zero3"], "zero3"))
def test_a_tree_named_like_a_model_is_none(strategy: str) -> None:
    params = {"embed": jnp.ones((8, 8)), "blocks": [{"w": jnp.ones((8, 8))}], "head": jnp.ones((8, 8))}
    mesh, tx = make_mesh(data=2, fsdp=2), optax.sgd(0.1)

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        return (batch @ params["embed"] @ params["blocks"][0]["w"] @ params["head"]).sum(), jnp.float32(8)

    state = init_state(params, tx, mesh, strategy=strategy)
    state, metrics = make_train_step(loss, tx, mesh, strategy=strategy)(state, np.ones((8, 8), np.float32))
    assert np.isfinite(metrics["loss"])


def labels_loss(params: Any, batch: Any, keys: Any) -> Any:
    """Of labels [B], one a row. Images [B, S, S, 3] are read by a product with ones, which leaves the loss near 1."""
    pixels = batch["images"].reshape(batch["images"].shape[0], -1)
    error = pixels.mean(1).astype(params["v"].dtype) * params["v"][0, :1] - batch["labels"]
    return (error**2).sum(), error.size


@pytest.mark.parametrize(
    ("weight", "strategy", "sizes", "microbatches"),
    levels(
        (
            (weight, *how)
            for weight in ("constant", "mask")
            for how in (("ddp", {}, 1), ("zero3", {"data": 2, "fsdp": 2}, 2))
        ),
        everyday=3,
    ),
)
def test_gradients_do_not_shrink_with_an_input(weight: str, strategy: str, sizes: Any, microbatches: int) -> None:
    """Pure half precision without a loss scale: a seed that went by the pixels would lose the gradient of 8 labels."""

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        total, count = labels_loss(params, batch, keys)
        return total, count if weight == "constant" else batch["mask"].sum()

    params = {"w": jnp.ones((16, 16), jnp.float16), "v": jnp.ones((1, 16), jnp.float16)}
    mesh, tx = make_mesh(**sizes), optax.sgd(0.0)
    step = make_train_step(
        loss, tx, mesh, strategy=strategy, precision="O3", microbatches=microbatches, return_grads=True
    )
    images = np.ones((8, 1024, 1024, 3), np.float16)
    batch = {"images": images, "labels": np.full(8, 0.5, np.float16), "mask": np.ones(8, np.float16)}
    _, metrics = step(init_state(params, tx, mesh, strategy=strategy), batch)
    assert float(metrics["grads"]["v"][0, 0]) == pytest.approx(1.0, rel=1e-2)  # 2 * (1 - 0.5) * 1


WEIGHTS: dict[str, Any] = {  # of 64 targets a row, in words and as a function of (targets, mask)
    "a number": lambda y, mask: y.size,
    "a sum of ones": lambda y, mask: jnp.ones_like(y).sum(),
    "a product": lambda y, mask: jnp.float32(y.shape[0]) * y.shape[1],
    "a mask": lambda y, mask: mask.sum(),
    "an empty mask, and a number": lambda y, mask: mask[:, :0].sum() + y.size,
    "nan": lambda y, mask: jnp.float32(jnp.nan),
    "0": lambda y, mask: 0,
}


@pytest.mark.parametrize("weight", levels(WEIGHTS, everyday=4))
def test_the_seed_is_one_over_the_weight(weight: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not over the rows: with 64 targets a row gradients in half precision would be 64 times too large."""
    seeds: list[float] = []
    schedule = registry.load("jaxdist.parallel.schedules", "accumulate", key="")

    def watched(*parts: Any, seed: Any, reduce_dtype: Any) -> Any:
        seeds.append(seed)
        return schedule(*parts, seed=seed, reduce_dtype=reduce_dtype)

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        return ((batch["y"] * params["v"][0, 0]) ** 2).sum(), WEIGHTS[weight](batch["y"], batch["mask"])

    params, mesh, tx = {"v": jnp.ones((1, 16))}, make_mesh(data=2, fsdp=2), optax.sgd(0.1)
    batch = {"y": np.ones((32, 64), np.float32), "mask": np.ones((32, 64), np.float32), "empty": np.ones((32, 0))}
    make_train_step(loss, tx, mesh, schedule=watched, microbatches=2)(init_state(params, tx, mesh), batch)
    rows = weight in ("nan", "0")
    assert seeds == [1 / 32 if rows else 1 / (32 * 64)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", others_slow(["fp32", "O3"], "fp32"))
def test_a_leaf_that_is_not_read_changes_no_bit(policy: str) -> None:
    results, dtype = [], jnp.float16 if policy == "O3" else jnp.float32
    for more in ({}, {"unread": np.ones((32, 4096, 2), np.float32)}):
        params = jax.tree.map(functools.partial(jnp.asarray, dtype=dtype), make_params())
        mesh, tx = make_mesh(data=2), optax.sgd(0.1)
        batch = {name: leaf.astype(dtype) for name, leaf in make_batch(0).items()} | more
        step = make_train_step(rnn_loss, tx, mesh, precision=policy, return_grads=True)
        state, metrics = step(init_state(params, tx, mesh), batch)
        results.append(jax.device_get((metrics["grads"], state.params)))
    jax.tree.map(np.testing.assert_array_equal, *results)
