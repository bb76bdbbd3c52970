"""Layers outside of a step: on whole arrays, without a mesh, they give what they give on one device of a mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist import nn
from jaxdist.config.sections.moe import MoEConfig
from jaxdist.mesh import make_mesh

KEYS, IDS = jax.random.split(jax.random.key(1), 2), np.array([[1, 0, 3, 2], [3, 3, 9, 0]], np.int32)
H = np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32)


def experts(dispatch: str) -> nn.MoE:
    options = MoEConfig(experts=4, hidden=8, dispatch=dispatch, group=4, z_loss=0.1)
    return nn.MoE(nnx.Rngs(0), 8, options, kind="swiglu", out_scale=1.0)


RUNS: dict[str, Callable[[], Any]] = {
    "embedding": lambda: nn.VocabEmbed(nnx.Rngs(0), 8, 8)(IDS),
    "positions": lambda: nn.PositionEmbed(nnx.Rngs(0), 8, 8)(4),
    "attention": lambda: nn.Attention(nnx.Rngs(0), 8, 2, 1, bias=True, rope_theta=100.0, dropout=0.2)(H, KEYS),
    "sequence": lambda: nn.Attention(nnx.Rngs(0), 8, 2, 1, bias=True, sequence=True)(H, KEYS),
    "cross": lambda: nn.CrossAttention(nnx.Rngs(0), 8, 8, 2, 2, bias=True)(H, 2 * H, KEYS),
    "mlp": lambda: nn.MLP(nnx.Rngs(0), 8, 16, kind="gelu_erf", bias=True, out_scale=1.0)(H),
    "norm": lambda: nn.make_norm("rmsnorm", 8, eps=1e-5, bias=False)(H),
    "dropless": lambda: experts("dropless")(H, jnp.ones(2)),
    "capacity": lambda: experts("capacity")(H, jnp.ones(2)),
    "dropout": lambda: nn.dropout(jnp.asarray(H), KEYS, site=1, rate=0.5, sequence=True),
    "heads": lambda: nn.dropout_heads(jnp.asarray(H), KEYS, site=1, rate=0.5),
    "loss": lambda: nn.vocab_cross_entropy(jnp.asarray(H), IDS),
    "chunks": lambda: nn.chunked_cross_entropy(jnp.asarray(H), jnp.ones((8, 8)), IDS, jnp.ones((2, 4)), chunk=2),
    "best": lambda: nn.vocab_argmax(jnp.asarray(H)),
    "logits": lambda: nn.whole_vocab(jnp.asarray(H)),
    "first": lambda: nn.first_position(nn.whole_sequence(jnp.asarray(H))),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "dropless" else name for name in RUNS]
)
def test_a_layer_runs_on_whole_arrays(name: str) -> None:
    on_a_mesh = jax.jit(
        jax.shard_map(RUNS[name], mesh=make_mesh(devices=jax.devices()[:1]), in_specs=(), out_specs=P())
    )
    np.testing.assert_allclose(jax.jit(RUNS[name])(), on_a_mesh(), rtol=1e-6, atol=1e-7)


def test_the_evaluation_of_a_loss_of_layers_is_called_by_itself() -> None:
    """As docs/own_loss.md says."""
    model = nn.MLP(nnx.Rngs(0), 8, 16, kind="gelu", bias=True, out_scale=1.0)
    loss = jaxdist.nnx_loss(model, lambda module, batch: ((module(batch) ** 2).sum(), len(batch)))
    found = jax.jit(loss.evaluation)(loss.params, H, KEYS, loss.model_state)
    assert float(found[0]) == pytest.approx(float((model(H) ** 2).sum()), rel=1e-6)
