"""NNX, Linen, Equinox and plain pytrees in 15 lines: ZeRO-3, accumulation, metrics, state, saving and resuming."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jaxdist
from jaxdist.checkpoint import Checkpoints

try:
    import equinox as eqx
except ImportError:
    eqx = None

LINES = 15


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(4, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(16, momentum=0.9, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(linen.Dense(16)(x))
        return linen.Dense(3)(linen.Dropout(0.1, deterministic=not train)(linen.relu(x)))


def equinox_net() -> Any:
    up, down = (eqx.nn.Linear(*sizes, key=jax.random.key(0)) for sizes in ((4, 16), (16, 3)))
    return eqx.nn.Sequential([up, eqx.nn.Lambda(jax.nn.relu), eqx.nn.Dropout(0.1), down])


def scored(logits: jax.Array, y: jax.Array) -> Any:
    """(sum, weight, metrics) of a classification."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return losses.sum(), losses.size, {"accuracy": ((logits.argmax(-1) == y).sum(), losses.size)}


def make_batch(step: int) -> Any:
    x = np.random.default_rng(step).normal(size=(16, 4)).astype(np.float32)
    return {"x": x, "y": (x[:, 0] > 0) + (x[:, 1] > 0).astype(np.int32)}


# What a user writes: one of these, (what init_state takes, the loss, the model_state), and `train`.


def nnx_family() -> Any:
    loss = jaxdist.nnx_loss(NnxNet(nnx.Rngs(0)), lambda model, batch: scored(model(batch["x"]), batch["y"]))
    return loss, loss, ()


def linen_family() -> Any:
    module = LinenNet()
    variables = module.init(jax.random.key(0), jnp.zeros((1, 4)), train=False)
    loss = jaxdist.linen_loss(module, variables, lambda model, batch: scored(model(batch["x"], True), batch["y"]))
    return loss, loss, ()


def equinox_family() -> Any:
    params, static = eqx.partition(equinox_net(), eqx.is_inexact_array)

    def loss(params: Any, batch: Any, keys: jax.Array, running: Any) -> Any:
        mean = jaxdist.batch_mean(batch["x"])
        logits = jax.vmap(eqx.combine(params, static))(batch["x"] - mean, key=keys)
        return *scored(logits, batch["y"]), 0.9 * running + 0.1 * mean

    return params, loss, jnp.zeros(4)


def plain_family() -> Any:
    params = {"up": jnp.eye(4, 16), "down": jnp.ones((16, 3))}

    def loss(params: Any, batch: Any, keys: jax.Array, running: Any) -> Any:
        mean = jaxdist.batch_mean(batch["x"])
        logits = jax.nn.relu((batch["x"] - mean) @ params["up"]) @ params["down"]
        return *scored(logits, batch["y"]), 0.9 * running + 0.1 * mean

    return params, loss, jnp.zeros(4)


def train(params: Any, loss: Any, model_state: Any, folder: Path, stop: int, step: Any = None) -> Any:
    mesh, adamw, zero3 = jaxdist.make_mesh(fsdp=2), optax.adamw(1e-2), {"strategy": "zero3"}
    step = step or jaxdist.make_train_step(loss, adamw, mesh, microbatches=2, **zero3)
    state = jaxdist.init_state(params, adamw, mesh, model_state=model_state, **zero3)
    with Checkpoints(folder, keep=1) as saved:
        state = saved.restore(saved.latest(), state) if saved.latest() else state
        for i in range(int(state.step), stop):
            state, metrics = step(state, make_batch(i))
        saved.save(stop, state, {})
    return state, metrics, step


def user_lines(function: Callable[..., Any]) -> int:
    """Lines of its body, without what it returns to the test."""
    body = inspect.getsource(function).rpartition("    return ")[0].splitlines()[1:]
    return sum(bool(line.strip()) for line in body)


FAMILIES = [nnx_family, linen_family, equinox_family, plain_family]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_trains_is_saved_and_resumed(family: Callable[[], Any], tmp_path: Path) -> None:
    if family is equinox_family and eqx is None:
        pytest.skip("equinox is not installed: its family of models is not tested")
    given = family()
    _, first, step = train(*given, tmp_path / "one", 2)
    resumed, metrics, _ = train(*given, tmp_path / "one", 4, step)
    state, want, _ = train(*given, tmp_path / "another", 4, step)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed), jax.device_get(state))
    assert {name: float(value) for name, value in metrics.items()} == {name: float(want[name]) for name in metrics}
    assert float(metrics["loss"]) < float(first["loss"])
    assert 0 < float(metrics["accuracy"]) <= 1
    sharded = [leaf for leaf in jax.tree.leaves(state.params) if not leaf.sharding.is_fully_replicated]
    assert sharded
    assert any(np.any(leaf) for leaf in jax.tree.leaves(jax.device_get(state.model_state)))


@pytest.mark.parametrize("family", FAMILIES)
def test_it_takes_few_lines(family: Callable[[], Any]) -> None:
    """Without imports, data and the module itself; `scored` has two."""
    assert user_lines(family) + user_lines(train) + 2 <= LINES
