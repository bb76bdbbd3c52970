"""Tiles of ring attention by cuDNN's fused kernels, which keep no scores in memory.

They are called by JAX's own primitives, since no public function does it: `jax.nn.dot_product_attention` gives the lse,
but its gradient is that of a tile alone, without the gradient by way of the lse (jax issue 32484: a merged result has
wrong gradients of q and k). This is the only file of layers that imports from `jax._src`. `why_no_cudnn_tiles` says
whether the installed jax has the primitives as they are called here: 0.10 to 0.12 do.

Legend: B batch, S queries, T keys, n key/value heads, G query heads of each, K head width.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.collectives import to_varying, varying_axes
from jaxdist.nn.context.tiles import TileKernel, TileMask, TileResult, WholeResult

try:
    from jax._src.cudnn import fused_attention_stablehlo as fused
except ImportError:
    fused = None  # type: ignore[assignment]

PRIMITIVES = "_dot_product_attention_fwd_p_wrapper", "_dot_product_attention_bwd_p_wrapper"
# The functions behind the primitives have these parameters, and no others. Those of a score_mod are new in jax 0.12.
_ARRAYS = "query key value bias q_seqlen kv_seqlen q_offsets kv_offsets page_table_k page_table_v"
_SAVED = "activation fwd_output grad_output"
_STATIC = "scale seed dropout_rate variadic_args mask_type layout sliding_window_length"
UNSEEN = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}  # JAX's own: cuDNN fails with the lowest number of a dtype


def why_no_cudnn_tiles() -> str | None:
    """Why this jax cannot compute tiles by cuDNN; None: it can."""
    names = (*PRIMITIVES, "_dot_product_attention_fwd_impl", "_dot_product_attention_bwd_impl", "MaskType")
    if not all(hasattr(fused, name) for name in (*names, "AttentionLayout")):
        return f"jax {jax.__version__} has no primitives of cuDNN's attention of the known names"
    found = [_parameters("fwd"), _parameters("bwd")]
    for arrays, static in (("", ""), (" score_mod_args", " score_mod")):
        forward = f"{_ARRAYS}{arrays} {_STATIC}{static} is_training"
        if found == [forward.split(), f"{_ARRAYS} {_SAVED}{arrays} {_STATIC}{static}".split()]:
            return None
    return f"jax {jax.__version__}'s primitives of cuDNN's attention have other parameters than the known ones"


def _parameters(which: str) -> list[str]:
    return list(inspect.signature(getattr(fused, f"_dot_product_attention_{which}_impl")).parameters)


def _bind(name: str, mask: TileMask, q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array, **given: Any) -> Any:
    """A primitive of q [B, S, heads, K], k and v [B, T, n, K]. rest: its further arrays."""
    assert mask.kept_BhST is None, "cuDNN's kernel has no dropout by sample"
    none = jnp.zeros(0, q.dtype)  # a bias, lengths, offsets, pages: what is not there is empty
    bias = none if mask.unseen_BST is None else jnp.where(mask.unseen_BST[:, None], UNSEEN[q.dtype.name], 0)
    arrays = to_varying((q, k, v, bias.astype(q.dtype), *[none] * 6, *rest), varying_axes(q))
    if "score_mod" in _parameters("bwd"):
        given["score_mod"] = None
    return getattr(fused, name).bind(
        *arrays,
        scale=q.shape[-1] ** -0.5,
        seed=42,  # of dropout, of which there is none
        dropout_rate=0.0,
        variadic_args=(mask.unseen_BST is not None, False),  # whether there is a bias, and a gradient of it
        mask_type=fused.MaskType.CAUSAL if mask.causal else fused.MaskType.NO_MASK,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=None,
        **given,
    )


def _even(q: jax.Array, k: jax.Array, v: jax.Array, mask: TileMask) -> tuple[jax.Array, jax.Array, jax.Array, TileMask]:
    """The same tile with an even number of queries and of keys, which cuDNN asks for where it has a bias.

    What is added comes last; no query sees an added key.
    """
    if mask.unseen_BST is None:
        return q, k, v, mask
    pad_q, pad_k = q.shape[1] % 2, k.shape[1] % 2
    hidden = jnp.pad(mask.unseen_BST, ((0, 0), (0, pad_q), (0, pad_k)), constant_values=True)
    return _last(q, pad_q), _last(k, pad_k), _last(v, pad_k), mask._replace(unseen_BST=hidden)


def _last(x: jax.Array, count: int) -> jax.Array:
    return jnp.pad(x, [(0, count if dim == 1 else 0) for dim in range(x.ndim)])


def _heads(x: jax.Array) -> jax.Array:
    """[B, S, n, G, ...] -> [B, S, heads, ...]: heads of a group are neighbours in cuDNN."""
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: TileMask) -> TileResult:
    queries = q.shape[1]
    q, k, v, mask = _even(q, k, v, mask)
    out, lse = _bind(PRIMITIVES[0], mask, _heads(q), k, v, is_training=True)
    wide = out.astype(jnp.float32).reshape(q.shape), lse.transpose(0, 2, 1).reshape(q.shape[:-1])
    return TileResult(*(x[:, :queries] for x in wide))


def _backward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: TileMask, whole: WholeResult
) -> tuple[jax.Array, jax.Array, jax.Array]:
    queries, keys = q.shape[1], k.shape[1]
    q, k, v, mask = _even(q, k, v, mask)
    out, dout, lse = (_heads(_last(x, q.shape[1] - queries)) for x in whole)
    rest = lse.transpose(0, 2, 1), out.astype(q.dtype), dout.astype(q.dtype)
    dq, dk, dv = _bind(PRIMITIVES[1], mask, _heads(q), k, v, *rest)
    wide = dq.reshape(q.shape)[:, :queries], dk[:, :keys], dv[:, :keys]
    first, second, third = (x.astype(jnp.float32) for x in wide)
    return first, second, third


CUDNN_TILES = TileKernel(_forward, _backward)
