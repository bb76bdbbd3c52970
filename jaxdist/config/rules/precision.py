"""`precision`: the types that each policy stands for, and what goes together. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from jaxdist.errors import UserError

DTYPE_NAMES = ("float32", "bfloat16", "float16", "float64")
HALVES = ("float16", "bfloat16")
NORMS = ("*norm*", "*Norm*")  # parameters of normalisation, by how Flax, PyTorch and jaxdist call them
ROUTERS = ("*.router.*",)  # of experts: in a half type their biases would stand still
SMALLEST_FLOAT16 = 1e-7  # its step near zero is 6e-8
SCALE_MOVES = ("growth_factor", "backoff_factor", "growth_interval")


class Policy(NamedTuple):
    """The types that a policy stands for, by their names. The fields are those of `jaxdist.Precision`."""

    param: str
    compute: str
    reduce: str
    keep_fp32: tuple[str, ...] = ()
    per_op: bool = False
    loss_scale: float | str = 1.0
    fp8: bool = False

    @property
    def received(self) -> str:
        """The type in which parameters reach the layers, but for those of `keep_fp32`."""
        return self.param if self.per_op else self.compute

    @property
    def scale_mode(self) -> Literal["none", "dynamic"]:
        """The mode of the loss scale, where none is set."""
        return "none" if self.loss_scale == 1 else "dynamic"


POLICY_TYPES = {
    "fp32": Policy("float32", "float32", "float32"),
    "bf16": Policy("float32", "bfloat16", "float32", ROUTERS),
    "fp16": Policy("float32", "float16", "float32", NORMS + ROUTERS, loss_scale="dynamic"),
    "fp8": Policy("float32", "bfloat16", "float32", ROUTERS, fp8=True),
    "fp64": Policy("float64", "float64", "float64"),  # for checks: layouts must agree to 1e-10
    # NVIDIA Apex's opt levels (apex.amp.frontend).
    "O0": Policy("float32", "float32", "float32"),
    "O1": Policy("float32", "float16", "float32", per_op=True, loss_scale="dynamic"),
    "O2": Policy("float32", "float16", "float32", NORMS + ROUTERS, loss_scale="dynamic"),
    "O3": Policy("float16", "float16", "float16"),
}


def resolve_policy(
    policy: str,
    reduce_dtype: str | None = None,
    *,
    half: str | None = None,
    param_dtype: str | None = None,
    compute_dtype: str | None = None,
    keep_fp32: Sequence[str] | None = None,
    per_op: bool | None = None,
) -> Policy:
    """The policy called `policy`, with those of its fields replaced that are given.

    half: "bfloat16" in place of each float16 of the policy; with its range no loss scale is needed, so that is 1 then.
    Raises `UserError` for an unknown policy, and for fields that have no effect with the others.
    """
    if policy not in POLICY_TYPES:
        raise UserError(f"precision.policy: {policy!r} is not known; allowed: {', '.join(POLICY_TYPES)}")
    chosen = POLICY_TYPES[policy] if half is None else _with_half(policy, half)
    given: dict[str, Any] = {"param": param_dtype, "compute": compute_dtype, "reduce": reduce_dtype}
    chosen = chosen._replace(**{name: dtype for name, dtype in given.items() if dtype is not None})
    if compute_dtype is not None:  # whatever it is by policy, float16 alone needs one; O3 is float16 without
        chosen = chosen._replace(loss_scale="dynamic" if compute_dtype == "float16" and policy != "O3" else 1.0)
    if per_op is not None:
        chosen = chosen._replace(per_op=per_op)
    if chosen.per_op and chosen.compute not in HALVES:
        raise UserError(
            f"precision.per_op: true casts matrix products to a half type, and precision.compute_dtype is"
            f" {chosen.compute}; allowed precision.compute_dtype: {', '.join(HALVES)}"
        )
    if chosen.fp8 and (chosen.per_op or chosen.compute == "float16"):
        raise UserError(
            f"precision.policy: 'fp8' with precision.per_op {str(chosen.per_op).lower()}, precision.compute_dtype"
            f" {chosen.compute}: layers quantise by themselves, and sum beyond float16; allowed: per_op false,"
            " compute_dtype bfloat16 or float32"
        )
    return chosen if keep_fp32 is None else chosen._replace(keep_fp32=_patterns(keep_fp32, chosen))


def _with_half(policy: str, half: str) -> Policy:
    chosen = POLICY_TYPES[policy]
    if half not in HALVES:
        raise UserError(f"precision.half: {half!r} is not known; allowed: {', '.join(HALVES)}")
    if "float16" not in chosen[:3]:
        having = ", ".join(name for name, each in POLICY_TYPES.items() if "float16" in each[:3])
        raise UserError(
            f"precision.half: {half!r} stands for the float16 of a policy, and {policy} has none; allowed with"
            f" {having}; or set precision.compute_dtype"
        )
    if half == "float16":
        return chosen
    param, compute, reduce = (half if dtype == "float16" else dtype for dtype in chosen[:3])
    return chosen._replace(param=param, compute=compute, reduce=reduce, loss_scale=1.0)


def _patterns(keep_fp32: Sequence[str], chosen: Policy) -> tuple[str, ...]:
    if isinstance(keep_fp32, str):
        raise UserError(f"precision.keep_fp32: {keep_fp32!r} is one text; give a list of patterns, [{keep_fp32!r}]")
    if keep_fp32 and chosen.received not in HALVES:
        raise UserError(
            f"precision.keep_fp32: {', '.join(keep_fp32)}: layers receive all parameters in {chosen.received}"
            " already; leave it out, or set precision.compute_dtype"
        )
    return tuple(keep_fp32)


def check_float64(policy: str, **dtypes: str | None) -> None:
    """Raise `UserError` for float64 in another policy than fp64, which turns on 64-bit types. dtypes: by key."""
    for key, dtype in dtypes.items():
        if dtype == "float64" and policy != "fp64":
            raise UserError(
                f"precision.{key}: 'float64' needs precision.policy fp64, not {policy};"
                " allowed: float32, bfloat16, float16"
            )


def check_half_state(param: str, *, optimizer: str, eps: float) -> None:
    """Raise `UserError` for an optimizer that cannot keep its state in float16, where parameters are kept in it."""
    if param == "float16" and optimizer in ("adafactor", "muon"):
        raise UserError(
            f"optimizer.name: {optimizer!r} divides by constants that are zero in float16, in which this precision"
            " keeps the optimizer's state; allowed: adamw, sgd, lion; or precision.param_dtype=float32"
        )
    if param == "float16" and optimizer == "adamw" and eps < SMALLEST_FLOAT16:
        raise UserError(
            f"optimizer.eps: {eps:g} is zero in float16, in which this precision keeps the optimizer's state;"
            f" allowed: at least {SMALLEST_FLOAT16:g}, such as 1e-4; or precision.param_dtype=float32"
        )


def check_scale(mode: str, values: dict[str, float], usual: dict[str, float]) -> None:
    """Raise `UserError` for settings of `precision.loss_scale` without effect in this mode. usual: their defaults."""
    unused = {"dynamic": (), "fixed": SCALE_MOVES, "none": ("init_scale", *SCALE_MOVES)}[mode]
    for key in unused:
        if values[key] != usual[key]:
            raise UserError(
                f"precision.loss_scale.{key}: {values[key]:g} has no effect where the scale is {mode}; allowed:"
                f" {usual[key]:g}; or precision.loss_scale.mode=dynamic"
            )


def check_skips(skips: int, usual: int, *, mode: str, on_nonfinite: str) -> None:
    """Raise `UserError` for a `precision.max_consecutive_skips` without effect: where no step is skipped."""
    if mode == "none" and on_nonfinite != "skip" and skips != usual:
        raise UserError(
            f"precision.max_consecutive_skips: {skips} has no effect: without a loss scale, and with"
            f" train.on_nonfinite {on_nonfinite}, no step is skipped; allowed: {usual}; or train.on_nonfinite=skip"
        )
