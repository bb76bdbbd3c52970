"""GPT: a decoder-only transformer whose options give GPT-2 (learned positions, LayerNorm, GELU, tied embeddings;
Radford et al. 2019) and Llama (rotary positions, RMSNorm, SwiGLU, grouped-query heads, untied; Touvron et al. 2023).

Legend: B batch, S sequence, D model width, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config import ModelConfig, resolve_model
from jaxdist.nn import (
    MLP,
    Attention,
    Block,
    ModelDef,
    PositionEmbed,
    VocabEmbed,
    VocabHead,
    add_bias,
    chunked_cross_entropy,
    dropout,
    loss_chunk,
    make_norm,
    model_def,
    vocab_cross_entropy,
    vocab_logits,
    whole_vocab,
)
from jaxdist.precision import accumulation_dtype

Batch = dict[str, jax.Array]


class Embed(nnx.Module):
    """Token embedding, plus positions where they are learned."""

    def __init__(self, config: ModelConfig, max_length: int, rngs: nnx.Rngs) -> None:
        self.tokens = VocabEmbed(rngs, config.vocab, config.width)
        self.positions = PositionEmbed(rngs, max_length, config.width) if config.positions == "learned" else None
        self.dropout = config.dropout

    def __call__(self, batch: Batch, keys_B: jax.Array) -> jax.Array:
        h_BSD = self.tokens(batch["inputs"])
        if self.positions is not None:
            h_BSD = add_bias(h_BSD, self.positions(h_BSD.shape[1]))
        return dropout(h_BSD, keys_B, site=0, rate=self.dropout)


class Head(nnx.Module):
    """Final norm, logits over the vocabulary, cross-entropy."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.norm = make_norm(config.norm or "", config.width, eps=config.norm_eps, bias=bool(config.bias))
        self.projection = None if config.tied else VocabHead(rngs, config.vocab, config.width)
        self.chunk = config.loss_chunk

    def logits(self, h_BSD: jax.Array, embed: Embed | None) -> jax.Array:
        """[B, S, V]."""
        return whole_vocab(vocab_logits(self.norm(h_BSD), self._table(embed)))

    def _table(self, embed: Embed | None) -> jax.Array:
        tokens = embed.tokens if embed is not None else self.projection
        assert tokens is not None, "a tied head needs the embed unit"
        return tokens.table[...]

    def __call__(self, h_BSD: jax.Array, batch: Batch, embed: Embed | None) -> tuple[jax.Array, jax.Array]:
        """(sum of weighted token losses in nats, sum of weights)."""
        h_BSD, table_VD, targets_BS = self.norm(h_BSD), self._table(embed), batch["targets"]
        # A negative target, such as PyTorch's ignore_index -100, counts nothing.
        weights_BS = jnp.where(targets_BS < 0, 0, batch["weights"]).astype(accumulation_dtype(h_BSD.dtype))
        if chunk := loss_chunk(h_BSD, table_VD, self.chunk):
            total = chunked_cross_entropy(h_BSD, table_VD, targets_BS, weights_BS, chunk=chunk)
        else:
            total = (vocab_cross_entropy(vocab_logits(h_BSD, table_VD), targets_BS) * weights_BS).sum()
        return total, weights_BS.sum()


def _block(config: ModelConfig, rngs: nnx.Rngs, *, fp8: bool) -> Block:
    bias, out_scale = bool(config.bias), (2 * config.layers) ** -0.5
    assert config.mlp and config.norm and config.mlp_width and config.kv_heads, "resolve_model first"
    rope_theta = config.rope_theta if config.positions == "rope" else None
    attention = Attention(
        rngs,
        config.width,
        config.heads,
        config.kv_heads,
        bias=bias,
        rope_theta=rope_theta,
        dropout=config.dropout,
        out_scale=out_scale,
        fp8=fp8,
        kernel=config.attention.replace("auto", "xla"),
    )
    mlp = MLP(rngs, config.width, config.mlp_width, kind=config.mlp, bias=bias, out_scale=out_scale, fp8=fp8)
    norm1, norm2 = (make_norm(config.norm, config.width, eps=config.norm_eps, bias=bias) for _ in range(2))
    return Block(norm1, attention, norm2, mlp, dropout=config.dropout)


class GPT(nnx.Module):
    """The whole model as a module; training takes it apart with `model_def`."""

    def __init__(self, config: ModelConfig, max_length: int, rngs: nnx.Rngs, *, fp8: bool = False) -> None:
        self.embed = Embed(config, max_length, rngs)
        self.blocks = nnx.List([_block(config, rngs, fp8=fp8) for _ in range(config.layers)])
        self.head = Head(config, rngs)


def gpt(config: ModelConfig, *, max_length: int, param_dtype: Any = jnp.float32, fp8: bool = False) -> ModelDef:
    """The `ModelDef` of a GPT. max_length: positions of the learned table. Batches: inputs, targets, weights [B, S].
    fp8: linear layers of the blocks multiply in float8, as precision fp8 needs; embedding, attention's own products and
    head do not. config.attention: "auto" is "xla" here, `jaxdist.assemble` knows what it runs on."""
    full = resolve_model(config)
    return model_def(lambda rngs: GPT(full, max_length, rngs, fp8=fp8), tied=bool(full.tied), param_dtype=param_dtype)
