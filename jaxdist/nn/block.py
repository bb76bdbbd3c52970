"""The transformer block, with norms before its layers or after them. Legend: B batch, S sequence, D model width."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxdist.nn.attention import Attention, PackedDocuments
from jaxdist.nn.attention.cache import BlockCache
from jaxdist.nn.dropout import dropout
from jaxdist.nn.norm import LayerNorm, RMSNorm

SITE_ATTENTION, SITE_MLP = 2, 3  # dropout sites of a block; 1 is inside Attention


class Block(nnx.Module):
    """A transformer block: h + attention(norm(h)), then h + mlp(norm(h)), with dropout on both branches.

    post_norm: norm(h + attention(h)), then norm(h + mlp(h)) instead, as in Vaswani et al. 2017 and BERT.
    mlp: a module x [B, S, D] -> [B, S, D], such as `MLP`.
    sequence: h is this device's positions; attention and mlp need the same value (`jaxdist.nn.sequence_parallel`).
    """

    def __init__(
        self,
        norm1: LayerNorm | RMSNorm,
        attention: Attention,
        norm2: LayerNorm | RMSNorm,
        mlp: Any,
        *,
        dropout: float,
        post_norm: bool = False,
        sequence: bool = False,
    ) -> None:
        self.norm1, self.attention, self.norm2, self.mlp = norm1, attention, norm2, mlp
        self.dropout, self.post_norm, self.sequence = dropout, post_norm, sequence

    def __call__(
        self,
        h_BSD: jax.Array,
        keys_B: jax.Array,
        seen_BS: jax.Array | PackedDocuments | None = None,
        cache: BlockCache | None = None,
    ) -> jax.Array:
        """seen_BS, cache: as in `Attention`."""
        return self.run(h_BSD, keys_B, seen_BS, cache, lambda mlp, x: mlp(x))

    def run(
        self,
        h_BSD: jax.Array,
        keys_B: jax.Array,
        seen_BS: jax.Array | PackedDocuments | None,
        cache: BlockCache | None,
        feed_forward: Callable[[Any, jax.Array], jax.Array],
    ) -> jax.Array:
        """h after the block. feed_forward: (mlp, its input) -> its result."""
        with jax.named_scope("attention"):
            branch = self.attention(h_BSD if self.post_norm else self.norm1(h_BSD), keys_B, seen_BS, cache)
        h_BSD = h_BSD + dropout(branch, keys_B, site=SITE_ATTENTION, rate=self.dropout, sequence=self.sequence)
        h_BSD = self.norm1(h_BSD) if self.post_norm else h_BSD
        with jax.named_scope("mlp"):
            branch = feed_forward(self.mlp, h_BSD if self.post_norm else self.norm2(h_BSD))
        h_BSD = h_BSD + dropout(branch, keys_B, site=SITE_MLP, rate=self.dropout, sequence=self.sequence)
        return self.norm2(h_BSD) if self.post_norm else h_BSD
