"""BERT: a bidirectional encoder that predicts masked tokens, or classifies a sequence (Devlin et al. 2019).

Legend: B batch, S sequence, D model width, V vocabulary, L labels.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config.entries import ModelFacts
from jaxdist.config.rules.overlap import check_collective_matmul
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.optimizer import LoraConfig
from jaxdist.errors import UserError
from jaxdist.models._encoder import encoder_block
from jaxdist.nn import (
    LayerNorm,
    Linear,
    ModelDef,
    PositionEmbed,
    TypeEmbed,
    VocabBias,
    VocabEmbed,
    add_bias,
    chunked_cross_entropy,
    counted_targets,
    dropout,
    first_position,
    gelu_erf,
    label_accuracy,
    label_cross_entropy,
    loss_chunk,
    model_def,
    vocab_argmax,
    vocab_cross_entropy,
    vocab_logits,
    whole_sequence,
    whole_vocab,
)
from jaxdist.nn.linear import MatmulOptions

FACTS = ModelFacts(kernels=True, key_mask=True, generates=False)
SITE_POOLED = 1 << 20  # of dropout: the head has the keys of the sample, into which layers are folded, from 0 on

Batch = dict[str, jax.Array]
Sums = tuple[jax.Array, jax.Array]


class Embed(nnx.Module):
    """Tokens, positions and segments: their sum, normalised."""

    def __init__(self, config: ModelConfig, max_length: int, rngs: nnx.Rngs, *, sequence: bool) -> None:
        self.tokens = VocabEmbed(rngs, config.vocab, config.width, sequence=sequence)
        self.positions = PositionEmbed(rngs, max_length, config.width, sequence=sequence)
        self.types = TypeEmbed(rngs, config.types, config.width, sequence=sequence)
        self.norm = LayerNorm(config.width, eps=config.norm_eps)
        self.dropout, self.sequence = config.dropout, sequence

    def __call__(self, batch: Batch, keys_B: jax.Array) -> jax.Array:
        h_BSD = add_bias(self.tokens(batch["inputs"]), self.positions(batch["inputs"].shape[1]))
        h_BSD = self.norm(add_bias(h_BSD, self.types(batch.get("token_type_ids"))))
        return dropout(h_BSD, keys_B, site=0, rate=self.dropout, sequence=self.sequence)


class MaskedHead(nnx.Module):
    """Dense layer, GELU and norm, then logits by the table of the embedding and a bias; cross-entropy."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, sequence: bool) -> None:
        self.dense = Linear(rngs, config.width, config.width, std=config.width**-0.5)
        self.norm = LayerNorm(config.width, eps=config.norm_eps)
        self.decoder = VocabBias(config.vocab)
        self.chunk, self.sequence = config.loss_chunk, sequence

    def features(self, h_BSD: jax.Array) -> jax.Array:
        """What the table multiplies, of all positions, [B, S, D]."""
        h_BSD = self.norm(gelu_erf(self.dense(h_BSD)))
        return whole_sequence(h_BSD) if self.sequence else h_BSD

    def vocabulary(self, embed: Embed | None) -> tuple[jax.Array, jax.Array]:
        """(table [V, D], bias of the logits [V])."""
        assert embed is not None, "the head is tied to the embedding"
        return embed.tokens.table[...], self.decoder.bias[...]

    def _read(self, h_BSD: jax.Array, embed: Embed | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.features(h_BSD), *self.vocabulary(embed)

    def logits(self, h_BSD: jax.Array, embed: Embed | None) -> jax.Array:
        """[B, S, V]."""
        return whole_vocab(vocab_logits(*self._read(h_BSD, embed)))

    def __call__(self, h_BSD: jax.Array, batch: Batch, embed: Embed | None) -> Sums:
        """(sum of weighted token losses in nats, sum of weights)."""
        h_BSD, table_VD, bias_V = self._read(h_BSD, embed)
        targets_BS, weights_BS = counted_targets(batch["targets"], batch["weights"], h_BSD.dtype)
        if chunk := loss_chunk(h_BSD, table_VD, self.chunk):
            total = chunked_cross_entropy(h_BSD, table_VD, targets_BS, weights_BS, chunk=chunk, bias_V=bias_V)
        else:
            total = (vocab_cross_entropy(vocab_logits(h_BSD, table_VD, bias_V), targets_BS) * weights_BS).sum()
        return total, weights_BS.sum()

    def metrics(self, h_BSD: jax.Array, batch: Batch, embed: Embed | None) -> dict[str, Sums]:
        """The accuracy on the tokens that count."""
        h_BSD, table_VD, bias_V = self._read(h_BSD, embed)
        targets_BS, weights_BS = counted_targets(batch["targets"], batch["weights"], h_BSD.dtype)
        if loss_chunk(h_BSD, table_VD, self.chunk):  # sequence by sequence, as logits of all would be too large
            found_BS = jax.lax.map(lambda h_SD: vocab_argmax(vocab_logits(h_SD[None], table_VD, bias_V))[0], h_BSD)
        else:
            found_BS = vocab_argmax(vocab_logits(h_BSD, table_VD, bias_V))
        return {"accuracy": (jnp.where(found_BS == targets_BS, weights_BS, 0).sum(), weights_BS.sum())}


class ClassificationHead(nnx.Module):
    """Pooler (dense layer and tanh, of the first position), dropout, classifier; cross-entropy."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, sequence: bool) -> None:
        self.pooler = Linear(rngs, config.width, config.width, std=config.width**-0.5)
        self.classifier = Linear(rngs, config.width, config.classes, std=0.02, fp32=True)
        self.dropout, self.sequence = config.dropout, sequence
        self.label_smoothing = config.label_smoothing

    def _pooled(self, h_BSD: jax.Array) -> jax.Array:
        return jnp.tanh(self.pooler(first_position(h_BSD) if self.sequence else h_BSD[:, 0]))

    def logits(self, h_BSD: jax.Array, embed: Embed | None) -> jax.Array:
        """[B, L], in at least fp32."""
        return self.classifier(self._pooled(h_BSD))

    def __call__(self, h_BSD: jax.Array, batch: Batch, embed: Embed | None) -> Sums:
        """(sum of weighted losses in nats, sum of weights)."""
        pooled_BD = dropout(self._pooled(h_BSD), batch["keys"], site=SITE_POOLED, rate=self.dropout)
        return label_cross_entropy(self.classifier(pooled_BD), batch["label"], batch["weights"], self.label_smoothing)

    def metrics(self, h_BSD: jax.Array, batch: Batch, embed: Embed | None) -> dict[str, Sums]:
        """The accuracy."""
        return {"accuracy": label_accuracy(self.logits(h_BSD, embed), batch["label"], batch["weights"])}


def _key_mask(batch: Batch) -> jax.Array | None:
    mask, wanted = batch.get("attention_mask"), batch["inputs"].shape
    if mask is not None and mask.shape != wanted:
        raise UserError(
            f"batch: attention_mask is {list(mask.shape)}, and inputs {list(wanted)}; allowed: the shape of inputs"
        )
    return mask


class BERT(nnx.Module):
    """The whole model as a module; training takes it apart with `model_def`."""

    def __init__(self, config: ModelConfig, max_length: int, rngs: nnx.Rngs, matmul: MatmulOptions) -> None:
        self.embed = Embed(config, max_length, rngs, sequence=matmul["sequence"])
        self.blocks = nnx.List([encoder_block(config, rngs, matmul, post_norm=True) for _ in range(config.layers)])
        head = MaskedHead if config.head == "mlm" else ClassificationHead
        self.head = head(config, rngs, sequence=matmul["sequence"])


def bert(
    config: ModelConfig,
    *,
    max_length: int,
    param_dtype: Any = jnp.float32,
    fp8: bool = False,
    sequence_parallel: bool = False,
    collective_matmul: bool = False,
    lora: LoraConfig | None = None,
) -> ModelDef:
    """The `ModelDef` of a BERT. Evaluations have the metric accuracy.

    Batches of head mlm: inputs, targets, weights [B, S], where weights are 0 but for masked positions. Of head
    classification: inputs [B, S], label and weights [B]. They may have two more leaves:
        attention_mask [B, S]: 1 for tokens, 0 for padding, which no position sees. Without it all tokens are seen.
        token_type_ids [B, S]: segments. Without them all are 0.

    config: its `attention` "auto" is "xla" here; `jaxdist.build` knows what the model runs on.
    max_length: positions of the learned table.
    fp8, sequence_parallel, collective_matmul, lora: as for `gpt`.

    Raises `UserError` for collective_matmul without sequence_parallel, or with fp8 or lora.
    """
    check_collective_matmul(collective_matmul, sequence_parallel=sequence_parallel, fp8=fp8)
    full = config.resolved()
    matmul: MatmulOptions = {"fp8": fp8, "sequence": sequence_parallel, "collective_matmul": collective_matmul}
    return model_def(
        lambda rngs: BERT(full, max_length, rngs, matmul),
        tied=full.head == "mlm",
        param_dtype=param_dtype,
        scan_blocks=full.scan_blocks,
        rows=_key_mask,
        lora=lora,
    )
