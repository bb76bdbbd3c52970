"""What balances experts, and what is counted of them.

Neither needs a path of its own through schedules, rematerialisation and ZeRO: each is the "gradient" of a parameter.
The router has a parameter of zeros, `statistics`, whose "gradient" is what was counted, and perhaps a `bias`, which is
added to scores for the choice alone and whose "gradient" is the number of tokens of each expert
(DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al. 2024, arXiv 2408.15664). These sums then go over
microbatches, devices and stages exactly as those of gradients do, once for each token. No optimizer sees them
(`UpdateRule`).

Losses inside a block, which does not return any, come in the same way: as gradients of what they depend on.

Legend: B batch, E experts, L blocks.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxdist.collectives import to_varying, varying_axes
from jaxdist.optim.norms import ordered_sum
from jaxdist.specs import STACKED, PyTree, leaves_by_name

AT_THE_MEAN = 3e-6  # of the mean: less than one token of the most that an expert gets in a step, 300,000
SUMS = ("balance_loss", "z_loss", "entropy")  # behind the counts of chosen and of dropped tokens


@dataclass(frozen=True)
class BySign:
    """The `UpdateRule` of a balancing bias: it falls for experts with more tokens than the mean, and rises for others.

    rate: how far in a step.
    """

    rate: float

    def __call__(self, gradient: jax.Array, /) -> jax.Array:
        """gradient: tokens of each expert [..., E], times any factor."""
        # Summed in an order that depends on no layout. What rounding leaves of an expert at the mean is no sign.
        total = ordered_sum
        for _ in gradient.shape[:-1]:
            total = jax.vmap(total)
        mean = total(gradient)[..., None] * (1 / gradient.shape[-1])
        excess = gradient - mean
        return jnp.where(jnp.abs(excess) > AT_THE_MEAN * mean, -self.rate * jnp.sign(excess), jnp.zeros_like(excess))


@jax.custom_vjp
def with_gradient(y: jax.Array, parameter: jax.Array, gradient: jax.Array) -> jax.Array:
    """y. The gradient of the parameter is `gradient`, whatever that of y."""
    return y


with_gradient.defvjp(lambda y, parameter, gradient: (y, gradient), lambda gradient, dy: (dy, gradient, None))


def with_count(y: jax.Array, parameter: jax.Array, count: jax.Array) -> jax.Array:
    """y. The "gradient" of the parameter is the count, summed over all devices that have one of their own."""
    counted_on = to_varying(parameter, varying_axes(count))  # autodiff transposes the cast to that sum
    return with_gradient(y, counted_on, to_varying(count, varying_axes(counted_on)).astype(parameter.dtype))


def with_loss(y: jax.Array, loss_B: jax.Array, weight_B: jax.Array) -> jax.Array:
    """y. The sum of weight times loss is added to what is differentiated, and not to any value."""
    return with_gradient(y, loss_B, to_varying(weight_B.astype(loss_B.dtype), varying_axes(loss_B)))


def expert_figures(grads: PyTree) -> dict[str, jax.Array]:
    """What a step tells of its experts. grads: of the mean loss.

    - experts/max_load: the largest number of tokens of an expert over the mean, in the block where it is largest.
    - experts/dropped: the share of choices without a place.
    - experts/entropy: of the router's scores, over that of equal ones; 1: it prefers none.
    - experts/balance_loss, experts/z_loss: means over tokens and blocks, without their coefficients.
    - experts/load: [L, E] tokens over the mean, in the order of the rows of stacked blocks.
    """
    found = [leaf for name, leaf in leaves_by_name(grads[STACKED]).items() if name.endswith("router.statistics")]
    if not found:  # they are frozen
        return {}
    (statistics,) = found
    experts = (statistics.shape[1] - len(SUMS)) // 2
    chosen, dropped, sums = jnp.split(statistics, (experts, 2 * experts), axis=1)
    total = chosen.sum(1, keepdims=True)  # 0 in a row without a block
    inverse = jnp.where(total != 0, 1 / total, jnp.zeros_like(total))
    load = chosen * inverse * experts
    blocks = jnp.maximum((total != 0).sum(), 1)  # 0 only where no row counts anything
    mean = lambda values: (values * inverse[:, 0]).sum() / blocks.astype(values.dtype)  # noqa: E731
    means = {f"experts/{name}": mean(sums[:, i]) for i, name in enumerate(SUMS)}
    return {"experts/max_load": load.max(), "experts/dropped": mean(dropped.sum(1)), **means, "experts/load": load}
