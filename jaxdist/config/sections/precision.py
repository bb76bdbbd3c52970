"""The section `precision` of a configuration, and the loss scale. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from jaxdist.config.rules.fields import section, setting
from jaxdist.config.rules.precision import DTYPE_NAMES, HALVES, POLICY_TYPES, Policy, resolve_policy


@dataclass(frozen=True)
class LossScale:
    """The loss scale of half precision, by the names of torch.amp.GradScaler. `loss_scale: dynamic` is short for
    `loss_scale: {mode: dynamic}`."""

    mode: str | None = setting(
        None,
        "dynamic: moves with overflows; fixed: stays; none: no scaling; null: by policy",
        choices=("none", "fixed", "dynamic"),
    )
    init_scale: float = setting(65536.0, "scale of the first step, or of all (fixed)", above=0, at_most=3e38)
    growth_factor: float = setting(2.0, "dynamic: multiplies the scale after growth_interval good steps", at_least=1)
    backoff_factor: float = setting(0.5, "dynamic: multiplies the scale after an overflow", above=0, at_most=1)
    growth_interval: int = setting(2000, "dynamic: good steps in a row before the scale grows", at_least=1)

    @property
    def factors(self) -> tuple[float, float]:
        """By what the scale is multiplied when it grows, and after an overflow."""
        return (1.0, 1.0) if self.mode == "fixed" else (self.growth_factor, self.backoff_factor)


@dataclass(frozen=True)
class PrecisionConfig:
    """Number types; what is null goes by the policy. `precision: bf16` is short for `precision: {policy: bf16}`."""

    policy: str = setting("fp32", "types of parameters and computation", choices=tuple(POLICY_TYPES))
    reduce_dtype: str | None = setting(None, "type in which gradients are summed", choices=DTYPE_NAMES)
    half: str | None = setting(
        None, "fp16, O1 to O3: bfloat16 in place of float16, without a loss scale", choices=HALVES
    )
    param_dtype: str | None = setting(None, "type of parameters and optimizer state at rest", choices=DTYPE_NAMES)
    compute_dtype: str | None = setting(
        None, "type of matrix products, and of what layers receive", choices=DTYPE_NAMES
    )
    keep_fp32: tuple[str, ...] | None = setting(
        None, "parameters that layers receive in fp32, by patterns: ['*norm*', head.*]"
    )
    per_op: bool | None = setting(None, "true: parameters are not cast, each operation casts its operands (autocast)")
    loss_scale: LossScale = section(LossScale, "scaling of the loss", shorthand="mode")
    max_consecutive_skips: int = setting(
        10, "steps in a row that may be skipped as not finite; one more ends the run", at_least=0
    )

    def resolved(self) -> tuple[Policy, LossScale]:
        """The types, and the loss scale with its mode. Raises `UserError` for settings that exclude each other."""
        apart = ("loss_scale", "max_consecutive_skips")
        types = resolve_policy(**{key.name: getattr(self, key.name) for key in fields(self) if key.name not in apart})
        return types, replace(self.loss_scale, mode=self.loss_scale.mode or types.scale_mode)
