"""`devices.xla`: what a flag of the compiler looks like. Imports no jax."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxdist.config.rules.fields import show
from jaxdist.errors import UserError

FLAGS_KEY = "devices.xla.flags"
TRITON = "xla_gpu_enable_triton_gemm"  # whether products may be by kernels of Triton: docs/compiler.md


def flag_name(flag: str) -> str:
    """ "--xla_name" of "--xla_name=value"."""
    return flag.partition("=")[0]


def names_given(flags: str) -> set[str]:
    """The names of flags in a value of XLA_FLAGS."""
    return {flag_name(flag) for flag in flags.split()}


def check_flags(flags: Sequence[str]) -> None:
    """Raise `UserError` for what cannot be a flag of XLA, and for one that is given twice. Whether the compiler that is
    installed knows it, `runtime.compiler` finds out."""
    for flag in flags:
        if not re.fullmatch(r"--xla_[a-z0-9_]+(=[^\s\"']*)?", flag):
            raise UserError(f"{FLAGS_KEY}: {show(flag)} is no flag of XLA; allowed: --xla_name=value, without spaces")
    names = [flag_name(flag) for flag in flags]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{FLAGS_KEY}: {twice} is given {names.count(twice)} times; allowed: once")
