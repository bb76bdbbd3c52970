"""Which devices multiply in float8. Imported for the policies that do."""

import re
from collections.abc import Iterable
from typing import Any

from jaxdist.errors import UserError
from jaxdist.precision.policy import POLICIES, Precision


def has_float8(device: Any) -> bool:
    """Whether the device's matrix units multiply float8_e4m3fn: NVIDIA from compute capability 8.9 on, AMD gfx95 and
    gfx12. (gfx94 has other float8 types, float8_e4m3fnuz and float8_e5m2fnuz.)"""
    capability = str(getattr(device, "compute_capability", ""))
    number = re.match(r"(\d+)\.(\d+)", capability)
    nvidia = number is not None and (int(number[1]), int(number[2])) >= (8, 9)
    return device.platform == "gpu" and (nvidia or capability.startswith(("gfx95", "gfx12")))


def check_float8(precision: Precision, devices: Iterable[Any]) -> None:
    """Raise `UserError` if the policy multiplies in float8, and one of the devices cannot."""
    lacking = next((device for device in devices if not has_float8(device)), None) if precision.fp8 else None
    if lacking is not None:
        capability = getattr(lacking, "compute_capability", None)
        name = "this is " + (f"{lacking.device_kind}, {capability}" if capability else f"a {lacking.platform.upper()}")
        others = ", ".join(name for name, each in POLICIES.items() if not each.fp8)
        raise UserError(
            f"precision.policy: 'fp8' needs GPUs that multiply float8 (NVIDIA from compute capability 8.9"
            f" on: Ada, Hopper, Blackwell; AMD gfx95, gfx12), {name}; allowed here: {others}"
        )
