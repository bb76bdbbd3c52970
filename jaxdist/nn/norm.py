"""Normalisation over the model width, which no axis splits. Statistics are in at least fp32, results in x's dtype."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxdist.collectives import to_varying, varying_axes
from jaxdist.nn.param import param, zeros
from jaxdist.precision.policy import accumulation_dtype


def _wide(parameter: jax.Array, x: jax.Array) -> jax.Array:
    """The parameter in the dtype of x, typed varying over the axes of x."""
    # The cast stands here so that a gradient is summed over `tensor` when it has shrunk to the parameter's size.
    return to_varying(parameter.astype(x.dtype), varying_axes(x))


def _mean(x: jax.Array) -> jax.Array:
    """The mean over the last dim."""
    # Not `jnp.mean`, which divides: the compiler turns a quotient by a constant into a product in some layouts only,
    # which rounds differently (`parallel.grad_sync.deterministic`).
    return x.sum(axis=-1, keepdims=True) * (1 / x.shape[-1])


class RMSNorm(nnx.Module):
    """Root mean square norm: x / rms(x) * scale (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, *, eps: float) -> None:
        self.scale = param(jnp.ones(width))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(accumulation_dtype(x.dtype))
        wide = wide * lax.rsqrt(_mean(wide * wide) + self.eps)
        return (wide * _wide(self.scale[...], wide)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm: (x - mean) / std * scale + bias (Ba et al. 2016)."""

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
    """A norm of this kind, "layernorm" or "rmsnorm"."""
    return RMSNorm(width, eps=eps) if kind == "rmsnorm" else LayerNorm(width, eps=eps, bias=bias)
