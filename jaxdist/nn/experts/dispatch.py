"""What the ways of dispatch have in common: tokens with their choices, and the experts that compute their rows.

Legend: B batch, S positions, D width, E experts, e those of this device, F hidden width of an expert, K choices of a
token, N groups of g tokens.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxdist.collectives import to_varying, varying_axes
from jaxdist.config.sections.moe import MoEConfig
from jaxdist.nn.mlp import NONLINEARITIES
from jaxdist.nn.param import normal

# (rows [..., I], the kernels of this device's experts [e, I, O]) -> rows [..., O], each by the kernel of its expert
MultiplyRows = Callable[[jax.Array, jax.Array], jax.Array]


class RoutedTokens(NamedTuple):
    """The tokens of a device: x_BSD, the experts of each, the best first, and what their results are multiplied by."""

    x_BSD: jax.Array
    experts_BSK: jax.Array
    gates_BSK: jax.Array


class Kernel(nnx.Module):
    """A kernel for each expert, [E, input, *outputs]."""

    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, ...], std: float, spec: tuple[str | None, ...]) -> None:
        self.kernel = normal(rngs, shape, std, spec)


class Experts(nnx.Module):
    """The MLPs of the experts. kind, out_scale: as for `MLP`; there are no biases."""

    def __init__(self, rngs: nnx.Rngs, experts: int, width: int, hidden: int, *, kind: str, out_scale: float) -> None:
        inner = (2, hidden) if kind == "swiglu" else (hidden,)
        split = (*(None,) * (len(inner) - 1), "tensor")
        self.up = Kernel(rngs, (experts, width, *inner), width**-0.5, ("expert", None, *split))
        self.down = Kernel(rngs, (experts, hidden, width), out_scale * hidden**-0.5, ("expert", "tensor", None))
        self.kind = kind

    @property
    def local(self) -> int:
        """The number of experts on this device."""
        return int(self.up.kernel.shape[0])

    def __call__(self, rows: jax.Array, multiply: MultiplyRows) -> jax.Array:
        """[..., D] the result of each row [..., D] by its expert, a part of the sum over `tensor`."""
        up = self.up.kernel[...]
        rows = checkpoint_name(rows, "mlp.rows")
        hidden = multiply(rows, up.reshape(*up.shape[:2], -1)).reshape(*rows.shape[:-1], *up.shape[2:])
        # By JAX's own gradient, not by that of `activation`: there XLA:GPU reads `hidden` twice where a block is
        # computed again, and arrays of all experts are large (1850 in place of 1836 ms a step of Qwen3 30B A3B).
        active = NONLINEARITIES[self.kind](checkpoint_name(hidden, "mlp.hidden"))
        return multiply(checkpoint_name(active, "mlp.activation"), self.down.kernel[...])


class Dispatch(Protocol):
    """A way in which tokens reach their experts: (tokens, experts, options) -> (y, dropped).

    y: [B, S, D] the sum of each token's results times its gates; of the experts' sum over `tensor` this device's part.
    dropped: [B, S, K] which choices had no place.
    """

    def __call__(self, tokens: RoutedTokens, experts: Experts, options: MoEConfig) -> tuple[jax.Array, jax.Array]: ...


def combined(each: jax.Array, gates: jax.Array) -> jax.Array:
    """[N, g, D] the sum of each token's results [N, g K, D] times its gates [N, g, K], added in at least fp32."""
    results = each.reshape(*gates.shape, each.shape[-1]).astype(gates.dtype)
    return jnp.einsum("NgKD,NgK->NgD", results, to_varying(gates, varying_axes(results))).astype(each.dtype)
