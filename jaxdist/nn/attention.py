"""Causal self-attention with grouped-query heads (Ainslie et al. 2023), heads split over `tensor`.

Legend: B batch, S and T sequence, D model width, K head width, G query heads of one key/value head, n key/value heads
on this device.
"""

import re
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxdist.nn.dropout import dropout_heads
from jaxdist.nn.linear import ColumnParallelLinear, MatmulOptions, RowParallelLinear
from jaxdist.nn.matmul.fp32_accumulation import einsum_fp32
from jaxdist.precision.policy import accumulation_dtype

SITE_PROBABILITIES = 1


def rotary(x_BSHK: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding (Su et al. 2021). Elements i and K/2 + i of a head are a pair, as in Llama."""
    half = x_BSHK.shape[-1] // 2
    wide = accumulation_dtype(x_BSHK.dtype)
    frequencies = jnp.asarray(theta ** -(np.arange(half) / half), wide)
    angles = jnp.arange(x_BSHK.shape[1], dtype=wide)[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    a, b = jnp.split(x_BSHK.astype(wide), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSHK.dtype)


def causal_attention(
    q_BSnGK: jax.Array, k_BTnK: jax.Array, v_BTnK: jax.Array, keys_B: jax.Array, *, dropout: float
) -> jax.Array:
    """Causal attention softmax(q k / sqrt(K)) v -> [B, S, n, G, K].

    Scores and softmax are in at least fp32, products in the input's dtype. The scores take O(S^2) memory.
    """
    batch, length, n, groups, width = q_BSnGK.shape
    wide = accumulation_dtype(q_BSnGK.dtype)
    scores = einsum_fp32("BSnGK,BTnK->BnGST", q_BSnGK, k_BTnK) * width**-0.5
    # The mask is added: the backward pass of a `where` would keep a mask as large as the scores.
    future = jnp.triu(jnp.full((length, length), jnp.finfo(wide).min, wide), 1)
    weights = jax.nn.softmax(scores + future, axis=-1)
    by_head = weights.reshape(batch, n * groups, length, length)
    weights = dropout_heads(by_head, keys_B, site=SITE_PROBABILITIES, rate=dropout).reshape(weights.shape)
    return jnp.einsum("BnGST,BTnK->BSnGK", weights.astype(v_BTnK.dtype), v_BTnK)


def cudnn_attention(q_BSnGK: jax.Array, k_BTnK: jax.Array, v_BTnK: jax.Array) -> jax.Array:
    """Causal attention by cuDNN's fused kernel: no dropout, no scores in memory, softmax in fp32.

    Only for inputs to which `why_not_cudnn` returns None: there is no fallback.
    """
    by_head = q_BSnGK.reshape(*q_BSnGK.shape[:2], -1, q_BSnGK.shape[-1])  # heads of a group are neighbours in cuDNN
    context = jax.nn.dot_product_attention(by_head, k_BTnK, v_BTnK, is_causal=True, implementation="cudnn")
    return context.reshape(q_BSnGK.shape)


def why_not_cudnn(*, capability: str, dtype: Any, head_width: int, dropout: float, per_op: bool = False) -> str | None:
    """The reason why cuDNN's kernel cannot compute this attention, or None. The length does not matter.

    capability: the CUDA compute capability of the devices, "9.0" for Hopper; "" if they have none.
    dtype: the dtype of queries, keys and values.
    per_op: whether precision.per_op casts operation by operation.

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
        return "model.dropout drops inside attention, by sample, which cuDNN's kernel cannot"
    widest = 256 if generation >= 9 else 128
    if head_width % 8 or head_width > widest:
        return f"cuDNN takes heads of 8, 16, ... {widest} values here, not {head_width}"
    return None


class QKVProjection(nnx.Module):
    """Projection to queries, keys and values by one matrix product: h [B, S, D] -> [B, S, n, G, K], 2 x [B, S, n, K].

    The kernel is [D, key/value heads, G + 2, K], split over the key/value heads. A device thus has whole groups, and
    its query heads need no keys of another device. The result has the name attention.qkv (`memory.remat`).

    matmul: see `MatmulOptions`. With sequence, h is this device's positions, while q, k and v are all positions.
    """

    def __init__(
        self, rngs: nnx.Rngs, width: int, heads: int, kv_heads: int, *, bias: bool, **matmul: Unpack[MatmulOptions]
    ) -> None:
        features = kv_heads, heads // kv_heads + 2, width // heads
        self.linear = ColumnParallelLinear(rngs, width, features, bias=bias, **matmul)

    def __call__(self, h_BSD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        qkv = checkpoint_name(self.linear(h_BSD), "attention.qkv")
        return qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]


class Attention(nnx.Module):
    """Self-attention: QKV projection, optional rotary positions, causal attention, output projection.

    Names for `memory.remat`: attention.context is the input of the output projection, attention.out its result.

    kernel: "xla", or "cudnn", which has no dropout.
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
        rope_theta: float | None,
        dropout: float,
        out_scale: float,
        kernel: str = "xla",
        **matmul: Unpack[MatmulOptions],
    ) -> None:
        self.kernel = kernel
        self.qkv = QKVProjection(rngs, width, heads, kv_heads, bias=bias, **matmul)
        self.out = RowParallelLinear(rngs, width, width, bias=bias, scale=out_scale, **matmul)
        self.rope_theta = rope_theta
        self.dropout = dropout

    def __call__(self, h_BSD: jax.Array, keys_B: jax.Array) -> jax.Array:
        q, k, v = self.qkv(h_BSD)
        if self.rope_theta is not None:
            q = rotary(q.reshape(*q.shape[:2], -1, q.shape[-1]), self.rope_theta).reshape(q.shape)
            k = rotary(k, self.rope_theta)
        if self.kernel == "cudnn":
            context = cudnn_attention(q, k, v)
        else:
            context = causal_attention(q, k, v, keys_B, dropout=self.dropout)
        context = checkpoint_name(context.reshape(*context.shape[:2], -1), "attention.context")
        return checkpoint_name(self.out(context), "attention.out")
