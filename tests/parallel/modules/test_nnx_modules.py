"""Losses of NNX modules: their random streams and variables, and a module that is given back."""

import os
from pathlib import Path
from typing import Any

import child
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jobs import Processes, free_port
from own_modules import called, nnx_of, squared, trained, with_layer

import jaxdist


@pytest.mark.slow
def test_a_module_is_given_back_and_evaluated_by_its_running_statistics() -> None:
    model, mesh, x = with_layer(nnx.BatchNorm), jaxdist.make_mesh(fsdp=2), np.eye(4, dtype=np.float32)
    loss = jaxdist.nnx_loss(model, squared)
    state = jaxdist.init_state(loss, optax.sgd(0.1), mesh, strategy="zero3")
    moved = jax.tree.map(lambda leaf: leaf + 0.5, (state.params, state.model_state))
    state = state._replace(params=moved[0], model_state=moved[1])
    assert jaxdist.nnx_update(model, state) is model
    total, _, _, same = loss.evaluation(state.params, x, None, state.model_state)
    assert float(total) == pytest.approx(float((nnx.view(model, use_running_average=True)(x) ** 2).sum()), rel=1e-5)
    jax.tree.map(np.testing.assert_array_equal, same, jax.device_get(state.model_state))
    assert all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(nnx.state(model)))


@pytest.mark.parametrize("writeable", [True, False])
def test_numpy_arrays_of_the_caller_stay_as_they_are(writeable: bool) -> None:
    loss = jaxdist.nnx_loss(with_layer(nnx.BatchNorm), squared)
    params, model_state = jax.tree.map(np.array, (loss.params, loss.model_state))
    jax.tree.map(lambda leaf: leaf.setflags(write=writeable), model_state)
    *_, new = loss(params, np.eye(4, dtype=np.float32), None, model_state)
    jax.tree.map(np.testing.assert_array_equal, model_state, jax.device_get(loss.model_state))
    assert not np.array_equal(*(jax.tree.leaves(tree)[0] for tree in (new, model_state)))


class Streams(nnx.Module):
    """Streams by themselves: of a name, of another, and of two layers that are stacked."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w, self.rngs = nnx.Param(jnp.ones(3)), rngs
        self.stacked = rngs.split(2)

    def __call__(self) -> jax.Array:
        drawn = jnp.stack([self.rngs.dropout.uniform(), self.rngs.dropout.uniform(), self.rngs.noise.uniform()])
        return jnp.concatenate([drawn, jax.vmap(jax.random.uniform)(self.stacked.dropout.key[...])])


def test_each_stream_has_a_key_of_its_own() -> None:
    model = Streams(nnx.Rngs(dropout=0, noise=0))
    before = model.rngs.dropout.count[...]
    loss = jaxdist.nnx_loss(
        model, lambda model, batch: (model().sum(), 1.0, {f"{i}": (x, 1.0) for i, x in enumerate(model())})
    )
    keys = jax.random.split(jax.random.key(3), 2)
    drawn = [[float(pair[0]) for pair in loss(loss.params, (), own)[2].values()] for own in (keys, keys[1:])]
    assert len({*drawn[0], *drawn[1]}) == 10
    assert model.rngs.dropout.count[...] == before


@pytest.mark.parametrize("per_sample", [False, True])
def test_a_function_may_ask_for_the_keys(per_sample: bool) -> None:
    def fn(model: Any, batch: Any, keys: jax.Array) -> Any:
        return jax.vmap(jax.random.uniform)(keys).sum() + model(batch).sum(), len(batch)

    model, keys = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0)), jax.random.split(jax.random.key(0), 5)
    loss = jaxdist.nnx_loss(model, fn, per_sample=per_sample)
    total, weight = loss(loss.params, jnp.zeros((5, 3)), keys)
    assert float(total) == pytest.approx(float(jax.vmap(jax.random.uniform)(keys).sum()))
    assert int(weight) == 5


class ScaledNorm(nnx.BatchNorm):
    """A subclass with an attribute of a name that an option of `nnx_loss` has."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sync = 0.5

    def __call__(self, x: jax.Array, *args: Any, **options: Any) -> jax.Array:
        return super().__call__(x, *args, **options) * self.sync


class Trees(nnx.Module):
    """Variables that hold dicts, and an intermediate of `__init__`."""

    def __init__(self) -> None:
        self.w, self.seen = nnx.Param({"x": jnp.ones(4)}), nnx.Variable({"n": jnp.zeros(()), "m": jnp.zeros(2)})
        self.last = nnx.Intermediate(jnp.zeros(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen.set_value({"n": self.seen.get_value()["n"] + 1, "m": self.seen.get_value()["m"]})
        self.last.set_value(x.sum(0))
        return x * self.w.get_value()["x"] + 0 * self.last[...]


def test_a_subclass_of_batch_norm_keeps_its_attributes() -> None:
    want = squared(with_layer(ScaledNorm), jnp.arange(32.0).reshape(8, 4))[0]
    assert float(called(nnx_of(ScaledNorm))[0]) == pytest.approx(float(want))


def test_variables_may_hold_dicts() -> None:
    model, mesh = Trees(), jaxdist.make_mesh(fsdp=2)
    loss = jaxdist.nnx_loss(model, squared)
    assert called(loss)[-1]["seen"]["n"] == 1
    state = jaxdist.init_state(loss, optax.sgd(0.1), mesh)
    state = state._replace(model_state=jax.tree.map(lambda leaf: leaf + 2, state.model_state))
    assert jaxdist.nnx_update(model, state).seen.get_value()["n"] == 2


def test_an_update_keeps_the_dtypes_of_the_module() -> None:
    model = nnx.Linear(2, 3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    state = jaxdist.TrainState(0, {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, (), model_state={})
    assert jaxdist.nnx_update(model, state).kernel.dtype == jnp.bfloat16


TWO = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
from own_modules import trained
print("found", *trained(), flush=True)
"""


@pytest.mark.slow
def test_two_processes_are_given_the_same_module(tmp_path: Path) -> None:
    """Their shards are gathered; each has the whole module on a device of its own."""
    processes, port = Processes(tmp_path), free_port()
    here = os.pathsep.join([child.environment()["PYTHONPATH"], str(child.ROOT / "tests")])
    for rank in range(2):
        processes.add(["-c", TWO, str(port), str(rank)], {"PYTHONPATH": here})
    try:
        assert processes.wait(120) == [0, 0], processes.logs()
    finally:
        processes.kill()
    for rank in range(2):
        (line,) = [each for each in processes.out(rank).splitlines() if each.startswith("found")]
        np.testing.assert_allclose([float(each) for each in line.split()[1:]], trained(), rtol=1e-4, atol=1e-5)
