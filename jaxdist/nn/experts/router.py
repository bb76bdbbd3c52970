"""The router of a mixture of experts: which experts a token goes to, and with what weight.

Legend: B batch, s positions on this device, D width, E experts, K choices of a token.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxdist.collectives import active_axes, psum, to_varying, varying_axes
from jaxdist.config.sections.moe import MoEConfig
from jaxdist.errors import UserError
from jaxdist.nn.experts.balance import SUMS, BySign
from jaxdist.nn.param import normal, zeros
from jaxdist.precision.policy import accumulation_dtype


class Routing(NamedTuple):
    """Where tokens go.

    experts_BsK: of each token, the best first. gates_BsK: what its result of each is multiplied by.
    shares_BsE: scores that sum to 1, and logits_BsE, both in at least fp32.
    """

    experts_BsK: jax.Array
    gates_BsK: jax.Array
    shares_BsE: jax.Array
    logits_BsE: jax.Array


class Router(nnx.Module):
    """Token-choice routing: a token goes to the `top_k` experts with the highest scores (Shazeer et al. 2017).

    Scores are a softmax over all experts (Mixtral), or a sigmoid of each by itself (DeepSeek-V3). All of it is computed
    in at least fp32, with parameters in at least fp32: `Precision.keep_fp32` has them.
    """

    def __init__(self, rngs: nnx.Rngs, width: int, options: MoEConfig) -> None:
        experts, rate = options.experts, options.bias_rate
        self.kernel = normal(rngs, (width, experts), width**-0.5, (None, None))
        self.bias = None if rate is None else zeros((experts,), (None,), update=BySign(rate))
        self.statistics = zeros((2 * experts + len(SUMS),), (None,), update=jnp.zeros_like)
        self.options = options

    def __call__(self, x_BsD: jax.Array) -> Routing:
        kernel, wide = self.kernel[...], accumulation_dtype(x_BsD.dtype)
        for parameter in (kernel, self.statistics[...]):
            if parameter.dtype.itemsize < 4:
                raise UserError(
                    f"experts: the router's parameters reach it in {parameter.dtype}, in which its bias would stand"
                    " still and its choices would be coarse; give precision.keep_fp32 the pattern '*.router.*' too"
                )
        # As for a bias: the gradient is summed over `tensor` in fp32, where x is a part of the positions.
        kernel = to_varying(kernel.astype(wide), varying_axes(x_BsD))
        logits = _product(x_BsD.astype(wide), kernel)
        scores = jax.nn.sigmoid(logits) if self.options.scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        ranked = lax.stop_gradient(scores)
        if self.bias is not None:
            ranked = ranked + to_varying(lax.stop_gradient(self.bias[...]).astype(wide), varying_axes(ranked))
        _, experts = lax.top_k(ranked, self.options.top_k)
        gates = jnp.take_along_axis(scores, experts, axis=-1)
        if self.options.normalised:
            gates = gates / gates.sum(-1, keepdims=True)
        shares = scores / scores.sum(-1, keepdims=True) if self.options.scores == "sigmoid" else scores
        return Routing(experts.astype(jnp.int32), gates * self.options.scaling, shares, logits)


@jax.custom_vjp
def _product(x_BsD: jax.Array, kernel_DE: jax.Array) -> jax.Array:
    """x @ kernel -> [B, s, E]. A custom_vjp, which autocast (`Precision.per_op`) leaves in the dtype that it is in."""
    return jnp.einsum("BsD,DE->BsE", x_BsD, kernel_DE)


def _product_backward(kept: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BsD, kernel_DE = kept
    return jnp.einsum("BsE,DE->BsD", grad, kernel_DE), jnp.einsum("BsD,BsE->DE", x_BsD, grad)


_product.defvjp(lambda *given: (_product(*given), given), _product_backward)


def balance_losses(routing: Routing, chosen_BsE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(balance losses [B], squared logsumexp of the router's logits [B], both this device's part of the mean over a
    whole sequence).

    The first is E / K times the sum over experts of the share of choices times the mean score, of each sequence by
    itself (DeepSeek-V3, equations 17 to 20). It so depends neither on the batch nor on the layout.
    chosen_BsE: 1 where a token has chosen an expert.
    """
    _, own, experts = routing.shares_BsE.shape
    axes = ("context", *(("tensor",) if "tensor" in varying_axes(routing.shares_BsE) else ()))
    devices = math.prod(lax.axis_size(axis) for axis in active_axes(axes))
    whole = own * devices
    sums = psum(jnp.stack([lax.stop_gradient(chosen_BsE).sum(1), routing.shares_BsE.sum(1)]), axes)
    share, score = to_varying(sums, varying_axes(routing.shares_BsE)) / whole
    # All devices of a sequence know its whole loss. It counts once.
    balance_B = experts / routing.experts_BsK.shape[-1] * (share * score).sum(-1) / devices
    z_B = jnp.square(jax.nn.logsumexp(routing.logits_BsE, axis=-1)).sum(1) / whole
    return balance_B, z_B
