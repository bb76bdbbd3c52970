"""Tiles of causal attention: some queries over some keys, and the merge of their results by log-sum-exp.

A tile gives, beside its result, the logarithm of its softmax's denominator (lse). With it two tiles over different keys
are merged exactly, and the backward pass of a tile computes its part of the whole softmax's gradient: from the lse and
the result of the whole, not from its own (Dao et al. 2022, FlashAttention, appendix B).

Legend: B batch, S queries, T keys, n key/value heads, G query heads of each, K head width.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.nn.context.dropout_masks import drop
from jaxdist.nn.matmul.fp32_accumulation import einsum_fp32
from jaxdist.precision.policy import accumulation_dtype


class Tokens(NamedTuple):
    """What masks need to know of the tokens of a tile.

    numbers_BS: their positions in the whole sequence; dim 0 may be 1.
    starts_BS: where their documents start; None: a row is one document.
    """

    numbers_BS: jax.Array
    starts_BS: jax.Array | None


class TileMask(NamedTuple):
    """Which keys of a tile its queries see, and what dropout makes of the weights. The default: all, and nothing.

    causal: whether query i sees the keys 0 to i only.
    unseen_BST: whether a query does not see a key; None: it sees all that causality lets it see.
    kept_BhST: whether dropout keeps a weight, for each of the h = n G heads; None: all are kept.
    dropout: its rate.
    """

    causal: bool = False
    unseen_BST: jax.Array | None = None
    kept_BhST: jax.Array | None = None
    dropout: float = 0.0


class TileResult(NamedTuple):
    """out: [B, S, n, G, K], in at least fp32. lse: [B, S, n, G]."""

    out: jax.Array
    lse: jax.Array


class WholeResult(NamedTuple):
    """Of the attention over all keys, what the backward pass of a tile needs for its queries.

    out, dout: [B, S, n, G, K], the result and its gradient. lse: [B, S, n, G].
    """

    out: jax.Array
    dout: jax.Array
    lse: jax.Array


class TileKernel(NamedTuple):
    """How tiles are computed.

    forward: (q [B, S, n, G, K], k and v [B, T, n, K], mask) -> the attention of these queries over these keys alone.
    backward: (q, k, v, mask, whole) -> the gradients of q, k and v by way of this tile, in at least fp32.
    """

    forward: Callable[[jax.Array, jax.Array, jax.Array, TileMask], TileResult]
    backward: Callable[[jax.Array, jax.Array, jax.Array, TileMask, WholeResult], tuple[jax.Array, jax.Array, jax.Array]]


def unseen(queries: Tokens, keys: Tokens, window: int | None) -> jax.Array:
    """Whether a query does not see a key, [B, S, T]: for `TileMask`."""
    at, of = queries.numbers_BS[:, :, None], keys.numbers_BS[:, None, :]
    found = of > at
    if window is not None:
        found = found | (of <= at - window)
    if queries.starts_BS is not None and keys.starts_BS is not None:
        found = found | (queries.starts_BS[:, :, None] != keys.starts_BS[:, None, :])
    return found


def _scores(q: jax.Array, k: jax.Array, mask: TileMask) -> jax.Array:
    scores = einsum_fp32("BSnGK,BTnK->BnGST", q, k) * q.shape[-1] ** -0.5
    hidden = mask.unseen_BST
    if mask.causal:
        later = jnp.triu(jnp.ones((1, q.shape[1], k.shape[1]), bool), 1)
        hidden = later if hidden is None else hidden | later
    if hidden is None:
        return scores
    return scores + jnp.where(hidden, jnp.finfo(scores.dtype).min, jnp.zeros((), scores.dtype))[:, None, None]


def _dropped(x_BnGST: jax.Array, mask: TileMask) -> jax.Array:
    if mask.kept_BhST is None:
        return x_BnGST
    return drop(x_BnGST, mask.kept_BhST.reshape(x_BnGST.shape), mask.dropout)


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: TileMask) -> TileResult:
    scores = _scores(q, k, mask)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = _dropped(jnp.exp(scores - lse[..., None]), mask)
    return TileResult(einsum_fp32("BnGST,BTnK->BSnGK", weights.astype(v.dtype), v), lse.transpose(0, 3, 1, 2))


def _backward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: TileMask, whole: WholeResult
) -> tuple[jax.Array, jax.Array, jax.Array]:
    wide, by_scores = accumulation_dtype(q.dtype), (0, 2, 3, 1)  # [B, S, n, G] -> [B, n, G, S]
    delta = (whole.out.astype(wide) * whole.dout.astype(wide)).sum(-1)
    dout = whole.dout.astype(q.dtype)
    weights = jnp.exp(_scores(q, k, mask) - whole.lse.transpose(by_scores)[..., None])
    dv = einsum_fp32("BnGST,BSnGK->BTnK", _dropped(weights, mask).astype(q.dtype), dout)
    dweights = _dropped(einsum_fp32("BSnGK,BTnK->BnGST", dout, v), mask)
    dscores = weights * (dweights - delta.transpose(by_scores)[..., None])
    dscores = (dscores * q.shape[-1] ** -0.5).astype(q.dtype)
    return einsum_fp32("BnGST,BTnK->BSnGK", dscores, k), einsum_fp32("BnGST,BSnGK->BTnK", dscores, q), dv


XLA_TILES = TileKernel(_forward, _backward)


def merged(a: TileResult, b: TileResult) -> TileResult:
    """The attention over the keys of both, for the same queries."""
    lse = jnp.logaddexp(a.lse, b.lse)
    shares = (jnp.exp(each.lse - lse)[..., None] * each.out for each in (a, b))
    return TileResult(sum(shares, start=jnp.zeros_like(a.out)), lse)
