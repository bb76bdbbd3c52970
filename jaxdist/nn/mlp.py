"""The feed-forward half of a transformer block: column-parallel, nonlinearity, row-parallel."""

import math
from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxdist.nn.linear import ColumnParallelLinear, MatmulOptions, RowParallelLinear


def gelu(x: jax.Array) -> jax.Array:
    """GELU by tanh (Hendrycks and Gimpel 2016, section 2), as `jax.nn.gelu`."""
    # Of two constants and a value, the compiler multiplies the constants first in some layouts and not in others, which
    # gives other bits (`parallel.grad_sync.deterministic`). So the constants are multiplied here.
    linear, cubic = math.sqrt(2 / math.pi), 0.044715 * math.sqrt(2 / math.pi)
    return x * (0.5 * (1 + jnp.tanh(x * (linear + cubic * (x * x)))))


# The derivative by jax 0.12 does not pass the type check of `shard_map`: it has constants that vary over no axis.
_erf = jax.custom_jvp(jax.lax.erf)
_erf.defjvps(lambda tangent, _, x: tangent * (jnp.exp(-x * x) * (2 / math.sqrt(math.pi))))


def gelu_erf(x: jax.Array) -> jax.Array:
    """GELU by the error function (Hendrycks and Gimpel 2016, section 2), as in BERT and ViT."""
    return x * (0.5 * (1 + _erf(x * math.sqrt(0.5))))


def activation(hidden: jax.Array, kind: str) -> jax.Array:
    """What `MLP` applies between its products. hidden: [..., F], or [..., 2, F] for "swiglu"."""
    if kind == "swiglu":
        return jax.nn.silu(hidden[..., 0, :]) * hidden[..., 1, :]
    return (gelu_erf if kind == "gelu_erf" else gelu)(hidden)


class MLP(nnx.Module):
    """Feed-forward layer.

    Names for `memory.remat`: mlp.hidden is the result of the first product, mlp.activation the input of `down`, mlp.out
    the result.

    kind: "gelu" is down(gelu(up(x))), with tanh as in GPT-2; "gelu_erf" is the same with the error function. "swiglu"
        is down(silu(gate(x)) * up(x)) (Shazeer 2020): gate and up are one kernel [D, 2, hidden], so that one product
        computes both.
    out_scale: see `scale` of `RowParallelLinear`.
    matmul: see `MatmulOptions`.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        width: int,
        hidden: int,
        *,
        kind: str,
        bias: bool,
        out_scale: float,
        **matmul: Unpack[MatmulOptions],
    ) -> None:
        gated = kind == "swiglu"
        features = (2, hidden) if gated else (hidden,)
        parts = (("gate", 1), ("up", 1)) if gated else ()
        self.up = ColumnParallelLinear(rngs, width, features, split=int(gated), bias=bias, parts=parts, **matmul)
        self.down = RowParallelLinear(rngs, hidden, width, bias=bias, scale=out_scale, **matmul)
        self.kind = kind

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = checkpoint_name(self.up(x), "mlp.hidden")
        active = checkpoint_name(activation(hidden, self.kind), "mlp.activation")
        return checkpoint_name(self.down(active), "mlp.out")
