"""Precision policies: which dtype parameters rest in, matrices multiply in, and gradients are summed in."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.errors import UserError
from jaxdist.precision.loss_scale import ScaleRule


class Precision(NamedTuple):
    """Dtypes of one training run.

    param: parameters and optimizer state at rest (the master copy). compute: what layers receive and multiply in;
    layers take their dtype from their arrays. reduce: gradients while they are summed over microbatches and devices.
    keep_fp32: patterns ("*norm*") of the paths of parameters that layers receive in at least fp32. per_op: parameters
    are not cast as a whole, each operation casts its operands (`jaxdist.precision.autocast`), matrix products to
    `compute`.
    loss_scale: what the loss is multiplied by before it is differentiated, "dynamic", a `ScaleRule`, or a number.
    fp8: linear layers multiply in float8 (`jaxdist.nn.matmul.float8`); the model must be built for it.
    """

    param: Any
    compute: Any
    reduce: Any
    keep_fp32: tuple[str, ...] = ()
    per_op: bool = False
    loss_scale: float | str | ScaleRule = 1.0
    fp8: bool = False

    @property
    def received(self) -> Any:
        """The dtype in which parameters reach the layers, but for those of `keep_fp32`."""
        return self.param if self.per_op else self.compute

    @property
    def scale_rule(self) -> ScaleRule | None:
        """How the loss is scaled; None: not at all."""
        if isinstance(self.loss_scale, ScaleRule):
            return self.loss_scale
        if self.loss_scale == "dynamic":
            return ScaleRule()
        return None if self.loss_scale == 1 else ScaleRule(float(self.loss_scale), 1.0, 1.0)


NORMS = ("*norm*", "*Norm*")  # parameters of normalisation, by how Flax, PyTorch and jaxdist call them
HALVES = (np.dtype(jnp.float16), np.dtype(jnp.bfloat16))
POLICIES = {
    "fp32": Precision(jnp.float32, jnp.float32, jnp.float32),
    "bf16": Precision(jnp.float32, jnp.bfloat16, jnp.float32),
    "fp16": Precision(jnp.float32, jnp.float16, jnp.float32, NORMS, loss_scale="dynamic"),
    "fp8": Precision(jnp.float32, jnp.bfloat16, jnp.float32, fp8=True),
    "fp64": Precision(jnp.float64, jnp.float64, jnp.float64),  # for checks: layouts must agree to 1e-10
    # NVIDIA Apex's opt levels (apex.amp.frontend).
    "O0": Precision(jnp.float32, jnp.float32, jnp.float32),
    "O1": Precision(jnp.float32, jnp.float16, jnp.float32, per_op=True, loss_scale="dynamic"),
    "O2": Precision(jnp.float32, jnp.float16, jnp.float32, NORMS, loss_scale="dynamic"),
    "O3": Precision(jnp.float16, jnp.float16, jnp.float16),
}


def make_precision(
    policy: str,
    reduce_dtype: str | None = None,
    *,
    half: str | None = None,
    param_dtype: str | None = None,
    compute_dtype: str | None = None,
    keep_fp32: Sequence[str] | None = None,
    per_op: bool | None = None,
) -> Precision:
    """The policy called `policy`, with those of its fields replaced that are given.

    half: "bfloat16" in place of each float16 of the policy; with its range no loss scale is needed, so that is 1 then.
    fp64 needs `jax_enable_x64`, which must be on before arrays are made: `enable_x64(policy)`. Raises `UserError` for
    an unknown policy, and for fields that have no effect with the others.
    """
    if policy not in POLICIES:
        raise UserError(f"precision.policy: {policy!r} is not known; allowed: {', '.join(POLICIES)}")
    chosen = POLICIES[policy]
    if half is not None:
        chosen = _with_half(policy, half)
    given = {"param": param_dtype, "compute": compute_dtype, "reduce": reduce_dtype}
    dtypes: dict[str, Any] = {field: np.dtype(jnp.dtype(dtype)) for field, dtype in given.items() if dtype is not None}
    chosen = chosen._replace(**dtypes)
    if "compute" in dtypes:  # whatever it is by policy, float16 alone needs one; O3 is float16 without
        chosen = chosen._replace(loss_scale="dynamic" if chosen.compute == jnp.float16 and policy != "O3" else 1.0)
    if per_op is not None:
        chosen = chosen._replace(per_op=per_op)
    if chosen.per_op and np.dtype(chosen.compute) not in HALVES:
        raise UserError(
            f"precision.per_op: casts matrix products to a half type, and compute_dtype is "
            f"{jnp.dtype(chosen.compute)}; allowed compute_dtype: float16, bfloat16"
        )
    if chosen.fp8 and (chosen.per_op or np.dtype(chosen.compute) == jnp.float16):
        raise UserError(
            f"precision.policy: 'fp8' with per_op {chosen.per_op}, compute_dtype"
            f" {jnp.dtype(chosen.compute)}: layers quantise by themselves, and sum beyond float16; allowed:"
            " per_op false, compute_dtype bfloat16 or float32"
        )
    if keep_fp32 is not None:
        chosen = chosen._replace(keep_fp32=_patterns(keep_fp32, chosen))
    if any(jnp.dtype(dtype).itemsize == 8 for dtype in chosen[:3]) and not jax.config.read("jax_enable_x64"):
        raise UserError(f"precision: {policy}, {given}: 64-bit types need jax_enable_x64")
    return chosen


def _with_half(policy: str, half: str) -> Precision:
    chosen = POLICIES[policy]
    if half not in ("float16", "bfloat16"):
        raise UserError(f"precision.half: {half!r} is not known; allowed: float16, bfloat16")
    if jnp.float16 not in chosen[:3]:
        having = ", ".join(name for name, each in POLICIES.items() if jnp.float16 in each[:3])
        raise UserError(
            f"precision.half: {half!r} stands for the float16 of a policy, and {policy} has none; allowed "
            f"with {having}; or set compute_dtype"
        )
    if half == "float16":
        return chosen
    param, compute, reduce = (jnp.bfloat16 if dtype is jnp.float16 else dtype for dtype in chosen[:3])
    return chosen._replace(param=param, compute=compute, reduce=reduce, loss_scale=1.0)


def _patterns(keep_fp32: Sequence[str], chosen: Precision) -> tuple[str, ...]:
    if isinstance(keep_fp32, str):
        raise UserError(f"precision.keep_fp32: {keep_fp32!r} is one text; give a list of patterns, [{keep_fp32!r}]")
    if keep_fp32 and jnp.dtype(chosen.received).itemsize >= 4:
        raise UserError(
            f"precision.keep_fp32: {', '.join(keep_fp32)}: layers receive all parameters in "
            f"{jnp.dtype(chosen.received)} already; leave it out, or set compute_dtype"
        )
    return tuple(keep_fp32)


def enable_x64(policy: str) -> None:
    """Turn on 64-bit types when the policy needs them. Call before the first array is made."""
    if policy == "fp64":
        jax.config.update("jax_enable_x64", True)


def has_float8(device: Any) -> bool:
    """Whether the device's matrix units multiply float8_e4m3fn: NVIDIA from compute capability 8.9 on, AMD gfx95 and
    gfx12. (gfx94 has other float8 types, float8_e4m3fnuz and float8_e5m2fnuz.)"""
    capability = str(getattr(device, "compute_capability", ""))
    number = re.match(r"(\d+)\.(\d+)", capability)
    nvidia = number is not None and (int(number[1]), int(number[2])) >= (8, 9)
    return device.platform == "gpu" and (nvidia or capability.startswith(("gfx95", "gfx12")))


def check_float8(precision: Precision, devices: Iterable[Any]) -> None:
    """Raise `UserError` where the policy multiplies in float8 and a device cannot."""
    lacking = next((device for device in devices if not has_float8(device)), None) if precision.fp8 else None
    if lacking is not None:
        capability = getattr(lacking, "compute_capability", None)
        name = "this is " + (f"{lacking.device_kind}, {capability}" if capability else f"a {lacking.platform.upper()}")
        others = ", ".join(name for name, each in POLICIES.items() if not each.fp8)
        raise UserError(
            f"precision.policy: 'fp8' needs GPUs that multiply float8 (NVIDIA from compute capability 8.9"
            f" on: Ada, Hopper, Blackwell; AMD gfx95, gfx12), {name}; allowed here: {others}"
        )


def accumulation_dtype(dtype: Any) -> Any:
    """At least fp32: the dtype for sums of values of `dtype` (statistics, softmax, losses)."""
    return jnp.dtype(dtype) if jnp.dtype(dtype).itemsize >= 4 else jnp.dtype(jnp.float32)
