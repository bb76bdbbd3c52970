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
from levels import levels

import jaxdist
from jaxdist.checkpoint.manager import Checkpoints
from jaxdist.config.grad_sync import GradSync
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
EVERYDAY = [pytest.param("tiny", "zero3", 2, 2, "full"), pytest.param("tiny", "zero1", 1, 3, "none")]
NETS = {"tiny": TINY, "small": SMALL, "deep": DEEP}


@pytest.mark.parametrize(
    ("net", "strategy", "data", "fsdp", "remat"),
    [*EVERYDAY, *levels(LAYOUTS, slow=11), *levels(DEEPER, slow=4)],
    ids=str,
)
def test_batch_norm_equals_one_device(net: str, strategy: str, data: int, fsdp: int, remat: str) -> None:
    with jax.enable_x64(True):
        got = batch_norm.train(NETS[net], sizes={"data": data, "fsdp": fsdp}, strategy=strategy, remat=remat)
        compare(got, reference(NETS[net]))


ACCUMULATED = [("tiny", "zero2", 1, 2, "accumulate"), ("small", "zero3", 2, 2, "accumulate")]
ACCUMULATED += [("small", "ddp", 4, 1, "pairwise"), ("small", "zero1", 1, 2, "accumulate")]


@pytest.mark.parametrize(
    ("net", "strategy", "data", "fsdp", "schedule"), levels(ACCUMULATED, everyday=4, slow=2), ids=str
)
def test_a_microbatch_has_statistics_of_its_own(net: str, strategy: str, data: int, fsdp: int, schedule: str) -> None:
    with jax.enable_x64(True):
        sizes = {"data": data, "fsdp": fsdp}
        got = batch_norm.train(NETS[net], sizes=sizes, strategy=strategy, microbatches=2, schedule=schedule)
        compare(got, reference(NETS[net], data * fsdp, 2))


def test_statistics_of_a_device_are_those_of_its_rows() -> None:
    """On N devices they are those of N microbatches on one; the running statistics are the mean."""
    with jax.enable_x64(True):
        got = batch_norm.train(TINY, batch_norm.local_mean, sizes={"data": 2})
        compare(got, reference(TINY, 1, 2))


def steps_of(loss: Any, model_state: Any, *, params: Any = None, sizes: Any = None, **options: Any) -> tuple[Any, Any]:
    """(state, step) of a user's loss."""
    mesh, tx = jaxdist.make_mesh(**(sizes or {"data": 2})), optax.sgd(0.1)
    params = {"w": jnp.ones((2, 4))} if params is None else params
    state = jaxdist.init_state(params, tx, mesh, model_state=model_state)
    return state, jaxdist.make_train_step(loss, tx, mesh, **options)


def centred(params: Any, batch: Any, keys: Any, state: Any) -> Any:
    """A loss with numbers of all kinds in its state."""
    h = batch["x"] @ params["w"]
    mean = jaxdist.batch_mean(h)
    new = {
        "mean": 0.5 * state["mean"] + 0.5 * mean,
        "kept": state["kept"],
        "count": state["count"] + 1,
        "small": state["small"] - 1,
        "odd": ~state["odd"],
    }
    return ((h - mean) ** 2).sum(), h.shape[0], {"size": (jnp.abs(h).sum(), h.size)}, new


def numbers() -> Any:
    return {
        "mean": np.zeros(4, np.float32),
        "kept": jnp.full((2,), 3.25, jnp.bfloat16),
        "count": jnp.int32(2**30 + 7),
        "small": jnp.array([-128, 5], jnp.int8),
        "odd": jnp.array(True),
    }


def rows(step: int) -> Any:
    return {"x": np.random.default_rng(step).normal(size=(12, 2)).astype(np.float32)}


def as_numpy(tree: Any) -> Any:
    return jax.tree.map(np.array, jax.device_get(tree))  # copies: the step is given the arrays


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


def test_a_state_is_saved_and_restored(counted: tuple[Any, Any, Any], tmp_path: Path) -> None:
    state, _, step = counted
    mesh, tx = jaxdist.make_mesh(fsdp=2), optax.sgd(0.1)
    target = jaxdist.state_target({"w": jnp.ones((2, 4))}, tx, mesh, model_state=numbers(), strategy="zero3")
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        restored = checkpoints.restore(1, target)
        without = jaxdist.state_target({"w": jnp.ones((2, 4))}, tx, mesh)
        with pytest.raises(UserError, match="model_state.count is only in the checkpoint"):
            checkpoints.restore(1, without)
    jax.tree.map(np.testing.assert_array_equal, as_numpy(restored.model_state), as_numpy(state.model_state))
    assert restored.model_state["mean"].sharding == target.model_state["mean"].sharding
    want = as_numpy(step(copy(state), rows(1))[0].model_state)
    other = jaxdist.make_train_step(centred, tx, mesh, strategy="zero3", microbatches=3)
    got = as_numpy(other(restored, rows(1))[0].model_state)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, want)


def trace(loss: Any, model_state: Any = (), *, sizes: Any = None, **options: Any) -> Any:
    """The traced step of a loss, on devices that are not there."""
    mesh, tx = abstract_mesh(**(sizes or {"data": 2})), optax.sgd(0.1)
    target = jaxdist.state_target({"w": jnp.ones((2, 4))}, tx, mesh, model_state=model_state)
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), rows(0))
    return jaxdist.make_train_step(loss, tx, mesh, **options).jitted(target).trace(target, batch)


def plain(params: Any, batch: Any, keys: Any) -> Any:
    h = batch["x"] @ params["w"]
    return (h**2).sum(), h.shape[0]


def stateful(new: Any) -> Any:
    """A loss whose new state is new(h, keys, state)."""

    def loss(params: Any, batch: Any, keys: Any, state: Any) -> Any:
        h = batch["x"] @ params["w"]
        return (h**2).sum(), h.shape[0], {}, new(h, keys, state)

    return loss


def returning(result: Any) -> Any:
    """A loss that returns result(h)."""
    return lambda params, batch, keys: result(batch["x"] @ params["w"])


def in_condition(h: jax.Array, keys: Any, state: Any) -> Any:
    return lax.cond(h[0, 0] > 0, lambda: jaxdist.batch_mean(h), lambda: state)


ZEROS, MEANS = np.zeros(4, np.float32), "allowed: .*correct.sum"
REFUSED: dict[str, tuple[Any, Any, str]] = {  # a loss, its model_state, the message
    "local": (
        stateful(lambda h, keys, state: state + h.mean(0)),
        ZEROS,
        "model_state is computed from this device.* jaxdist.batch_mean",
    ),
    "local in a scan": (
        stateful(lambda h, keys, state: lax.scan(lambda total, row: (total + row, None), state, h)[0]),
        ZEROS,
        "from this device",
    ),
    "by keys": (stateful(lambda h, keys, state: jax.random.normal(keys[0], (4,))), ZEROS, "rows or keys"),
    "a count of rows": (
        stateful(lambda h, keys, state: state + (h > 0).sum(dtype=jnp.int32)),
        jnp.int32(0),
        "int32, and is computed from the batch",
    ),
    "a count of means": (
        stateful(lambda h, keys, state: jaxdist.batch_mean(h).sum().astype(jnp.int32)),
        jnp.int32(0),
        "int32, and is computed from the batch",
    ),
    "in a condition": (stateful(in_condition), ZEROS, "batch_mean in a cond"),
    "another shape": (stateful(lambda h, keys, state: state[:2]), ZEROS, r"given as float32\[4\] .* as float32\[2\]"),
    "another dtype": (stateful(lambda h, keys, state: state.astype(jnp.bfloat16)), ZEROS, r"returned as bfloat16\[4\]"),
    "another leaf": (stateful(lambda h, keys, state: {"n": state["m"]}), {"m": ZEROS}, "model_state.m was only given"),
    "another tree": (stateful(lambda h, keys, state: list(state)), (ZEROS,), "another kind of tree"),
    "no new state": (lambda params, batch, keys, state: plain(params, batch, keys), ZEROS, "returned 2 values"),
    "no old state": (lambda params, batch, keys: (*plain(params, batch, keys), {}, 0), (), "has no model_state"),
    "a state not taken": (plain, ZEROS, r"is called with \(params, batch, keys, model_state\)"),
    "a state not given": (stateful(lambda *_: 0), (), r"give it to init_state\(..., model_state=\)"),
    "no keys": (lambda params, batch: plain(params, batch, None), (), r"write def loss_fn\(params, batch, keys\)"),
    "keys in the state": (plain, {"rng": jax.random.key(0)}, "model_state.rng: .*random keys are no state"),
    "Flax's form": (returning(lambda h: ((h.sum(), 12), {"size": h})), (), MEANS),
    "a mean and aux": (returning(lambda h: (h.mean(), {"size": (h.sum(), h.size)})), (), MEANS),
    "a mean": (returning(lambda h: h.mean()), (), "must return two scalars"),
    "rows": (returning(lambda h: (h, h.size)), (), "must return two scalars"),
    "metrics in a list": (
        returning(lambda h: (h.sum(), h.size, [h.sum()])),
        (),
        "third value is of type list.*" + MEANS,
    ),
    "three numbers": (returning(lambda h: (h.sum(), 1.0, 2.0)), (), "third value is of type float"),
    "a metric's mean": (returning(lambda h: (h.sum(), h.size, {"size": h.mean()})), (), "'size' must be two scalars"),
    "a metric's rows": (returning(lambda h: (h.sum(), h.size, {"size": (h, 1)})), (), "'size' must be two scalars"),
    "a name of a metric": (returning(lambda h: (h.sum(), h.size, {"loss": (h.sum(), 1)})), (), "'loss' is jaxdist's"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_loss_may_not_do_is_one_line(case: str) -> None:
    loss, model_state, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as found:
        trace(loss, model_state)
    assert "\n" not in str(found.value)


def test_a_deterministic_step_has_no_batch_mean() -> None:
    with pytest.raises(UserError, match="grad_sync.deterministic: a loss with batch_mean"):
        trace(centred, numbers(), grad_sync=GradSync(deterministic=True, virtual_shards=2))


def test_a_collective_in_a_metric_is_refused_too() -> None:
    with pytest.raises(UserError, match="contains psum over data"):
        trace(returning(lambda h: (h.sum(), h.size, {"size": (lax.psum(h.sum(), "data"), 1)})))


def test_without_metrics_and_state_a_step_has_no_operation_more() -> None:
    program = lambda *more: str(trace(lambda *given: (*plain(*given), *more)).jaxpr)  # noqa: E731
    assert program() == program({})
    counts = primitive_counts(trace(plain).jaxpr)
    assert counts["psum"] == 2  # loss and weight; gradients
    assert not counts["bitcast_convert_type"]


def test_a_model_has_no_model_state() -> None:
    from jaxdist.config.schema import ModelConfig
    from jaxdist.models.gpt import gpt

    config = ModelConfig(layers=1, width=8, heads=2, vocab=8, mlp_width=8).resolved()
    with pytest.raises(UserError, match="model_state: a ModelDef has none"):
        jaxdist.state_target(
            gpt(config, max_length=8, param_dtype=jnp.float32), optax.sgd(0.1), abstract_mesh(), model_state=ZEROS
        )


def test_sums_of_batch_means_are_in_the_ledger() -> None:
    mesh, tx = abstract_mesh(data=2, fsdp=2), optax.sgd(0.1)

    def loss(params: Any, batch: Any, keys: Any, state: Any) -> Any:
        h = batch["x"] @ params["w"]
        h = jnp.tanh(h - jaxdist.batch_mean(h))
        return h.sum(), h.shape[0], {}, jaxdist.batch_mean(h, sync=False)

    target = jaxdist.state_target({"w": jnp.ones((2, 4))}, tx, mesh, model_state=ZEROS)
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


def test_a_batch_mean_in_a_region_of_ones_own_is_refused() -> None:
    mesh = jaxdist.make_mesh(data=2)
    own = jax.shard_map(jaxdist.batch_mean, mesh=mesh, in_specs=jaxdist.BATCH_SPEC, out_specs=jaxdist.BATCH_SPEC)
    with pytest.raises(UserError, match="batch_mean: called in a shard_map over data"):
        own(jnp.ones((4, 2)))


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
