"""Learning-rate schedules, what is decayed, what Muon takes; and that every optimizer sees whole tensors in every
layout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from levels import levels

from jaxdist.config.schema import ModelConfig, OptimizerConfig
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.optim import decay_mask, learning_rates, make_optimizer, muon_dims
from jaxdist.specs import path_name
from jaxdist.state import place_params
from jaxdist.step import make_train_step

MODEL = ModelConfig(style="gpt2", layers=2, width=16, heads=4, vocab=32)


@pytest.mark.parametrize(("schedule", "middle"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_schedules(schedule: str, middle: float) -> None:
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=4, final_lr_ratio=0.1)
    rates = learning_rates(config, 24)
    np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)  # the first step already moves
    assert rates[13] > middle * 0.99 > rates[14] * 0.9
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1, rel=1e-5)
    assert np.all(np.diff(rates[4:]) <= 0)


def test_without_warm_up_the_first_rate_is_the_peak() -> None:
    assert learning_rates(OptimizerConfig(lr=0.5), 10)[0] == pytest.approx(0.5)


def test_vectors_are_not_decayed_however_they_are_stacked() -> None:
    shapes = gpt(MODEL, max_length=8).shapes
    mask = {path_name(path): value for path, value in jax.tree_util.tree_leaves_with_path(decay_mask(shapes))}
    assert {name for name, decays in mask.items() if not decays} == {
        name for name in mask if name.endswith((".bias", ".scale"))
    }
    assert mask["blocks.mlp.up.kernel"] and mask["embed.tokens.table"]


def test_muon_takes_the_kernels_of_blocks() -> None:
    shapes = gpt(MODEL, max_length=8).shapes
    dims = {
        path_name(path): value
        for path, value in jax.tree_util.tree_leaves_with_path(
            muon_dims(shapes), is_leaf=lambda x: x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)
        )
    }
    taken = {name for name, value in dims.items() if value is not None}
    layers = ("attention.qkv.linear", "attention.out", "mlp.up", "mlp.down")
    assert taken == {f"blocks.{name}.kernel" for name in layers}
    assert dims["blocks.attention.qkv.linear.kernel"].output_axis == (2, 3, 4)
    foreign = muon_dims({"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)})
    assert foreign["b"] is None and foreign["w"] is not None


@pytest.mark.parametrize("name", levels(("adamw", "sgd", "muon", "lion", "adafactor"), everyday=5, slow=2))
def test_every_optimizer_takes_the_same_step_in_every_layout(name: str) -> None:
    """Adafactor, Muon and clipping look across a tensor: local statistics would differ here."""
    options = OptimizerConfig(name=name, lr=1e-2, clip_norm=0.1, eps=1e-6)
    ids = np.random.default_rng(0).integers(0, 32, (8, 9)).astype(np.int32)
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((8, 8), np.float32)}

    def params_after(strategy: str, **sizes: int) -> object:
        with jax.numpy_dtype_promotion("standard"):
            tx, mesh = make_optimizer(options, steps=3), make_mesh(**sizes)
            width = 128 if name == "adafactor" else 16  # it factors dims of 128 and more
            config = dataclasses.replace(MODEL, style="llama", width=width, vocab=width * 2)
            model = gpt(config, max_length=8, param_dtype=jnp.float64)
            state = place_params(model.init(jax.random.key(0)), tx, state_target(model, tx, mesh, strategy=strategy))
            step = make_train_step(model, tx, mesh, strategy=strategy, precision="fp64")
            for _ in range(2):
                state, _ = step(state, batch)
        return jax.device_get(state.params)

    # Llama has no biases: the gradient of a key bias is zero but for rounding, and Lion would take the sign of that.
    with jax.enable_x64(True):
        assert oracle.error(params_after("zero3", data=2, fsdp=2, tensor=2), params_after("ddp")) < 1e-9
