"""The feed-forward half of a transformer block: column-parallel, nonlinearity, row-parallel."""

import math
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.collectives import to_varying, varying_axes
from jaxdist.errors import UserError
from jaxdist.mesh import traced_for_gpus
from jaxdist.nn.linear import ColumnParallelLinear, MatmulOptions, RowParallelLinear
from jaxdist.precision.policy import accumulation_dtype

Nonlinearity = Callable[[jax.Array], jax.Array]


def gelu(x: jax.Array) -> jax.Array:
    """GELU by tanh (Hendrycks and Gimpel 2016, section 2), as `jax.nn.gelu`."""
    # Of two constants and a value, the compiler multiplies the constants first in some layouts and not in others, which
    # gives other bits (`parallel.grad_sync.deterministic`). So the constants are multiplied here.
    linear, cubic = math.sqrt(2 / math.pi), 0.044715 * math.sqrt(2 / math.pi)
    if traced_for_gpus():  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        return x * _short_sigmoid(x * (2 * linear + 2 * cubic * (x * x)))
    return x * (0.5 * (1 + jnp.tanh(x * (linear + cubic * (x * x)))))


@jax.custom_jvp
def _short_sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x)) in fewer instructions of a GPU, whose time they take: a root is one, a quotient several. On one
    H200 GELU of bf16 [32768, 4096] took 176 microseconds so, and 216 by tanh; its gradient 215 and 259."""
    root = lax.rsqrt(1 + jnp.exp(-x))
    return root * root


_short_sigmoid.defjvps(lambda tangent, result, _: tangent * (result * (1 - result)))


# The derivative by jax 0.12 does not pass the type check of `shard_map`: it has constants that vary over no axis.
_erf = jax.custom_jvp(jax.lax.erf)
_erf.defjvps(lambda tangent, _, x: tangent * (jnp.exp(-x * x) * (2 / math.sqrt(math.pi))))


def gelu_erf(x: jax.Array) -> jax.Array:
    """GELU by the error function (Hendrycks and Gimpel 2016, section 2), as in BERT and ViT."""
    return x * (0.5 * (1 + _erf(x * math.sqrt(0.5))))


def swiglu(x: jax.Array) -> jax.Array:
    """silu(gate) * up (Shazeer 2020). x: gate and up, [..., 2, F] -> [..., F]."""
    return jax.nn.silu(x[..., 0, :]) * x[..., 1, :]


NONLINEARITIES: dict[str, Nonlinearity] = {"gelu": gelu, "gelu_erf": gelu_erf, "swiglu": swiglu}


def activation(y: jax.Array, kind: str, bias: jax.Array | None = None) -> jax.Array:
    """The activation of y + bias, computed in at least fp32, in the dtype of y. Without derivatives by `jax.jvp`.

    y: [..., F], or [..., 2, F] for "swiglu". kind: of `NONLINEARITIES`. bias: like y without its leading dims, or None.
    """
    if bias is not None:
        bias = bias.astype(accumulation_dtype(y.dtype))
        y, bias = to_varying((y, bias), varying_axes(y) | varying_axes(bias))
    return _activation(NONLINEARITIES[kind], y, bias)


def _of_biased(function: Nonlinearity, y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return function(_biased(y, bias)).astype(y.dtype)


_activation = jax.custom_vjp(_of_biased, nondiff_argnums=(0,))


def _biased(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    wide = y.astype(accumulation_dtype(y.dtype))
    return wide if bias is None else wide + bias


def _forward(function: Nonlinearity, y: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, Any]:
    # Nothing else is kept. JAX's own gradient keeps another array of this size, the tanh, which takes a GPU longer to
    # write and read than to compute again; and with a bias inside, y + bias is no array at all.
    return _of_biased(function, y, bias), (y, bias)


def _backward(function: Nonlinearity, saved: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    y, bias = saved
    wide = _biased(y, bias)
    # Times a 1 that the compiler does not know, or it would keep what the forward pass has computed after all.
    one = lax.optimization_barrier(to_varying(jnp.ones((), wide.dtype), varying_axes(y)))
    (dy,) = jax.vjp(function, wide * one)[1](grad.astype(wide.dtype))
    dy = lax.optimization_barrier(dy.astype(y.dtype))  # or XLA:GPU would store it in fp32, for the sum below
    return dy, None if bias is None else dy.astype(bias.dtype).sum(tuple(range(dy.ndim - bias.ndim)))


_activation.defvjp(_forward, _backward)


def check_kind(kind: str) -> None:
    """Raise `UserError` for a feed-forward layer that is none."""
    if kind not in NONLINEARITIES:
        raise UserError(f"kind: {kind!r} is no feed-forward layer; allowed: {', '.join(NONLINEARITIES)}")


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
        check_kind(kind)
        gated = kind == "swiglu"
        features = (2, hidden) if gated else (hidden,)
        parts = (("gate", 1), ("up", 1)) if gated else ()
        self.up = ColumnParallelLinear(rngs, width, features, split=int(gated), bias=bias, parts=parts, **matmul)
        self.down = RowParallelLinear(rngs, hidden, width, bias=bias, scale=out_scale, **matmul)
        self.kind = kind

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = checkpoint_name(self.up.without_bias(x), "mlp.hidden")
        bias = None if self.up.bias is None else self.up.bias[...]
        active = checkpoint_name(activation(hidden, self.kind, bias), "mlp.activation")
        return checkpoint_name(self.down(active), "mlp.out")
