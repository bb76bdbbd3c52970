"""BatchNorm in a user's loss trains like one device in every layout; what would not is refused."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import batch_norm
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from batch_norm import DEEP, SMALL, TINY, Net, Trained
from jax import lax
from jaxprs import primitive_counts
from levels import levels, others_slow
from losses import as_numpy, plain, returning, rows, steps_of, trace

import jaxdist
from jaxdist.checkpoint.manager import Checkpoints
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.errors import UserError
from jaxdist.jaxpr.dependence import depends
from jaxdist.mesh import abstract_mesh

EXACT = 1e-10
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "batch_norm.py"


@functools.cache
def reference(net: Net, devices: int = 1, microbatches: int = 1) -> Trained:
    return batch_norm.reference(net, devices=devices, microbatches=microbatches)


def compare(got: Trained, want: Trained) -> None:
    assert oracle.error(got.grads, want.grads) < EXACT
    assert oracle.error(got.params, want.params) < EXACT
    assert oracle.error(got.state["norms"], want.state["norms"]) < EXACT
    assert got.state["steps"] == want.state["steps"] == 253
    np.testing.assert_allclose(got.losses, want.losses, rtol=EXACT)
    np.testing.assert_allclose(got.accuracies, want.accuracies, rtol=EXACT)


SHAPES = ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (1, 4), (8, 1), (2, 4), (1, 8))
LAYOUTS = [
    ("small", strategy, data, fsdp, ("none", "full")[(i + j) % 2])
    for j, (data, fsdp) in enumerate(SHAPES)
    for i, strategy in enumerate(("ddp", "zero1", "zero2", "zero3"))
]
DEEPER = [("deep", "zero3", 2, 4, "full"), ("deep", "ddp", 8, 1, "none")]
DEEPER += [("deep", "zero1", 1, 2, "none"), ("deep", "zero2", 2, 2, "none")]
EVERYDAY = others_slow(
    [("tiny", "zero3", 2, 2, "full"), ("tiny", "zero1", 1, 3, "none")], ("tiny", "zero3", 2, 2, "full")
)
NETS = {"tiny": TINY, "small": SMALL, "deep": DEEP}


@pytest.mark.parametrize(
    ("net", "strategy", "data", "fsdp", "remat"),
    [*EVERYDAY, *levels(LAYOUTS, slow=44, common=11), *levels(DEEPER, slow=16, common=4)],
    ids=str,
)
def test_batch_norm_equals_one_device(net: str, strategy: str, data: int, fsdp: int, remat: str) -> None:
    with jax.enable_x64(True):
        got = batch_norm.train(NETS[net], sizes={"data": data, "fsdp": fsdp}, strategy=strategy, remat=remat)
        compare(got, reference(NETS[net]))


ACCUMULATED = [("tiny", "zero2", 1, 2, "accumulate"), ("small", "zero3", 2, 2, "accumulate")]
ACCUMULATED += [("small", "ddp", 4, 1, "pairwise"), ("small", "zero1", 1, 2, "accumulate")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "strategy", "data", "fsdp", "schedule"), levels(ACCUMULATED, everyday=8, slow=4, common=2), ids=str
)
def test_a_microbatch_has_statistics_of_its_own(net: str, strategy: str, data: int, fsdp: int, schedule: str) -> None:
    with jax.enable_x64(True):
        sizes = {"data": data, "fsdp": fsdp}
        got = batch_norm.train(NETS[net], sizes=sizes, strategy=strategy, microbatches=2, schedule=schedule)
        compare(got, reference(NETS[net], data * fsdp, 2))


@pytest.mark.slow
def test_statistics_of_a_device_are_those_of_its_rows() -> None:
    """On N devices they are those of N microbatches on one; the running statistics are the mean."""
    with jax.enable_x64(True):
        got = batch_norm.train(TINY, batch_norm.local_mean, sizes={"data": 2})
        compare(got, reference(TINY, 1, 2))


def centred(params: Any, batch: Any, keys: Any, state: Any) -> Any:
    """A loss with numbers of all kinds in its state."""
    h = batch["x"] @ params["w"]
    mean = jaxdist.batch_mean(h)
    new = {
        "mean": 0.5 * state["mean"] + 0.5 * mean,
        "kept": state["kept"],
        "exact": state["exact"],
        "weight": params["w"].sum(0) / 3,
        "count": state["count"] + 1,
        "small": state["small"] - 1,
        "odd": ~state["odd"],
    }
    return ((h - mean) ** 2).sum(), h.shape[0], {"size": (jnp.abs(h).sum(), h.size)}, new


# Sums of three of these overflow, round or lose a sign.
EXACTLY = np.array([np.finfo(np.float32).max, 0.1, 1 / 3, -0.0, np.inf, np.nan, 1e-45, *np.linspace(1, 2, 57)], "f4")


def numbers() -> Any:
    return {
        "mean": np.zeros(4, np.float32),
        "kept": jnp.full((2,), 3.25, jnp.bfloat16),
        "exact": EXACTLY,
        "weight": np.zeros(4, np.float32),
        "count": jnp.int32(2**30 + 7),
        "small": jnp.array([-128, 5], jnp.int8),
        "odd": jnp.array(True),
    }


@pytest.fixture(scope="module")
def counted() -> tuple[Any, Any, Any]:
    """(state, its model_state, step), compiled once for this module."""
    given = numbers()
    state, step = steps_of(centred, given, microbatches=3)
    state, _ = step(state, rows(0))
    assert not given["count"].is_deleted()
    return state, as_numpy(state.model_state), step


def copy(state: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.device_put(jnp.array(leaf), leaf.sharding), state)


def test_a_state_keeps_its_numbers(counted: tuple[Any, Any, Any]) -> None:
    _, found, _ = counted
    np.testing.assert_allclose(found["mean"], 0.5 * (rows(0)["x"] @ np.ones((2, 4), np.float32)).mean(0), rtol=1e-5)
    for name, want in numbers().items():
        assert found[name].dtype == want.dtype
    assert found["count"] == 2**30 + 8
    assert found["small"].tolist() == [127, 4]
    assert found["kept"].tolist() == [3.25] * 2
    assert found["exact"].tobytes() == EXACTLY.tobytes()
    np.testing.assert_array_equal(found["weight"], np.full(4, 2, np.float32) / np.float32(3))
    assert not found["odd"]


def test_a_skipped_step_leaves_the_state(counted: tuple[Any, Any, Any]) -> None:
    state, before, step = counted
    after, metrics = step(copy(state), {"x": np.full((12, 2), np.nan, np.float32)})
    assert int(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, as_numpy(after.model_state), before)


def test_metrics_stand_beside_those_of_the_step(counted: tuple[Any, Any, Any]) -> None:
    state, _, step = counted
    want = np.abs(rows(1)["x"] @ as_numpy(state.params)["w"]).mean()
    _, metrics = step(copy(state), rows(1))
    assert float(metrics["size"]) == pytest.approx(want, rel=1e-5)
    assert set(metrics) == {"loss", "weight", "grad_norm", "skipped", "skipped_in_a_row", "size"}


@pytest.mark.slow
def test_a_state_is_saved_and_restored(counted: tuple[Any, Any, Any], tmp_path: Path) -> None:
    state, _, step = counted
    mesh, tx = jaxdist.make_mesh(fsdp=2), optax.sgd(0.1)
    target = jaxdist.state_target({"w": jnp.ones((2, 4))}, tx, mesh, model_state=numbers(), strategy="zero3")
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        restored = checkpoints.restore(1, target)
        without = jaxdist.state_target({"w": jnp.ones((2, 4))}, tx, mesh)
        with pytest.raises(UserError, match="model_state.count is only in the checkpoint; give .*model_state="):
            checkpoints.restore(1, without)
        checkpoints.save(2, state._replace(model_state=()), {})
        checkpoints.wait()
        with pytest.raises(UserError, match="model_state.count is only in this configuration; give .*model_state="):
            checkpoints.restore(2, target)
    jax.tree.map(np.testing.assert_array_equal, as_numpy(restored.model_state), as_numpy(state.model_state))
    assert restored.model_state["mean"].sharding == target.model_state["mean"].sharding
    want = as_numpy(step(copy(state), rows(1))[0].model_state)
    other = jaxdist.make_train_step(centred, tx, mesh, strategy="zero3", microbatches=3)
    got = as_numpy(other(restored, rows(1))[0].model_state)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, want)


def test_a_deterministic_step_has_no_batch_mean() -> None:
    with pytest.raises(UserError, match="grad_sync.deterministic: a loss with batch_mean"):
        trace(centred, numbers(), grad_sync=GradSync(deterministic=True, virtual_shards=2))


def test_without_metrics_and_state_a_step_has_no_operation_more() -> None:
    program = lambda *more: str(trace(lambda *given: (*plain(*given), *more)).jaxpr)  # noqa: E731
    assert program() == program({})
    counts = primitive_counts(trace(plain).jaxpr)
    assert counts["psum"] == 2  # loss and weight; gradients
    assert not counts["bitcast_convert_type"]


def test_sums_of_batch_means_are_in_the_ledger() -> None:
    mesh, tx = abstract_mesh(data=2, fsdp=2), optax.sgd(0.1)

    def loss(params: Any, batch: Any, keys: Any, state: Any) -> Any:
        h = batch["x"] @ params["w"]
        h = jnp.tanh(h - jaxdist.batch_mean(h))
        return h.sum(), h.shape[0], {}, jaxdist.batch_mean(h, sync=False)

    target = jaxdist.state_target({"w": jnp.ones((2, 4))}, tx, mesh, model_state=np.zeros(4, np.float32))
    batch = {"x": jax.ShapeDtypeStruct((12, 2), jnp.float32)}
    found = jaxdist.ledger(jaxdist.make_train_step(loss, tx, mesh), target, batch)
    told = {(each.phase, each.purpose): each for each in found.collectives}
    forward = told["forward", "activations of jaxdist.batch_mean"]
    backward = told["backward", "gradients of activations of jaxdist.batch_mean"]
    assert forward.axes == backward.axes == ("data", "fsdp")
    assert forward.bytes_per_call == backward.bytes_per_call == 16
    assert forward.source == backward.source
    assert forward.source.startswith(Path(__file__).name)
    assert told["once a step", "model_state"].axes == ("data", "fsdp")


def test_a_function_that_was_traced_before_is_traced_again() -> None:
    """`jax.jit` keeps what it has traced: for a check, in which no mean is a sum over devices, and outside of steps."""
    mean = jax.jit(jaxdist.batch_mean)
    assert mean(jnp.arange(12.0)) == 5.5
    loss = returning(lambda h: (((h - mean(h)) ** 2).sum(), h.shape[0]))
    assert primitive_counts(trace(loss).jaxpr)["psum"] == 4  # of the mean and its gradient; those of every step
    assert mean(jnp.arange(12.0)) == 5.5


def test_a_batch_mean_outside_of_a_loss_is_plain() -> None:
    x = np.random.default_rng(0).normal(size=(6, 4, 5)).astype(np.float16)
    weight = np.array([1, 0, 2, 0.5, 0, 1])
    found = jaxdist.batch_mean(jnp.asarray(x), jnp.asarray(weight, jnp.float32), axis=(0, -1))
    assert found.dtype == jnp.float32
    want = np.average(x.astype(np.float32).mean(-1), axis=0, weights=weight)
    np.testing.assert_allclose(found, want, rtol=1e-5)
    assert jaxdist.batch_mean(jnp.arange(4) > 1) == 0.5
    assert jaxdist.batch_mean(jnp.ones(4), jnp.zeros(4)) == 0
    with pytest.raises(UserError, match=r"weight has shape \(4,\), x \(6, 4, 5\); allowed: .*\(6,\)"):
        jaxdist.batch_mean(jnp.asarray(x), jnp.ones(4))


def test_dependence_is_followed_through_loops_and_branches() -> None:
    def run(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
        (x, y), rows = lax.scan(lambda carry, row: ((carry[1], carry[1] * c), row), (a, b), jnp.ones(3))
        left, right = lax.cond(c > 0, lambda: (a, c), lambda: (c, c))
        last = lax.while_loop(lambda v: v < b, lambda v: v + 1, c)
        return x, y, rows, *jax.jit(lambda v: (v, b))(a), left, right, last

    jaxpr, one = jax.make_jaxpr(run)(1.0, 1.0, 1.0), lambda *marked: depends(jaxpr, marked)
    assert one(True, False, False) == [False, False, False, True, False, True, False, False]
    assert one(False, True, False) == [True, True, False, False, True, False, False, True]
    assert one(False, False, True) == [True, True, False, False, False, True, True, True]


def test_the_page_shows_the_example() -> None:
    assert EXAMPLE.read_text() in (EXAMPLE.parents[1] / "own_loss.md").read_text()


@pytest.mark.slow
def test_the_example_runs() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert [float(line.rpartition(" ")[2]) > 0.95 for line in done.stdout.splitlines()] == [True, True]
