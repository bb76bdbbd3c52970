"""Evaluations of a loss in training mode: the run says so, and `evaluation=` of `linen_loss` gives it another mode."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from own_modules import Dropped, LinenNet, nnx_of

import jaxdist
from jaxdist.config.schema import ModelConfig
from jaxdist.models.gpt import gpt
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.options import StepOptions
from jaxdist.state import specs_of_arrays
from jaxdist.trainer.evaluation import make_eval_step, make_loss_eval_step, signs_of_training

BATCH = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
MODULE = LinenNet()
VARIABLES = MODULE.init(jax.random.key(0), jnp.ones((1, 4)), train=False)
BOTH = "the loss draws random numbers and takes statistics of the batch, as in training"


def summed(train: bool) -> Any:
    """fn of `linen_loss`, with the module in this mode."""
    return lambda module, batch: ((module(batch, train) ** 2).sum(), len(batch))


def linen_loss(**options: Any) -> Any:
    return jaxdist.linen_loss(MODULE, VARIABLES, summed(True), **options)


def rows_of(module: Any, batch: Any) -> tuple[jax.Array, int]:
    return (module(batch) ** 2).sum(), len(batch)


def in_evaluation_mode(params: Any, model_state: Any) -> float:
    """The mean loss on one device."""
    found = jaxdist.linen_loss(MODULE, VARIABLES, summed(False))
    return float(found(params, BATCH, None, model_state)[0]) / len(BATCH)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "evaluation:" in record.getMessage()]


SIGNS: dict[str, tuple[Any, str]] = {
    "linen": (linen_loss(), "draws random numbers and takes statistics of the batch"),
    "linen with evaluation": (linen_loss(evaluation=summed(False)).evaluation, ""),
    "nnx": (nnx_of(nnx.BatchNorm), "takes statistics of the batch"),
    "nnx in evaluation mode": (nnx_of(nnx.BatchNorm).evaluation, ""),
    "per sample": (jaxdist.nnx_loss(Dropped(nnx.Rngs(0)), rows_of), "draws random numbers and takes statistics"),
    "per sample in evaluation mode": (jaxdist.nnx_loss(Dropped(nnx.Rngs(0)), rows_of, per_sample=True).evaluation, ""),
    "noise": (
        lambda params, batch, keys, state: ((batch.sum(1) * jax.vmap(jax.random.uniform)(keys)).sum(), 8),
        "draws",
    ),
    "a counter": (lambda params, batch, keys, state: (batch.sum(), 8, {}, state + 1), ""),
    "none": (lambda params, batch, keys, state: (batch.sum(), 8), ""),
}


@pytest.mark.parametrize("name", SIGNS)
def test_signs_of_training(name: str) -> None:
    loss, signs = SIGNS[name]

    def whole(params: Any, state: Any, batch: Any, keys: jax.Array) -> tuple[Any, Any]:
        found = loss(params, batch, keys, state)
        return found[:2], found[3] if len(found) == 4 else state

    given = getattr(loss, "params", jnp.ones(())), getattr(loss, "model_state", jnp.ones(())), BATCH
    found = signs_of_training(jax.jit(whole), given)
    assert found.startswith(signs) and bool(found) == bool(signs)


@pytest.mark.parametrize(
    ("made", "given", "said"),
    [
        (linen_loss(), {}, BOTH),
        (linen_loss(evaluation=summed(False)), {}, ""),
        (linen_loss(), {"eval_loss": jaxdist.linen_loss(MODULE, VARIABLES, summed(False))}, ""),
    ],
)
def test_a_run_tells_of_training_mode(
    made: Any, given: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mesh, data = jaxdist.make_mesh(fsdp=2), [BATCH]
    done = jaxdist.fit(made, optax.sgd(0.1), data, steps=1, mesh=mesh, run_dir=tmp_path, eval_data=data, **given)
    assert [said in line for line in told(caplog)] == [True] * bool(said)
    wanted = in_evaluation_mode(done.state.params, done.state.model_state)
    assert (done.metrics["eval/loss"] == pytest.approx(wanted, rel=1e-6)) == (not said)


@pytest.mark.parametrize(("dropout", "axes"), [(0.0, {"fsdp": 2}), (0.0, {"pipe": 2}), (0.1, {"fsdp": 2})])
def test_dropout_of_a_model(dropout: float, axes: dict[str, int]) -> None:
    config = ModelConfig().replace(layers=2, width=16, heads=2, vocab=32, dropout=dropout)
    model, mesh, options = gpt(config, max_length=8), jaxdist.make_mesh(**axes), StepOptions(strategy="ddp")
    target = jaxdist.state_target(model, optax.sgd(0.1), mesh, options)
    step = make_eval_step(model, mesh, specs_of_arrays(target.params), get_strategy(options))
    ids = jax.ShapeDtypeStruct((8, 8), jnp.int32)
    batch = {"inputs": ids, "targets": ids, "weights": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    whole = lambda params, state, batch, keys: (step(params, {**batch, "keys": keys}), state)  # noqa: E731
    assert signs_of_training(whole, (target.params, (), batch)) == ("draws random numbers" if dropout else "")


@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_a_loss_of_a_configuration(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """What `train.py` evaluates with: once it is told, and the mode of `evaluation=` is that of one device."""
    loss, options = linen_loss(evaluation=summed(False)), StepOptions(strategy="ddp")
    mesh = jaxdist.make_mesh(data=2)
    state = jaxdist.init_state(loss, optax.sgd(0.1), mesh, options)
    specs = specs_of_arrays(state.params)
    step = make_loss_eval_step(
        loss if mode == "training" else loss.evaluation, mesh, specs, get_strategy(options), options
    )
    batch = jax.device_put(BATCH, jax.NamedSharding(mesh, jax.P(("data", "fsdp"))))
    pairs = [step(state.params, state.model_state, batch)["loss"] for _ in range(2)]
    assert [BOTH in line for line in told(caplog)] == ([True] if mode == "training" else [])
    for total, weight in pairs if mode == "evaluation" else []:
        assert float(total / weight) == pytest.approx(in_evaluation_mode(state.params, state.model_state), rel=1e-6)
