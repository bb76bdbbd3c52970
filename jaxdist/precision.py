"""Precision policies: which dtype parameters rest in, matrices multiply in, and gradients are summed in."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.errors import UserError
from jaxdist.guard import ScaleRule


class Precision(NamedTuple):
    """Dtypes of one training run.

    param: parameters and optimizer state at rest (the master copy). compute: what layers receive and multiply in;
    layers take their dtype from their arrays. reduce: gradients while they are summed over microbatches and devices.
    loss_scale: "dynamic", a `ScaleRule`, or a fixed number.
    """

    param: Any
    compute: Any
    reduce: Any
    loss_scale: float | str | ScaleRule = 1.0

    @property
    def scale_rule(self) -> ScaleRule | None:
        """How the loss is scaled; None: not at all."""
        if isinstance(self.loss_scale, ScaleRule):
            return self.loss_scale
        if self.loss_scale == "dynamic":
            return ScaleRule()
        return None if self.loss_scale == 1 else ScaleRule(float(self.loss_scale), 1.0, 1.0)


POLICIES = {
    "fp32": Precision(jnp.float32, jnp.float32, jnp.float32),
    "bf16": Precision(jnp.float32, jnp.bfloat16, jnp.float32),
    "fp64": Precision(jnp.float64, jnp.float64, jnp.float64),  # for checks: layouts must agree to 1e-10
}


def make_precision(policy: str, reduce_dtype: str | None = None) -> Precision:
    """The policy called `policy`, with its reduce dtype replaced when one is given.

    fp64 needs `jax_enable_x64`, which must be on before arrays are made: `enable_x64(policy)`.
    """
    if policy not in POLICIES:
        raise UserError(f"precision.policy: {policy!r} is not known; allowed: {', '.join(POLICIES)}")
    chosen = POLICIES[policy]
    chosen = chosen if reduce_dtype is None else chosen._replace(reduce=np.dtype(jnp.dtype(reduce_dtype)))
    if any(jnp.dtype(dtype).itemsize == 8 for dtype in chosen[:3]) and not jax.config.read("jax_enable_x64"):
        raise UserError(f"precision: {policy}, reduce_dtype {reduce_dtype}: 64-bit types need jax_enable_x64")
    return chosen


def enable_x64(policy: str) -> None:
    """Turn on 64-bit types when the policy needs them. Call before the first array is made."""
    if policy == "fp64":
        jax.config.update("jax_enable_x64", True)


def accumulation_dtype(dtype: Any) -> Any:
    """At least fp32: the dtype for sums of values of `dtype` (statistics, softmax, losses)."""
    return jnp.dtype(dtype) if jnp.dtype(dtype).itemsize >= 4 else jnp.dtype(jnp.float32)
