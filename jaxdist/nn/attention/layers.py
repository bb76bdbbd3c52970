"""Self-attention and cross-attention with grouped-query heads (Ainslie et al. 2023), heads split over `tensor`.

Legend: B batch, S sequence of queries, T sequence of keys and values, D model width, K head width, G query heads of one
key/value head, n key/value heads on this device.
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.errors import UserError
from jaxdist.nn.attention.cache import BlockCache
from jaxdist.nn.attention.kernels import SITE_CROSS, SITE_PROBABILITIES, PackedDocuments, attention, cudnn_attention
from jaxdist.nn.attention.rotary import RopeScaling, rotary
from jaxdist.nn.context.cudnn_tiles import why_no_cudnn_tiles
from jaxdist.nn.context.forms import OVER_CONTEXT, RING, check_context_form
from jaxdist.nn.context.positions import ContextSplit, context_size, own_context
from jaxdist.nn.context.ring import TILES, ring_attention
from jaxdist.nn.dropout import check_rate
from jaxdist.nn.linear import ColumnParallelLinear, MatmulOptions, RowParallelLinear
from jaxdist.nn.norm import RMSNorm
from jaxdist.precision.autocast import casting


class QKVProjection(nnx.Module):
    """Projection to queries, keys and values by one matrix product: h [B, S, D] -> [B, S, n, G, K], 2 x [B, S, n, K].

    The kernel is [D, key/value heads, G + 2, K], split over the key/value heads. A device thus has whole groups, and
    its query heads need no keys of another device. The result has the name attention.qkv (`memory.remat`).

    head_width: the width K of a head; width / heads, if left out.
    matmul: see `MatmulOptions`. With sequence, h is this device's positions, while q, k and v are all positions.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        width: int,
        heads: int,
        kv_heads: int,
        *,
        bias: bool,
        head_width: int | None = None,
        **matmul: Unpack[MatmulOptions],
    ) -> None:
        features = kv_heads, heads // kv_heads + 2, head_width or width // heads
        parts = ("q", features[1] - 2), ("k", 1), ("v", 1)
        self.linear = ColumnParallelLinear(rngs, width, features, bias=bias, parts=parts, **matmul)

    def __call__(self, h_BSD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        qkv = checkpoint_name(self.linear(h_BSD), "attention.qkv")
        return _parts(qkv) if casting.value else _split(qkv)  # autocast would give `_split` the dtype of its trace


def _parts(qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[B, S, n, G + 2, K] -> queries [B, S, n, G, K], keys and values [B, S, n, K]."""
    return qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]


def _whole(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The inverse of `_parts`."""
    joined = jnp.concatenate((q, k[..., None, :], v[..., None, :]), axis=-2)
    # XLA:GPU would join them in the kernel that sums the gradient of a bias, at half the speed of two kernels.
    return lax.optimization_barrier(joined)


_split = jax.custom_vjp(_parts)
_split.defvjp(lambda qkv: (_parts(qkv), None), lambda _, grads: (_whole(*grads),))


def _check_heads(heads: int, kv_heads: int, width: int, head_width: int | None) -> None:
    """Raise `UserError` for heads that do not divide the width, and for key/value heads that do not divide the heads.
    head_width: None where it goes by the width, for which `Attention` alone may be given another."""
    if heads < 1 or (head_width is None and width % heads):
        raise UserError(
            f"heads: {heads} with width {width}; allowed: a number that divides the width; or Attention(head_width=...)"
        )
    if kv_heads < 1 or heads % kv_heads:
        raise UserError(f"kv_heads: {kv_heads} with heads {heads}; allowed: a number that divides the heads")


def _check_kernel(kernel: str, dropout: float, context: str | None = None) -> None:
    """Raise `UserError` for a kernel of attention that is none, or that cannot do this."""
    check_rate(dropout)
    if kernel not in TILES:
        raise UserError(f"kernel: {kernel!r} is no kernel of attention; allowed: {', '.join(TILES)}")
    if kernel == "cudnn" and dropout:
        raise UserError(f"kernel: 'cudnn' drops nothing, and dropout is {dropout:g}; allowed: xla; or dropout=0")
    if kernel == "cudnn" and context == RING and (why := why_no_cudnn_tiles()) is not None:
        raise UserError(f"kernel: 'cudnn' does not compute a ring: {why}; allowed: xla")


def _attend(layer: "Attention | CrossAttention", q: jax.Array, k: jax.Array, v: jax.Array, *given: Any) -> jax.Array:
    """The attention of a layer and its output projection -> [B, S, D].

    given: dropout keys; what is seen, a key mask or `PackedDocuments`; positions.
    """
    (keys_B, seen, positions), own = given, isinstance(layer, Attention)
    documents, seen_BT = (seen, None) if isinstance(seen, PackedDocuments) else (None, seen)
    causal, window = (layer.causal, layer.window) if isinstance(layer, Attention) else (False, None)
    if layer.kernel == "cudnn" and positions is None:
        context = cudnn_attention(q, k, v, causal=causal, window=window, seen_BT=seen_BT, documents=documents)
    else:
        site: Any = {"site": SITE_PROBABILITIES if own else SITE_CROSS, "dropout": layer.dropout}
        mask: Any = {"causal": causal, "window": window, "seen_BT": seen_BT, "documents": documents}
        context = attention(q, k, v, keys_B, positions=positions, **mask, **site)
    return _projected(layer, context)


def _projected(layer: "Attention | CrossAttention", context: jax.Array) -> jax.Array:
    return checkpoint_name(layer.out(context.reshape(*context.shape[:2], -1)), "attention.out")


def _attend_over_context(
    layer: "Attention", q: jax.Array, k: jax.Array, v: jax.Array, keys_B: jax.Array, seen: Any
) -> jax.Array:
    """`_attend` where the devices of `context` have other positions of the same samples, each its own q, k and v.

    seen: `PackedDocuments`, or None.
    """
    if layer.context is None or not layer.causal:
        raise UserError(
            "context: this attention is not split over the mesh axis context; allowed: causal attention that is built"
            " for it, as Attention(..., context='all_to_all'), or a mesh with context=1"
        )
    if seen is not None and not isinstance(seen, PackedDocuments):
        raise UserError(
            "context: a key mask is not split over the mesh axis context; allowed: none, PackedDocuments, or a mesh"
            " with context=1"
        )
    if layer.context == RING:
        starts_BS = None if seen is None else seen.starts_BS
        given: Any = {
            "window": layer.window,
            "kernel": layer.kernel,
            "dropout": layer.dropout,
            "site": SITE_PROBABILITIES,
        }
        return _projected(layer, ring_attention(q, k, v, starts_BS, keys_B, **given))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, split: ContextSplit, positions: Any = None) -> jax.Array:
        documents = seen
        if seen is not None and split == "queries":
            documents = seen._replace(queries_BS=own_context(seen.starts_BS, dim=1))
        if layer.kernel == "cudnn" and positions is None:
            return cudnn_attention(q, k, v, window=layer.window, documents=documents)
        given: Any = {"window": layer.window, "documents": documents, "positions": positions}
        return attention(q, k, v, keys_B, dropout=layer.dropout, split=split, **given)

    return _projected(layer, OVER_CONTEXT[layer.context](attend, q, k, v))


class Attention(nnx.Module):
    """Self-attention: QKV projection, optional norms and rotary positions, attention, output projection.

    Names for `memory.remat`: attention.context is the input of the output projection, attention.out its result.

    kernel: "xla", or "cudnn", which has no dropout.
    causal: whether a position sees only those up to its own.
    window: of causal attention, how many of these a position sees. None: all.
    context: of causal attention, how it goes over the mesh axis `context`: "all_to_all", "gather" or "ring"
        (`jaxdist.nn.context.forms`). None: the axis must be off.
    head_width: the width of a head; width / heads, if left out.
    qkv_bias: whether queries, keys and values have a bias; as `bias`, if left out.
    qk_norm_eps: epsilon of a norm of each query and of each key over its head, before the rotation, with one scale for
        all heads (Henry et al. 2020). None: no such norm.
    matmul: see `MatmulOptions`. Only the two projections multiply in float8. With sequence, input and output are this
        device's positions; heads see all positions.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        width: int,
        heads: int,
        kv_heads: int,
        *,
        bias: bool,
        rope_theta: float | None = None,
        rope_scaling: RopeScaling | None = None,
        dropout: float = 0.0,
        out_scale: float = 1.0,
        kernel: str = "xla",
        causal: bool = True,
        window: int | None = None,
        context: str | None = None,
        head_width: int | None = None,
        qkv_bias: bool | None = None,
        qk_norm_eps: float | None = None,
        **matmul: Unpack[MatmulOptions],
    ) -> None:
        if window is not None and (window < 1 or not causal):
            of = "" if causal else ", with causal=False"
            raise UserError(f"window: {window}{of}; allowed: 1 or more positions of causal attention; or None, all")
        _check_heads(heads, kv_heads, width, head_width)
        check_context_form(context, causal=causal)
        _check_kernel(kernel, dropout, context)
        self.kernel, self.causal, self.window, self.context = kernel, causal, window, context
        head_width, qkv_bias = head_width or width // heads, bias if qkv_bias is None else qkv_bias
        self.qkv = QKVProjection(rngs, width, heads, kv_heads, bias=qkv_bias, head_width=head_width, **matmul)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_width, eps=qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_width, eps=qk_norm_eps)
        self.out = RowParallelLinear(rngs, heads * head_width, width, bias=bias, scale=out_scale, **matmul)
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        self.dropout = dropout

    def __call__(
        self,
        h_BSD: jax.Array,
        keys_B: jax.Array,
        seen_BS: jax.Array | PackedDocuments | None = None,
        cache: BlockCache | None = None,
    ) -> jax.Array:
        """h_BSD -> the same shape.

        - seen_BS: a key mask, as in `attention`, of all positions; or the documents of a row. Rotary positions need not
          begin again with these: only distances count.
        - cache: of earlier positions; h is the new ones.
        """
        q, k, v = self.qkv(h_BSD)
        at = None if cache is None else cache.queries_BS
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is not None:
            by_head = q.reshape(*q.shape[:2], -1, q.shape[-1])
            q = rotary(by_head, self.rope_theta, self.rope_scaling, at).reshape(q.shape)
            k = rotary(k, self.rope_theta, self.rope_scaling, at)
        if context_size() > 1:
            return _attend_over_context(self, q, k, v, keys_B, seen_BS)
        k, v = (k, v) if cache is None else cache.extend(k, v)
        return _attend(self, q, k, v, keys_B, seen_BS, None if cache is None else cache.seen)


class CrossAttention(nnx.Module):
    """Cross-attention (Vaswani et al. 2017, 3.2.3): queries from h [B, S, D], keys and values from memory [B, T, M].

    Names for `memory.remat` are those of `Attention`, without attention.qkv.

    memory_width: the width M.
    kernel: "xla", or "cudnn", which has no dropout.
    matmul: see `MatmulOptions`. With sequence, h, memory and the result are this device's positions.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        width: int,
        memory_width: int,
        heads: int,
        kv_heads: int,
        *,
        bias: bool,
        dropout: float = 0.0,
        out_scale: float = 1.0,
        kernel: str = "xla",
        **matmul: Unpack[MatmulOptions],
    ) -> None:
        _check_kernel(kernel, dropout)
        _check_heads(heads, kv_heads, width, None)
        self.kernel, self.dropout = kernel, dropout
        head_width = width // heads
        both = ("k", 1), ("v", 1)
        self.q = ColumnParallelLinear(rngs, width, (kv_heads, heads // kv_heads, head_width), bias=bias, **matmul)
        self.kv = ColumnParallelLinear(rngs, memory_width, (kv_heads, 2, head_width), bias=bias, parts=both, **matmul)
        self.out = RowParallelLinear(rngs, width, width, bias=bias, scale=out_scale, **matmul)

    def __call__(
        self, h_BSD: jax.Array, memory_BTM: jax.Array, keys_B: jax.Array, seen_BT: jax.Array | None = None
    ) -> jax.Array:
        """memory_BTM: cast to the dtype of h. seen_BT: a key mask, as in `attention`, of all of its positions.

        Raises `UserError` on a mesh with `context`.
        """
        if context_size() > 1:
            raise UserError("context: cross-attention is not split over the mesh axis context; allowed: context=1")
        kv = self.kv(memory_BTM.astype(h_BSD.dtype))
        return _attend(self, self.q(h_BSD), kv[..., 0, :], kv[..., 1, :], keys_B, seen_BT, None)
