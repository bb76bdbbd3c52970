"""The blocks of a model are drawn by one program, with the numbers that they have one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from levels import levels

from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.optimizer import LoraConfig
from jaxdist.models.gpt import gpt
from jaxdist.nn import model as of_models


def one_by_one(function: Any, key: jax.Array) -> Any:
    parts, others = function(key)
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts), others


@pytest.mark.parametrize("options", levels([{"lora": True}, {}, {"style": "llama"}], everyday=3), ids=str)
def test_they_have_the_numbers_of_blocks_drawn_one_by_one(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = {"lora": LoraConfig(rank=2)} if options.pop("lora", False) else {}
    model = gpt(ModelConfig(layers=5, width=32, heads=2, vocab=32, **options).resolved(), max_length=8, **lora)
    got = jax.jit(model.init)(jax.random.key(3))
    monkeypatch.setattr(of_models, "stacked", one_by_one)
    want = jax.jit(lambda key: model.init(key))(jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert len({leaf.tobytes() for leaf in np.asarray(got["blocks"]["mlp"]["up"]["kernel"])}) == 5


def test_blocks_of_another_initialisation_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Block(nnx.Module):
        def __init__(self, i: int, rngs: nnx.Rngs) -> None:
            draw = jax.random.normal if i % 2 else jax.random.uniform
            self.kernel = nnx.Param(draw(rngs.params(), (4, 4)) / (i + 1))

        def __call__(self, h: jax.Array, keys_B: jax.Array) -> jax.Array:
            return h @ self.kernel[...]

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed, self.head = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
            self.blocks = nnx.List([Block(i, rngs) for i in range(4)])

    kernels = of_models._drawn(Model, jnp.float32, jax.random.key(0))["blocks"]["kernel"]
    want = [block.kernel[...] for block in Model(nnx.Rngs(jax.random.key(0))).blocks]
    np.testing.assert_array_equal(kernels, jnp.stack(want))
