"""Attention of queries over keys and values: in plain JAX, and by cuDNN.

Legend: B batch, S sequence of queries, T sequence of keys and values, D model width, K head width, G query heads of one
key/value head, n key/value heads on this device.
"""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.collectives import to_varying, varying_axes
from jaxdist.nn.context.positions import ContextSplit
from jaxdist.nn.context.tiles import TileMask, Tokens, one_tile, unseen_pairs
from jaxdist.nn.dropout import kept_heads

SITE_PROBABILITIES, SITE_CROSS = 1, 1 << 16  # of dropout: a block may have one attention of each kind


class PackedDocuments(NamedTuple):
    """Several documents in a row of tokens, one after the other, which do not see each other.

    starts_BS: for each token, the position in the row at which its document starts; integers. With a document of three
        tokens and one of two: [0, 0, 0, 3, 3].
    queries_BS: the same of the queries, where these are other tokens than the keys; None: the same tokens.
    """

    starts_BS: jax.Array
    queries_BS: jax.Array | None = None

    def positions(self) -> jax.Array:
        """The position of each token in its document, [B, S]."""
        return jnp.arange(self.starts_BS.shape[1], dtype=self.starts_BS.dtype) - self.starts_BS

    def apart(self) -> jax.Array:
        """Whether a query and a key are in different documents, [B, S, T]."""
        queries_BS = self.starts_BS if self.queries_BS is None else self.queries_BS
        return queries_BS[:, :, None] != self.starts_BS[:, None, :]


def attention(
    q_BSnGK: jax.Array,
    k_BTnK: jax.Array,
    v_BTnK: jax.Array,
    keys_B: jax.Array,
    *,
    dropout: float,
    causal: bool = True,
    window: int | None = None,
    seen_BT: jax.Array | None = None,
    documents: PackedDocuments | None = None,
    positions: tuple[jax.Array, jax.Array] | None = None,
    site: int = SITE_PROBABILITIES,
    split: ContextSplit | None = None,
) -> jax.Array:
    """Attention softmax(q k / sqrt(K)) v -> [B, S, n, G, K].

    Scores and softmax are in at least fp32, products in the input's dtype. Scores take O(S T) memory while they are
    computed; the backward pass computes them again (`jaxdist.nn.context.tiles`).

    causal: whether a query sees only keys up to its own position.
    window: of causal attention, how many of these a query sees, the last ones (Beltagy et al. 2020). None: all.
    seen_BT: a key mask: whether a key may be seen, True for what is no padding. None: all may be. A query that sees
        no key gets zeros.
    documents: a query sees keys of its own document only. None: a row is one document.
    positions: of queries [B, S] and of keys [B, T], by which causal attention goes. None: both are
        0, 1, ...
    site: of dropout, see `jaxdist.nn.dropout`.
    split: what the mesh axis `context` has split, see `kept_heads`.
    """
    seen_BT = None if seen_BT is None else seen_BT.astype(bool)
    batch, length, n, groups, _ = q_BSnGK.shape
    unseen, numbered = list[jax.Array](), window is not None or positions is not None
    if causal and numbered:
        queries, keys = positions or (jnp.arange(length)[None],) * 2
        unseen.append(unseen_pairs(Tokens(queries, None), Tokens(keys, None), window))
    if seen_BT is not None:
        unseen.append(~seen_BT[:, None, :])
    if documents is not None:
        unseen.append(documents.apart())
    mask = TileMask(causal and not numbered, functools.reduce(jnp.logical_or, unseen) if unseen else None)
    if dropout:
        shape = batch, n * groups, length, k_BTnK.shape[1]
        kept = kept_heads(shape, keys_B, site=site, rate=dropout, split=split)
        mask = mask._replace(kept_BhST=kept, dropout=dropout)
    context = one_tile(q_BSnGK, k_BTnK, v_BTnK, mask)
    return _zeros_where_nothing_is_seen(context, seen_BT, causal=causal, window=window)


def _zeros_where_nothing_is_seen(
    context_BSnGK: jax.Array, seen_BT: jax.Array | None, *, causal: bool, window: int | None
) -> jax.Array:
    """Zeros for queries that see no key; without this they get the mean over all values."""
    if seen_BT is None:
        return context_BSnGK
    seen_BT = seen_BT.astype(jnp.int32)
    any_BS = lax.cummax(seen_BT, axis=1) if causal else seen_BT.max(axis=1, keepdims=True)
    if causal and window is not None:
        count_BS = lax.cumsum(seen_BT, axis=1)
        any_BS = count_BS - jnp.pad(count_BS, ((0, 0), (window, 0)))[:, : count_BS.shape[1]] > 0
    return context_BSnGK * any_BS[..., None, None, None].astype(context_BSnGK.dtype)


def cudnn_attention(
    q_BSnGK: jax.Array,
    k_BTnK: jax.Array,
    v_BTnK: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    seen_BT: jax.Array | None = None,
    documents: PackedDocuments | None = None,
) -> jax.Array:
    """`attention` by cuDNN's fused kernel: no dropout, no scores in memory, softmax in fp32.

    A key mask and documents become a bias [B, 1, S, T] in the dtype of the queries. Odd lengths, as images with a class
    token have, are padded by one position, which jax's check asks for where it differentiates.

    Only for inputs to which `why_not_cudnn` returns None: there is no fallback.
    """
    by_head = q_BSnGK.reshape(*q_BSnGK.shape[:2], -1, q_BSnGK.shape[-1])  # heads of a group are neighbours in cuDNN
    mask = None
    if seen_BT is not None:
        seen_BT, (batch, length) = seen_BT.astype(bool), seen_BT.shape
        mask = jnp.broadcast_to(seen_BT[:, None, None, :], (batch, 1, q_BSnGK.shape[1], length))
    if documents is not None:
        together = ~documents.apart()[:, None]
        mask = together if mask is None else mask & together
    local = None if window is None else (window - 1, 0)  # keys before a query's own, and after it
    lengths: list[jax.Array | None] = [None, None]  # of queries and keys
    if mask is not None:
        mask = _even(_even(mask, 2), 3)
    elif k_BTnK.shape[1] % 2 and not causal:  # a query of causal attention does not see what is after all others
        full = [jnp.full(len(k_BTnK), x.shape[1], jnp.int32) for x in (by_head, k_BTnK)]
        lengths = [to_varying(each, varying_axes(k_BTnK)) for each in full]
    context = jax.nn.dot_product_attention(
        _even(by_head, 1),
        _even(k_BTnK, 1),
        _even(v_BTnK, 1),
        mask=mask,
        is_causal=causal,
        query_seq_lengths=lengths[0],
        key_value_seq_lengths=lengths[1],
        local_window_size=local,
        implementation="cudnn",
    )
    context = checkpoint_name(context[:, : by_head.shape[1]].reshape(q_BSnGK.shape), "attention.context")
    return _zeros_where_nothing_is_seen(context, seen_BT, causal=causal, window=window)


def _even(x: jax.Array, dim: int) -> jax.Array:
    """x with a last position of zeros along dim, or of False, if its length is odd."""
    return jnp.pad(x, [(0, x.shape[dim] % 2 if each == dim else 0) for each in range(x.ndim)])


def why_not_cudnn(
    *,
    capability: str,
    dtype: Any,
    head_width: int,
    dropout: float,
    per_op: bool = False,
    masked: bool = False,
    window: int | None = None,
) -> str | None:
    """The reason why cuDNN's kernel cannot compute this attention, or None, whether causal or not.

    capability: the CUDA compute capability of the devices, "9.0" for Hopper; "" if they have none.
    dtype: the dtype of queries, keys and values.
    per_op: whether precision.per_op casts operation by operation.
    masked: whether there is a key mask, or documents are kept apart.
    window: see `attention`.

    Sources: `check_is_flash_attention` of jax 0.10 and 0.12, in jax/_src/cudnn/fused_attention_stablehlo.py; for 8.0
    cuDNN's documentation of its attention.
    """
    if not re.fullmatch(r"\d+\.\d+", capability):
        return "the devices are no NVIDIA GPUs"
    generation = float(capability)
    if generation < 8:
        return f"cuDNN's kernel needs compute capability 8.0 (Ampere), not {capability}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN computes attention in bfloat16 or float16, not {jnp.dtype(dtype)}"
    if per_op:
        return "precision.per_op casts operation by operation, and cuDNN's is one"
    if dropout:
        return (
            f"model.dropout is {dropout:g} (given, or read by model.from): cuDNN's kernel has no dropout by sample;"
            " with model.dropout=0 it is used"
        )
    widest = 256 if generation >= 9 else 128
    if head_width % 8 or head_width > widest:
        return f"cuDNN takes heads of 8, 16, ... {widest} values here, not {head_width}"
    if masked and window is not None:
        return "cuDNN takes a mask or a window, not both"
    return None
