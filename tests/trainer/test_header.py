"""Rows of the header of a run, and the units of its last line."""

import math
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxdist.config.schema import ModelConfig
from jaxdist.models.gpt import gpt
from jaxdist.trainer.header import _name, yardsticks


@pytest.mark.parametrize(
    ("unit", "measure", "factor"), [("bytes", "bits per byte", 1), ("tokens", "nats per token", math.log(2))]
)
def test_yardsticks_have_the_unit_of_evaluations(unit: str, measure: str, factor: float) -> None:
    plan = SimpleNamespace(source=SimpleNamespace(info={"unit": unit}))
    found = yardsticks(SimpleNamespace(plan=plan, baselines={"bigram": 3.5}))  # type: ignore[arg-type]
    assert found == (measure, {"bigram": pytest.approx(3.5 * factor)})


def test_a_loss_of_ones_own_is_no_gpt() -> None:
    config = ModelConfig().replace(layers=2, width=16, heads=2)
    loss, model = (lambda *_: (jnp.zeros(()), 1)), gpt(config, max_length=8)

    def named(name: str, made: Any) -> str:
        plan = SimpleNamespace(
            config=SimpleNamespace(model=config.replace(name=name)), parts=SimpleNamespace(model=made)
        )
        return _name(plan)  # type: ignore[arg-type]

    assert named("mine.net", loss) == "mine.net"
    assert named("mine.net", model).startswith("mine.net (") and named("gpt", model).startswith("gpt (")
