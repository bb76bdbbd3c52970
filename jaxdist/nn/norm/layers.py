"""Normalisation over the model width, which no axis splits. Statistics are in at least fp32, results in x's dtype."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.errors import UserError
from jaxdist.nn.norm.normalize import normalize
from jaxdist.nn.param import param, zeros


class RMSNorm(nnx.Module):
    """Root mean square norm: x / rms(x) * scale (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, *, eps: float) -> None:
        self.scale = param(jnp.ones(width))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return normalize(x, self.scale[...], None, centred=False, eps=self.eps)


class LayerNorm(nnx.Module):
    """Layer norm: (x - mean) / std * scale + bias (Ba et al. 2016)."""

    def __init__(self, width: int, *, eps: float, bias: bool = True) -> None:
        self.scale = param(jnp.ones(width))
        self.bias = zeros((width,), (None,)) if bias else None
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        return normalize(x, self.scale[...], bias, centred=True, eps=self.eps)


def make_norm(kind: str, width: int, *, eps: float, bias: bool) -> LayerNorm | RMSNorm:
    """A norm of this kind, "layernorm" or "rmsnorm". Raises `UserError` for another."""
    if kind not in ("layernorm", "rmsnorm"):
        raise UserError(f"kind: {kind!r} is no norm; allowed: layernorm, rmsnorm")
    return RMSNorm(width, eps=eps) if kind == "rmsnorm" else LayerNorm(width, eps=eps, bias=bias)
