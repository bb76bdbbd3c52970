"""Precision policies: the dtypes of stored parameters, of matrix products, and of sums of gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.config.rules.fields import check_section
from jaxdist.config.rules.precision import POLICY_TYPES, Policy, resolve_policy
from jaxdist.config.sections.precision import LossScale, PrecisionConfig
from jaxdist.errors import UserError


class Precision(NamedTuple):
    """Dtypes of one training run.

    param: of stored parameters (the master copy) and of the optimizer state.
    compute: of parameters as layers receive them, and of matrix products. Layers take their dtype from their arrays.
    reduce: of gradients while they are summed over microbatches and devices.
    keep_fp32: patterns ("*norm*") of paths. Layers receive these parameters in at least fp32.
    per_op: whether each operation casts its operands (`jaxdist.precision.autocast`), matrix products to `compute`;
        parameters are then not cast as a whole.
    loss_scale: the factor of the loss before differentiation: a number, "dynamic", or a `LossScale`.
    fp8: whether linear layers multiply in float8 (`jaxdist.nn.matmul.float8`). The model must be built for it.

    >>> mine = jaxdist.Precision(param=jnp.float32, compute=jnp.bfloat16, reduce=jnp.bfloat16)
    >>> jaxdist.StepOptions(precision=mine).precision.received.__name__
    'bfloat16'
    """

    param: Any
    compute: Any
    reduce: Any
    keep_fp32: tuple[str, ...] = ()
    per_op: bool = False
    loss_scale: float | str | LossScale = 1.0
    fp8: bool = False

    @property
    def received(self) -> Any:
        """The dtype in which parameters reach the layers, but for those of `keep_fp32`."""
        return self.param if self.per_op else self.compute

    @property
    def scale_rule(self) -> LossScale | None:
        """The rule of the loss scale; None if the loss is not scaled. Raises `UserError` for a scale of 0, for one."""
        given: Any = self.loss_scale
        fixed = LossScale("fixed", float(given) if hasattr(given, "__float__") else given)
        rule = given if isinstance(given, LossScale) else LossScale("dynamic") if given == "dynamic" else fixed
        check_section(rule, "precision.loss_scale")
        return None if rule.mode == "none" or given == 1 else rule


def _with_dtypes(policy: Policy) -> Precision:
    param, compute, reduce = (getattr(jnp, name) for name in policy[:3])
    return Precision(param, compute, reduce, *policy[3:])


POLICIES = {name: _with_dtypes(policy) for name, policy in POLICY_TYPES.items()}


def make_precision(policy: str, reduce_dtype: str | None = None, **settings: Any) -> Precision:
    """The policy called `policy`, with those of its fields replaced that are given: see `resolve_policy`. Raises
    `UserError` for an unknown policy, for fields that have no effect with the others, and for fp64 without
    `jax_enable_x64`, which must be on before arrays are made: `enable_x64(policy)`."""
    return _enabled(policy, resolve_policy(policy, reduce_dtype, **settings))


def precision_of(config: PrecisionConfig) -> Precision:
    """The precision of a section of a configuration. Raises `UserError`, as `make_precision` does."""
    types, loss_scale = config.resolved()
    return _enabled(config.policy, types)._replace(loss_scale=loss_scale)


def _enabled(policy: str, types: Policy) -> Precision:
    if "float64" in types[:3] and not jax.config.read("jax_enable_x64"):
        raise UserError(f"precision: {policy}, {', '.join(types[:3])}: 64-bit types need jax_enable_x64")
    return _with_dtypes(types)


def enable_x64(policy: str) -> None:
    """Turn on 64-bit types when the policy needs them. Call before the first array is made."""
    if policy == "fp64":
        jax.config.update("jax_enable_x64", True)


def accumulation_dtype(dtype: Any) -> Any:
    """At least fp32: the dtype for sums of values of `dtype` (statistics, softmax, losses)."""
    return jnp.dtype(dtype) if jnp.dtype(dtype).itemsize >= 4 else jnp.dtype(jnp.float32)
