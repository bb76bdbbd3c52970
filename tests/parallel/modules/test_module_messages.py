"""What does not fit a loss of a module is one line; the page shows an example that runs."""

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import child
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from own_modules import Dropped, LinenNet, LocalNorm, called, linen_loss, masks, nnx_of, squared, traced, with_layer

import jaxdist
from jaxdist.errors import UserError
from jaxdist.mesh import abstract_mesh


class Makes(nnx.Module):
    """It makes a variable of this kind in a call."""

    def __init__(self, kind: Any) -> None:
        self.w, self.kind = nnx.Param(jnp.ones(4)), kind

    def __call__(self, x: jax.Array) -> jax.Array:
        self.last = self.kind(x.sum())
        return x * self.w[...]


class Sows(linen.Module):
    """It sows into this collection."""

    name_of_collection: str

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow(self.name_of_collection, "h", (x**2).mean())
        return linen.Dense(2)(x)


def sown(name: str) -> Any:
    module = Sows(name)
    return called(jaxdist.linen_loss(module, module.init(jax.random.key(0), jnp.ones((1, 4))), squared))


def raised(make: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as found:
        make()
    assert "\n" not in str(found.value)
    return str(found.value)


ones = nnx.initializers.ones
PARAMS = {"w": jnp.ones((4, 4))}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a class": (
        lambda: jaxdist.nnx_loss(Dropped, squared),
        "module is the class Dropped; allowed: an nnx.Module that is made",
    ),
    "a Linen module": (lambda: jaxdist.nnx_loss(LinenNet(), squared), "nnx_loss: module is a LinenNet"),
    "no variables": (lambda: jaxdist.linen_loss(LinenNet(), {}, squared), "linen_loss: variables has nothing"),
    "NNX for Linen": (
        lambda: jaxdist.linen_loss(with_layer(nnx.Dropout), {"params": PARAMS}, squared),
        "linen_loss: module is a Sequential; allowed: a linen.Module that is made",
    ),
    "a Linen class": (
        lambda: jaxdist.linen_loss(LinenNet, {"params": PARAMS}, squared),
        "linen_loss: module is the class LinenNet",
    ),
    "parameters alone": (
        lambda: called(jaxdist.linen_loss(LinenNet(rate=0.0), {"params": linen_loss().params}, squared)),
        r"variables hold no batch_stats of BatchNorm_0; allowed: all that module.init\(key, x\) returns",
    ),
    "what is sown elsewhere": (
        lambda: sown("losses"),
        "a call adds to the collection losses.*return it from __call__, and leave losses out of variables",
    ),
    "a variable made in a call": (
        lambda: called(jaxdist.nnx_loss(Makes(nnx.BatchStat), squared)),
        "variable last is made or removed in a call.*make it in __init__, or sow it",
    ),
    "a parameter made in a call": (
        lambda: called(jaxdist.nnx_loss(Makes(nnx.Param), squared)),
        "variable last is made or removed in a call",
    ),
    "a parameter of integers": (
        lambda: jaxdist.nnx_loss(nnx.Linear(2, 2, param_dtype=jnp.int32, kernel_init=ones, rngs=nnx.Rngs(0)), squared),
        "params.bias is int32; allowed: floating-point parameters",
    ),
    "no module to update": (
        lambda: jaxdist.nnx_update(LinenNet(), jaxdist.TrainState(0, PARAMS, ())),
        "nnx_update: module is a LinenNet; allowed: the nnx.Module that nnx_loss was given",
    ),
    "a class to update": (
        lambda: jaxdist.nnx_update(nnx.Linear, jaxdist.TrainState(0, PARAMS, ())),
        "nnx_update: module is the class Linear",
    ),
    "a stream that is not given": (
        lambda: masks({"noise": True}, "noise"),
        r"a random stream 'noise'; given: dropout; add it: .*streams=\('dropout', 'noise'\)",
    ),
    "a stream without keys": (lambda: masks({"dropout": True}, seeded=False), "no keys are given; give keys"),
    "statistics of a layer of one's own": (
        lambda: trace(nnx_of(LocalNorm)),
        r"model_state.layers.1.mean is computed from this device.*jaxdist.batch_mean",
    ),
    "the same, per sample": (
        lambda: trace(nnx_of(LocalNorm, per_sample=True)),
        r"model_state.layers.1.mean is computed from this device.*jaxdist.batch_mean",
    ),
    "axis_name": (
        lambda: trace(nnx_of(functools.partial(nnx.BatchNorm, axis_name="data"))),
        "BatchNorm: axis_name='data'.*allowed: None",
    ),
    "no mode": (
        lambda: trace(nnx_of(functools.partial(nnx.BatchNorm, use_running_average=None))),
        r"use_running_average is None; call module.train\(\)",
    ),
    "a state that is not given": (
        lambda: trace(nnx_of(nnx.BatchNorm), source=nnx_of(nnx.BatchNorm).params),
        r"the module has state \(layers.1.mean\).*init_state\(loss, optimizer, mesh\)",
    ),
    "a module as parameters": (
        lambda: trace(nnx_of(nnx.BatchNorm), source=with_layer(nnx.BatchNorm)),
        r"params: holds a Sequential of Flax NNX; .*loss = jaxdist.nnx_loss\(module, fn\)",
    ),
    "statistics as parameters": (
        lambda: trace(nnx_of(nnx.BatchNorm), source=nnx.state(with_layer(nnx.BatchNorm))),
        "params: holds a BatchStat of Flax NNX",
    ),
    "a mean": (
        lambda: trace(jaxdist.nnx_loss(with_layer(nnx.BatchNorm), lambda model, batch: model(batch).mean())),
        "must return two scalars",
    ),
    "a mean, per sample": (
        lambda: trace(jaxdist.nnx_loss(with_layer(nnx.Dropout), lambda *_: jnp.ones(()), per_sample=True)),
        "must return two scalars",
    ),
    "another module's state": (
        lambda: jaxdist.nnx_update(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jaxdist.TrainState(0, PARAMS, ())),
        r"nnx_update: params.bias has shape None in the state, and \(3,\) in the module",
    ),
}


def trace(loss: Any, source: Any = None) -> None:
    step, target, batch = traced(loss)
    if source is not None:
        target = jaxdist.state_target(source, optax.sgd(0.1), abstract_mesh(data=2))
    step.jitted(target).trace(target, batch)


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_one_line(case: str) -> None:
    make, message = REFUSED[case]
    assert re.search(message, raised(make))


EXAMPLE = child.ROOT / "docs" / "examples" / "own_modules.py"


def test_the_page_shows_the_example() -> None:
    assert EXAMPLE.read_text() in (child.ROOT / "docs" / "own_loss.md").read_text()


@pytest.mark.slow
def test_the_example_runs() -> None:
    environment = child.environment() | child.QUICK | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert [float(line.rpartition(" ")[2]) > 0.95 for line in done.stdout.splitlines()] == [True, True]
