"""A classifier with BatchNorm and dropout, whose entry gives a loss and no model."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxdist
from jaxdist.config.schema import ModelConfig


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, param_dtype: Any) -> None:
        self.up = nnx.Linear(4, 8, param_dtype=param_dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, param_dtype=param_dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(8, 2, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def classify(model: Any, batch: Any) -> Any:
    logits, weights = model(batch["image"]), batch["weights"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    right = jnp.where(logits.argmax(-1) == batch["label"], weights, 0)
    return (losses * weights).sum(), weights.sum(), {"accuracy": (right.sum(), weights.sum())}


def normed(config: ModelConfig, *, max_length: int, param_dtype: Any) -> Any:
    return jaxdist.nnx_loss(lambda rngs: Normed(rngs, param_dtype), classify)
