"""A model of somebody else's, of pictures. One file; tests name it by a dotted path."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxdist.config.schema import ModelConfig
from jaxdist.nn import ModelDef, model_def


class Embed(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(12, width, rngs=rngs)

    def __call__(self, batch: dict[str, jax.Array], keys_B: jax.Array) -> jax.Array:
        return self.up(batch["image"].reshape(-1, 12).astype(jnp.float32) / 255)


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, h: jax.Array, keys_B: jax.Array) -> jax.Array:
        return h + jax.nn.relu(self.inner(h))


class Head(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.down = nnx.Linear(width, 50, rngs=rngs)

    def __call__(self, h: jax.Array, batch: dict[str, jax.Array], embed: Any) -> tuple[jax.Array, jax.Array]:
        each = optax.softmax_cross_entropy_with_integer_labels(self.down(h), batch["label"])
        return (each * batch["weights"]).sum(), batch["weights"].sum()


class Classifier(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.embed, self.head = Embed(config.width, rngs), Head(config.width, rngs)
        self.blocks = nnx.List([Block(config.width, rngs) for _ in range(config.layers)])


def classifier(config: ModelConfig, *, max_length: int, param_dtype: Any) -> ModelDef:
    """Which of 50 labels an image uint8 [4, 3] has."""
    return model_def(lambda rngs: Classifier(config, rngs), tied=False, param_dtype=param_dtype)
