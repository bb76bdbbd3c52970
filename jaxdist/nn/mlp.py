"""The feed-forward half of a transformer block: column-parallel, nonlinearity, row-parallel."""

import jax
from flax import nnx

from jaxdist.nn.linear import ColumnParallelLinear, RowParallelLinear


class MLP(nnx.Module):
    """kind "gelu": down(gelu(up(x))), tanh approximation as GPT-2. kind "swiglu": down(silu(gate(x)) * up(x)) (Shazeer
    2020), gate and up in one kernel [D, 2, hidden] so that one product makes both."""

    def __init__(self, rngs: nnx.Rngs, width: int, hidden: int, *, kind: str, bias: bool, out_scale: float) -> None:
        gated = kind == "swiglu"
        self.up = ColumnParallelLinear(
            rngs, width, (2, hidden) if gated else (hidden,), split=1 if gated else 0, bias=bias
        )
        self.down = RowParallelLinear(rngs, hidden, width, bias=bias, scale=out_scale)
        self.gated = gated

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = self.up(x)
        if self.gated:
            return self.down(jax.nn.silu(hidden[..., 0, :]) * hidden[..., 1, :])
        return self.down(jax.nn.gelu(hidden))
