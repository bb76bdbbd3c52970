"""Losses of Linen modules: BatchNorm as Flax's, and random streams by their names."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen
from own_modules import LinenNet, masks, traced

import jaxdist


@pytest.mark.parametrize("train", [True, False])
def test_a_linen_module_is_normalised_as_by_flax(train: bool) -> None:
    module, batch = LinenNet(rate=0.0), np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    variables = module.init(jax.random.key(0), batch, train=False)
    want, new = module.apply(variables, batch, train, mutable="batch_stats")
    loss = jaxdist.linen_loss(module, variables, lambda model, batch: ((model(batch, train) ** 3).sum(), 1.0))
    total, _, _, state = loss(loss.params, batch, None, loss.model_state)
    assert float(total) == pytest.approx(float((want**3).sum()), rel=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), state, new)


BOTH = ("dropout", "noise")


def test_linen_transforms_split_streams_by_name() -> None:
    assert len(set(masks({"params": False, "dropout": True}))) == 4
    assert len(set(masks({"dropout": True}))) == 4
    assert len(set(masks({"params": True, "dropout": False}))) == 1
    noise = masks({"noise": True}, "noise", streams=BOTH)
    assert len({*noise, *masks({"dropout": True}, streams=BOTH)}) == 8


class OwnLinenNorm(linen.BatchNorm):
    @linen.compact
    def __call__(self, x: jax.Array, *args: Any, **options: Any) -> jax.Array:
        return 2 * super().__call__(x, *args, **options)


def test_a_subclass_of_linen_batch_norm_keeps_its_own_code() -> None:
    module, x = OwnLinenNorm(use_running_average=False), np.random.default_rng(0).normal(size=(8, 4))
    variables = module.init(jax.random.key(0), x)
    want, new = module.apply(variables, x, mutable="batch_stats")
    loss = jaxdist.linen_loss(module, variables, lambda model, batch: ((model(batch) ** 3).sum(), 1.0))
    total, _, _, state = loss(loss.params, x, None, loss.model_state)
    assert float(total) == pytest.approx(float((want**3).sum()), rel=1e-4)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), state, new)
    assert (
        sum(each.calls for each in jaxdist.ledger(*traced(loss)).collectives) == 2 + 2
    )  # two means, and those of every step
