"""Tensor-parallel layers: they declare the PartitionSpecs of their parameters and call the collectives over `tensor`.

Layers read sizes and dtypes from their arrays, so that the same code runs on a shard and, without a mesh, on the whole.
"""

from jaxdist.model import ModelDef
from jaxdist.nn.attention import Attention, CrossAttention, QKVProjection, why_not_cudnn
from jaxdist.nn.block import Block
from jaxdist.nn.context.positions import own_context
from jaxdist.nn.dropout import dropout, dropout_heads
from jaxdist.nn.embedding import (
    PositionEmbed,
    TypeEmbed,
    VocabBias,
    VocabEmbed,
    VocabHead,
    vocab_argmax,
    vocab_cross_entropy,
    vocab_logits,
    whole_vocab,
)
from jaxdist.nn.experts import ExpertBlock, MoE
from jaxdist.nn.linear import ColumnParallelLinear, Linear, RowParallelLinear, add_bias
from jaxdist.nn.loss import chunked_cross_entropy, counted_targets, label_accuracy, label_cross_entropy, loss_chunk
from jaxdist.nn.matmul.float8 import product
from jaxdist.nn.mlp import MLP, gelu_erf
from jaxdist.nn.model import model_def
from jaxdist.nn.norm import LayerNorm, RMSNorm, make_norm
from jaxdist.nn.param import normal, param, zeros
from jaxdist.nn.sequence_parallel import first_position, whole_sequence

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "ColumnParallelLinear",
    "CrossAttention",
    "ExpertBlock",
    "LayerNorm",
    "Linear",
    "MoE",
    "ModelDef",
    "PositionEmbed",
    "QKVProjection",
    "RMSNorm",
    "RowParallelLinear",
    "TypeEmbed",
    "VocabBias",
    "VocabEmbed",
    "VocabHead",
    "add_bias",
    "chunked_cross_entropy",
    "counted_targets",
    "dropout",
    "dropout_heads",
    "first_position",
    "gelu_erf",
    "label_accuracy",
    "label_cross_entropy",
    "loss_chunk",
    "make_norm",
    "model_def",
    "normal",
    "own_context",
    "param",
    "product",
    "vocab_argmax",
    "vocab_cross_entropy",
    "vocab_logits",
    "whole_sequence",
    "whole_vocab",
    "why_not_cudnn",
    "zeros",
]  # fmt: skip
