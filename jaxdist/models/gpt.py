"""GPT: a decoder-only transformer whose options give GPT-2 (learned positions, LayerNorm, GELU, tied embeddings;
Radford et al. 2019) and Llama (rotary positions, RMSNorm, SwiGLU, grouped-query heads, untied; Touvron et al. 2023),
with what Llama 3, Mistral and Qwen add to it.

Legend: B batch, S sequence, D model width, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config.entries import ModelFacts
from jaxdist.config.rules.overlap import check_collective_matmul
from jaxdist.config.rules.transformer import check_parts
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.optimizer import LoraConfig
from jaxdist.nn import (
    MLP,
    Attention,
    Block,
    ExpertBlock,
    ModelDef,
    MoE,
    PositionEmbed,
    VocabEmbed,
    VocabHead,
    add_bias,
    chunked_cross_entropy,
    counted_targets,
    dropout,
    loss_chunk,
    make_norm,
    model_def,
    vocab_cross_entropy,
    vocab_logits,
    whole_sequence,
    whole_vocab,
)
from jaxdist.nn.attention import PackedDocuments, RopeScaling
from jaxdist.nn.context.positions import own_context
from jaxdist.nn.linear import MatmulOptions

FACTS = ModelFacts(ids_only=True, kernels=True, documents=True)

Batch = dict[str, jax.Array]


def _documents(batch: Batch) -> PackedDocuments | None:
    starts_BS = batch.get("documents")
    return None if starts_BS is None else PackedDocuments(starts_BS)


def _expert_rows(batch: Batch) -> tuple[PackedDocuments | None, jax.Array | None]:
    """What an `ExpertBlock` reads. The loss of a sample weighs as its tokens that the head counts; evaluations have no
    losses of it."""
    if (seed_B := batch.get("loss_seed")) is None:
        return _documents(batch), None
    _, weights_BS = counted_targets(batch["targets"], batch["weights"], seed_B.dtype)
    return _documents(batch), seed_B * weights_BS.astype(seed_B.dtype).sum(1)


class Embed(nnx.Module):
    """Token embedding, plus positions where they are learned."""

    def __init__(self, config: ModelConfig, max_length: int, rngs: nnx.Rngs, *, sequence: bool) -> None:
        self.tokens = VocabEmbed(rngs, config.vocab, config.width, sequence=sequence)
        learned = config.positions == "learned"
        self.positions = PositionEmbed(rngs, max_length, config.width, sequence=sequence) if learned else None
        self.dropout, self.sequence = config.dropout, sequence

    def __call__(self, batch: Batch, keys_B: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """positions: of the tokens in their texts, [B, S]. None: as the batch's documents say, or else 0, 1, ..."""
        h_BSD = self.tokens(batch["inputs"])
        if self.positions is not None:
            documents = _documents(batch)
            positions = documents.positions() if documents and positions is None else positions
            h_BSD = add_bias(h_BSD, self.positions(batch["inputs"].shape[1], positions))
        return dropout(h_BSD, keys_B, site=0, rate=self.dropout, sequence=self.sequence)


class Head(nnx.Module):
    """Final norm, logits over the vocabulary, cross-entropy."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, sequence: bool) -> None:
        self.norm = make_norm(config.norm or "", config.width, eps=config.norm_eps, bias=bool(config.bias))
        self.projection = None if config.tied else VocabHead(rngs, config.vocab, config.width)
        self.chunk, self.sequence = config.loss_chunk, sequence

    def logits(self, h_BSD: jax.Array, embed: Embed | None) -> jax.Array:
        """[B, S, V]."""
        return whole_vocab(vocab_logits(self.features(h_BSD), *self.vocabulary(embed)))

    def features(self, h_BSD: jax.Array) -> jax.Array:
        """What the table multiplies, [B, S, D]."""
        h_BSD = self.norm(h_BSD)
        return whole_sequence(h_BSD) if self.sequence else h_BSD

    def vocabulary(self, embed: Embed | None) -> tuple[jax.Array]:
        """The table, [V, D]."""
        tokens = embed.tokens if embed is not None else self.projection
        assert tokens is not None, "a tied head needs the embed unit"
        return (tokens.table[...],)

    def __call__(self, h_BSD: jax.Array, batch: Batch, embed: Embed | None) -> tuple[jax.Array, jax.Array]:
        """(sum of weighted token losses in nats, sum of weights)."""
        h_BSD, (table_VD,) = self.features(h_BSD), self.vocabulary(embed)
        targets_BS, weights_BS = (own_context(batch[name], dim=1) for name in ("targets", "weights"))
        targets_BS, weights_BS = counted_targets(targets_BS, weights_BS, h_BSD.dtype)
        if chunk := loss_chunk(h_BSD, table_VD, self.chunk):
            total = chunked_cross_entropy(h_BSD, table_VD, targets_BS, weights_BS, chunk=chunk)
        else:
            total = (vocab_cross_entropy(vocab_logits(h_BSD, table_VD), targets_BS) * weights_BS).sum()
        return total, weights_BS.sum()


class HeadByPosition(Head):
    """A head whose evaluations also give the loss of equal parts of a text's positions, of the first ones first."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, sequence: bool) -> None:
        super().__init__(config, rngs, sequence=sequence)
        self.parts = config.position_losses

    def metrics(self, h_BSD: jax.Array, batch: Batch, embed: Embed | None) -> dict[str, tuple[jax.Array, jax.Array]]:
        """loss_from_P, for the positions from P of a document on, with zeros in front so that names are in order."""
        weights_BS, documents = batch["weights"], _documents(batch)
        length = weights_BS.shape[1]
        positions = jnp.arange(length, dtype=jnp.int32) if documents is None else documents.positions()
        part_BS = jnp.broadcast_to(positions * self.parts // length, weights_BS.shape)
        own = lambda part: {**batch, "weights": jnp.where(part_BS == part, weights_BS, jnp.zeros_like(weights_BS))}  # noqa: E731
        digits = len(str(length - 1))
        return {
            f"loss_from_{i * length // self.parts:0{digits}d}": self(h_BSD, own(i), embed) for i in range(self.parts)
        }


class DenseStart(Embed):
    """The embedding and the first blocks, where these have one MLP and all later ones are mixtures of experts: blocks
    that are stacked must be alike. Text is generated without a cache, which is kept for stacked blocks only."""

    def __init__(self, config: ModelConfig, max_length: int, rngs: nnx.Rngs, matmul: MatmulOptions, context: Any):
        super().__init__(config, max_length, rngs, sequence=matmul["sequence"])
        self.dense = nnx.List(
            [_block(config, rngs, matmul, context, dense=True) for _ in range(config.layers - config.stacked)]
        )

    def __call__(self, batch: Batch, keys_B: jax.Array) -> jax.Array:  # type: ignore[override]
        h_BSD = super().__call__(batch, keys_B)
        for i, block in enumerate(self.dense):
            own_B = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, i + 1)
            h_BSD = block(h_BSD, own_B, _documents(batch))
        return h_BSD


def _scaling(config: ModelConfig) -> RopeScaling | None:
    if config.rope_type == "default":
        return None
    low, high = config.rope_low, config.rope_high
    return RopeScaling(config.rope_type, config.rope_factor, low=low, high=high, positions=config.rope_positions)


def _block(config: ModelConfig, rngs: nnx.Rngs, matmul: MatmulOptions, context: str | None, *, dense: bool) -> Block:
    assert config.mlp and config.norm and config.mlp_width and config.kv_heads, "not resolved"
    bias, out_scale = bool(config.bias), (2 * config.layers) ** -0.5
    attention = Attention(
        rngs,
        config.width,
        config.heads,
        config.kv_heads,
        bias=bias,
        rope_theta=config.rope_theta if config.positions == "rope" else None,
        rope_scaling=_scaling(config),
        dropout=config.dropout,
        out_scale=out_scale,
        kernel=config.attention.replace("auto", "xla"),
        window=config.window,
        context=context,
        head_width=config.head_width,
        qkv_bias=config.qkv_bias,
        qk_norm_eps=config.norm_eps if config.qk_norm else None,
        **matmul,
    )
    made: Any = {"kind": config.mlp, "out_scale": out_scale, **matmul}
    mlp: MLP | MoE
    if dense:
        mlp = MLP(rngs, config.width, config.mlp_width, bias=bias, **made)
    else:
        mlp = MoE(rngs, config.width, config.moe, **made)
    norm1, norm2 = (make_norm(config.norm, config.width, eps=config.norm_eps, bias=bias) for _ in range(2))
    kind = Block if dense else ExpertBlock
    return kind(norm1, attention, norm2, mlp, dropout=config.dropout, sequence=matmul["sequence"])


class GPT(nnx.Module):
    """The whole model as a module; training takes it apart with `model_def`."""

    def __init__(
        self, config: ModelConfig, max_length: int, rngs: nnx.Rngs, matmul: MatmulOptions, context: str | None
    ) -> None:
        self.embed: Embed
        if config.stacked < config.layers:
            self.embed = DenseStart(config, max_length, rngs, matmul, context)
        else:
            self.embed = Embed(config, max_length, rngs, sequence=matmul["sequence"])
        dense = not config.moe.on
        self.blocks = nnx.List([_block(config, rngs, matmul, context, dense=dense) for _ in range(config.stacked)])
        kind = HeadByPosition if config.position_losses else Head
        self.head = kind(config, rngs, sequence=matmul["sequence"])


def gpt(
    config: ModelConfig,
    *,
    max_length: int,
    param_dtype: Any = jnp.float32,
    fp8: bool = False,
    sequence_parallel: bool = False,
    collective_matmul: bool = False,
    context: str | None = None,
    lora: LoraConfig | None = None,
) -> ModelDef:
    """The `ModelDef` of a GPT. Batches: inputs, targets, weights [B, S]. They may have one more leaf, documents [B, S]:
    for each token the position at which its document starts (`PackedDocuments`). Without it a row is one document.

    config: its `attention` "auto" is "xla" here; `jaxdist.build` knows what the model runs on.
    max_length: positions of the learned table.
    fp8: whether the blocks' linear layers multiply in float8, as precision fp8 needs. Embedding, attention's own
        products and head do not.
    sequence_parallel: whether, between layers that are split over `tensor`, each of its devices has its positions
        (`jaxdist.nn.sequence_parallel`).
    collective_matmul: whether the blocks' layers send piece by piece while they multiply
        (`jaxdist.nn.matmul.collective`).
    context: how attention goes over the mesh axis `context`, whose devices have other positions of the same samples:
        "all_to_all", "gather" or "ring" (`jaxdist.nn.context.forms`). None: the axis must be off.
    lora: adapters of the blocks' layers, see `model_def`.

    Raises `UserError` for collective_matmul without sequence_parallel, or with fp8 or lora, and for more parts of
    `position_losses` than positions.
    """
    check_collective_matmul(collective_matmul, sequence_parallel=sequence_parallel, fp8=fp8)
    full = config.resolved()
    full.moe.check(layers=full.layers)
    check_parts(full.position_losses, max_length)
    matmul: MatmulOptions = {"fp8": fp8, "sequence": sequence_parallel, "collective_matmul": collective_matmul}
    return model_def(
        lambda rngs: GPT(full, max_length, rngs, matmul, context),
        tied=bool(full.tied),
        param_dtype=param_dtype,
        scan_blocks=full.scan_blocks,
        rows=_expert_rows if full.moe.on else _documents,
        lora=lora,
        columns=not full.dropout and not sequence_parallel and not full.moe.dense,  # these go by the position in h
    )
