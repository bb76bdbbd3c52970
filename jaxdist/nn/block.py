"""The pre-norm transformer block. Legend: B batch, S sequence, D model width."""

import jax
from flax import nnx

from jaxdist.nn.attention import Attention
from jaxdist.nn.dropout import dropout
from jaxdist.nn.mlp import MLP
from jaxdist.nn.norm import LayerNorm, RMSNorm

SITE_ATTENTION, SITE_MLP = 2, 3  # dropout sites of a block; 1 is inside Attention


class Block(nnx.Module):
    """A transformer block: h + attention(norm(h)), then h + mlp(norm(h)), with dropout on both branches.

    sequence: h is this device's positions; attention and mlp need the same value (`jaxdist.nn.sequence_parallel`).
    """

    def __init__(
        self,
        norm1: LayerNorm | RMSNorm,
        attention: Attention,
        norm2: LayerNorm | RMSNorm,
        mlp: MLP,
        *,
        dropout: float,
        sequence: bool = False,
    ) -> None:
        self.norm1, self.attention, self.norm2, self.mlp = norm1, attention, norm2, mlp
        self.dropout, self.sequence = dropout, sequence

    def __call__(self, h_BSD: jax.Array, keys_B: jax.Array) -> jax.Array:
        with jax.named_scope("attention"):
            branch = self.attention(self.norm1(h_BSD), keys_B)
        h_BSD = h_BSD + dropout(branch, keys_B, site=SITE_ATTENTION, rate=self.dropout, sequence=self.sequence)
        with jax.named_scope("mlp"):
            branch = self.mlp(self.norm2(h_BSD))
        return h_BSD + dropout(branch, keys_B, site=SITE_MLP, rate=self.dropout, sequence=self.sequence)
