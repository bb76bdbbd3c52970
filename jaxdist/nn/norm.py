"""Normalisation over the model width, which no axis splits. Statistics in at least fp32, result in the input's
dtype."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxdist.collectives import to_varying, varying_axes
from jaxdist.nn.param import param, zeros
from jaxdist.precision.policy import accumulation_dtype


def _wide(parameter: jax.Array, x: jax.Array) -> jax.Array:
    """In the dtype of x, varying over the same axes: gradients are summed over `tensor` (see `sequence`) once they are
    as small as the parameter."""
    return to_varying(parameter.astype(x.dtype), varying_axes(x))


def _mean(x: jax.Array) -> jax.Array:
    """Over the last dim. A product, not `jnp.mean`'s quotient: the compiler turns quotients by constants into products
    in some layouts and not in others, which rounds differently (`parallel.grad_sync.deterministic`)."""
    return x.sum(axis=-1, keepdims=True) * (1 / x.shape[-1])


class RMSNorm(nnx.Module):
    """x / rms(x) * scale (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, *, eps: float) -> None:
        self.scale = param(jnp.ones(width))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(accumulation_dtype(x.dtype))
        wide = wide * lax.rsqrt(_mean(wide * wide) + self.eps)
        return (wide * _wide(self.scale[...], wide)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / std * scale + bias (Ba et al. 2016)."""

    def __init__(self, width: int, *, eps: float, bias: bool = True) -> None:
        self.scale = param(jnp.ones(width))
        self.bias = zeros((width,), (None,)) if bias else None
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(accumulation_dtype(x.dtype))
        wide = wide - _mean(wide)
        wide = wide * lax.rsqrt(_mean(wide * wide) + self.eps)
        wide = wide * _wide(self.scale[...], wide)
        return (wide if self.bias is None else wide + _wide(self.bias[...], wide)).astype(x.dtype)


def make_norm(kind: str, width: int, *, eps: float, bias: bool) -> LayerNorm | RMSNorm:
    """kind: "layernorm" or "rmsnorm"."""
    return RMSNorm(width, eps=eps) if kind == "rmsnorm" else LayerNorm(width, eps=eps, bias=bias)
