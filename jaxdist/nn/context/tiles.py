"""Tiles of causal attention: some queries over some keys, and the merge of their results by log-sum-exp.

A tile gives, beside its result, the logarithm of its softmax's denominator (lse). With it two tiles over different keys
are merged exactly, and the backward pass of a tile computes its part of the whole softmax's gradient: from the lse and
the result of the whole, not from its own (Dao et al. 2022, FlashAttention, appendix B).

Legend: B batch, S queries, T keys, n key/value heads, G query heads of each, K head width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.nn.matmul.fp32_accumulation import einsum_fp32
from jaxdist.precision.policy import accumulation_dtype


class Tokens(NamedTuple):
    """What masks need to know of the tokens of a tile.

    numbers_BS: their positions in the whole sequence; dim 0 may be 1.
    starts_BS: where their documents start; None: a row is one document.
    """

    numbers_BS: jax.Array
    starts_BS: jax.Array | None


class TileResult(NamedTuple):
    """out: [B, S, n, G, K], in at least fp32. lse: [B, S, n, G]."""

    out: jax.Array
    lse: jax.Array


def hidden(queries: Tokens, keys: Tokens, window: int | None, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The mask of a tile, to be added to scores [B, n, G, S, T]: lowest where a query does not see a key, else 0."""
    at, of = queries.numbers_BS[:, :, None], keys.numbers_BS[:, None, :]
    unseen = of > at
    if window is not None:
        unseen = unseen | (of <= at - window)
    if queries.starts_BS is not None and keys.starts_BS is not None:
        unseen = unseen | (queries.starts_BS[:, :, None] != keys.starts_BS[:, None, :])
    return jnp.where(unseen, jnp.asarray(jnp.finfo(dtype).min, dtype), jnp.zeros((), dtype))[:, None, None]


def _scores(q: jax.Array, k: jax.Array, mask: jax.Array | None) -> jax.Array:
    scores = einsum_fp32("BSnGK,BTnK->BnGST", q, k) * q.shape[-1] ** -0.5
    return scores if mask is None else scores + mask


def tile(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> TileResult:
    """The attention of these queries over these keys alone. mask: of `hidden`; None: all keys are seen."""
    scores = _scores(q, k, mask)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None])
    return TileResult(einsum_fp32("BnGST,BTnK->BSnGK", weights.astype(v.dtype), v), lse.transpose(0, 3, 1, 2))


def tile_gradients(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, dout: jax.Array, lse: jax.Array, delta: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v by way of this tile, in at least fp32.

    dout: the gradient of the whole result. lse: of the whole softmax. delta: [B, S, n, G], the sum over K of the whole
        result times dout.
    """
    rows = (0, 2, 3, 1)  # [B, S, n, G] -> [B, n, G, S]
    dout = dout.astype(q.dtype)
    weights = jnp.exp(_scores(q, k, mask) - lse.transpose(rows)[..., None])
    dv = einsum_fp32("BnGST,BSnGK->BTnK", weights.astype(q.dtype), dout)
    dscores = weights * (einsum_fp32("BSnGK,BTnK->BnGST", dout, v) - delta.transpose(rows)[..., None])
    dscores = (dscores * q.shape[-1] ** -0.5).astype(q.dtype)
    return einsum_fp32("BnGST,BTnK->BSnGK", dscores, k), einsum_fp32("BnGST,BSnGK->BTnK", dscores, q), dv


def merged(a: TileResult, b: TileResult) -> TileResult:
    """The attention over the keys of both, for the same queries."""
    lse = jnp.logaddexp(a.lse, b.lse)
    shares = (jnp.exp(each.lse - lse)[..., None] * each.out for each in (a, b))
    return TileResult(sum(shares, start=jnp.zeros_like(a.out)), lse)


def delta_of(out: jax.Array, dout: jax.Array) -> jax.Array:
    """[B, S, n, G], see `tile_gradients`."""
    wide = accumulation_dtype(out.dtype)
    return (out.astype(wide) * dout.astype(wide)).sum(-1)
