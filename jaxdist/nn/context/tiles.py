"""Tiles of causal attention: some queries over some keys, and the merge of their results by log-sum-exp.

A tile gives, beside its result, the logarithm of its softmax's denominator (lse). With it two tiles over different keys
are merged exactly, and the backward pass of a tile computes its part of the whole softmax's gradient: from the lse and
the result of the whole, not from its own (Dao et al. 2022, FlashAttention, appendix B).

Legend: B batch, S queries, T keys, n key/value heads, G query heads of each, R = G S, K head width.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.collectives import to_varying, varying_axes
from jaxdist.config.rules.remat import ATTENTION_RESULT
from jaxdist.nn.context.dropout_masks import drop
from jaxdist.nn.matmul.fp32_accumulation import einsum_fp32
from jaxdist.precision.autocast import casting
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


def unseen_pairs(queries: Tokens, keys: Tokens, window: int | None) -> jax.Array:
    """Whether a query does not see a key, [B, S, T]: for `TileMask`."""
    at, of = queries.numbers_BS[:, :, None], keys.numbers_BS[:, None, :]
    found = of > at
    if window is not None:
        found = found | (of <= at - window)
    if queries.starts_BS is not None and keys.starts_BS is not None:
        found = found | (queries.starts_BS[:, :, None] != keys.starts_BS[:, None, :])
    return found


def _rows(x_BSnGK: jax.Array) -> jax.Array:
    """The queries of a key/value head as the rows of a matrix, [B, n, G S, K]. With G and S as dims of their own a tile
    takes XLA:CPU almost twice as long."""
    batch, _, heads, _, width = x_BSnGK.shape
    return x_BSnGK.transpose(0, 2, 3, 1, 4).reshape(batch, heads, -1, width)


def _unfolded(x_BnRK: jax.Array, length: int) -> jax.Array:
    """[B, n, G S, K] -> [B, S, n, G, K], the reverse of `_rows`."""
    batch, heads, _, width = x_BnRK.shape
    return x_BnRK.reshape(batch, heads, -1, length, width).transpose(0, 3, 1, 2, 4)


def _scores(q_BnRK: jax.Array, k_BTnK: jax.Array, mask: TileMask, length: int) -> jax.Array:
    """[B, n, R, T], of R = G S rows. length: S."""
    scores = einsum_fp32("BnRK,BTnK->BnRT", q_BnRK, k_BTnK) * q_BnRK.shape[-1] ** -0.5
    hidden = mask.unseen_BST
    if mask.causal:
        later = jnp.triu(jnp.ones((1, length, k_BTnK.shape[1]), bool), 1)
        hidden = later if hidden is None else hidden | later
    if hidden is None:
        return scores
    by_query = scores.reshape(*scores.shape[:2], -1, length, scores.shape[-1])
    return jnp.where(hidden[:, None, None], jnp.finfo(scores.dtype).min, by_query).reshape(scores.shape)


def _dropped(x_BnRT: jax.Array, mask: TileMask) -> jax.Array:
    if mask.kept_BhST is None:
        return x_BnRT
    return drop(x_BnRT, mask.kept_BhST.reshape(x_BnRT.shape), mask.dropout)


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: TileMask) -> TileResult:
    length = q.shape[1]
    scores = _scores(_rows(q), k, mask, length)
    most = lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - most)
    # The result is divided by the sums of the weights: it is smaller than these.
    sums, weights = weights.sum(-1, keepdims=True), _dropped(weights, mask).astype(v.dtype)
    out = einsum_fp32("BnRT,BTnK->BnRK", weights, v) / sums
    return TileResult(_unfolded(out, length), _unfolded(most + jnp.log(sums), length)[..., 0])


def _backward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: TileMask, whole: WholeResult
) -> tuple[jax.Array, jax.Array, jax.Array]:
    wide, length = accumulation_dtype(q.dtype), q.shape[1]
    delta = (whole.out.astype(wide) * whole.dout.astype(wide)).sum(-1)
    rows, dout = _rows(q), _rows(whole.dout.astype(q.dtype))
    weights = jnp.exp(_scores(rows, k, mask, length) - _rows(whole.lse[..., None]))
    dv = einsum_fp32("BnRT,BnRK->BTnK", _dropped(weights, mask).astype(q.dtype), dout)
    dweights = _dropped(einsum_fp32("BnRK,BTnK->BnRT", dout, v), mask)
    dscores = weights * (dweights - _rows(delta[..., None]))
    dscores = (dscores * q.shape[-1] ** -0.5).astype(q.dtype)
    dq = _unfolded(einsum_fp32("BnRT,BTnK->BnRK", dscores, k), length)
    return dq, einsum_fp32("BnRT,BnRK->BTnK", dscores, rows), dv


XLA_TILES = TileKernel(_forward, _backward)


def _by_softmax(q: jax.Array, k: jax.Array, v: jax.Array, mask: TileMask) -> jax.Array:
    """`one_tile` without a rule of its own for the backward pass. The weights are divided before they are multiplied:
    a sum over undivided ones may leave the range of fp16."""
    weights = _dropped(jax.nn.softmax(_scores(_rows(q), k, mask, q.shape[1]), axis=-1), mask)
    return _unfolded(einsum_fp32("BnRT,BTnK->BnRK", weights.astype(v.dtype), v), q.shape[1]).astype(v.dtype)


def with_names(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both, with the names by which `memory.remat` keeps them. Where one is kept, the backward pass does not attend
    again."""
    for name in ("attention.context", ATTENTION_RESULT):
        out, lse = checkpoint_name(out, name), checkpoint_name(lse, name)
    return out, lse


def one_tile(q: jax.Array, k: jax.Array, v: jax.Array, mask: TileMask) -> jax.Array:
    """The attention of all queries over all keys, [B, S, n, G, K], whose backward pass computes the weights again.

    So it keeps the result and its lse, no array of S times T numbers but what is in the mask. They have the names
    attention.context and `ATTENTION_RESULT`, as those of a ring. Under autocast (O1) it is differentiated operation by
    operation. Like all functions with a `jax.custom_vjp` it has derivatives by `jax.grad`, and none by `jax.jvp`. A
    query that sees no key gets the mean of the values, and gradients that are too large: callers give it zeros.
    """
    if casting.value:
        return checkpoint_name(_by_softmax(q, k, v, mask), "attention.context")
    arrays = q, k, v, mask.unseen_BST, mask.kept_BhST
    axes = frozenset[str]().union(*(varying_axes(x) for x in arrays if x is not None))
    precision = jax.config.jax_default_matmul_precision  # of the caller: the backward pass is traced elsewhere
    return _one_tile(*to_varying((q, k, v), axes), *arrays[3:], (mask.causal, mask.dropout, precision))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _one_tile(
    q: jax.Array, k: jax.Array, v: jax.Array, unseen: jax.Array | None, kept: jax.Array | None, given: Any
) -> jax.Array:
    return _one_tile_forward(q, k, v, unseen, kept, given)[0]


def _one_tile_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, unseen: jax.Array | None, kept: jax.Array | None, given: Any
) -> tuple[jax.Array, Any]:
    causal, dropout, _ = given
    found = XLA_TILES.forward(q, k, v, TileMask(causal, unseen, kept, dropout))
    out, lse = with_names(found.out.astype(v.dtype), found.lse)
    return out, (q, k, v, unseen, kept, out, lse)


def _one_tile_backward(given: Any, saved: Any, dout: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    q, k, v, unseen, kept, out, lse = saved
    causal, dropout, precision = given
    q, k, dout = lax.optimization_barrier((q, k, dout))  # else XLA would keep the scores of the forward pass
    with jax.default_matmul_precision(precision):
        mask, whole = TileMask(causal, unseen, kept, dropout), WholeResult(out, dout, lse)
        dq, dk, dv = XLA_TILES.backward(q, k, v, mask, whole)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_one_tile.defvjp(_one_tile_forward, _one_tile_backward)


def merged(a: TileResult, b: TileResult) -> TileResult:
    """The attention over the keys of both, for the same queries."""
    lse = jnp.logaddexp(a.lse, b.lse)
    shares = (jnp.exp(each.lse - lse)[..., None] * each.out for each in (a, b))
    return TileResult(sum(shares, start=jnp.zeros_like(a.out)), lse)
