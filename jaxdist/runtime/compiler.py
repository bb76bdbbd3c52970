"""Settings of the compiler (`devices.xla`): the presets with the reason and source of each value, and how they reach
XLA.

XLA reads `XLA_FLAGS` once, when JAX starts its devices, and aborts the process on a flag that it does not know. So the
flags are tried first, in a process of their own that starts no devices (a third of a second). Jaxlib itself knows GPU
flags, without a GPU plugin, so this works on every machine. docs/compiler.md has the same table, and advice on others.
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import jax

from jaxdist.config.checks import prefetches
from jaxdist.config.rules.xla_flags import FLAGS_KEY, TRITON, flag_name, names_given
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.runtime.cache import folder_in_use

FLAG_PROBE = "import jaxlib.xla_client as xc; xc.CompileOptions().executable_build_options.debug_options"
FLAG_PROBE_S = 60.0


class Setting(NamedTuple):
    """A setting of the compiler."""

    name: str  # an option of jax, or a flag of XLA ("--xla_...")
    value: str
    reason: str  # why it is set
    source: str  # who says so


# The settings of `preset: fast`. Those of "gpu" are only for a step that does not prefetch: a step that prefetches
# arranges its own overlap, and hid less of its communication at O1 than at the default level. Async collectives,
# command buffers and cuBLASLt are on by default; so is the latency-hiding scheduler, from Hopper on or at O1. Nothing
# was measured to help on CPUs.
PRESETS: Mapping[str, tuple[Setting, ...]] = {
    "gpu": (
        # Source: XLA docs/effort_levels.md for what it does. Figures: docs/plan.md, jax 0.12.0.1.
        Setting(
            "jax_optimization_level",
            "O1",
            "collective pipelining and loop unrolling: 83.6 % of the communication hidden, none of it synchronous in"
            " the loops (355 M GPT, 8 H200)",
            "XLA docs/effort_levels.md; measured on compiled schedules, no GPU ran",
        ),
    ),
    "cpu": (),
}

# Set on GPUs with `parallel.grad_sync.deterministic`, whatever the preset: XLA then does not choose kernels by how fast
# they happened to be, and a scatter (an embedding's gradient) adds in a fixed order.
DETERMINISTIC = (
    Setting(
        "--xla_gpu_deterministic_ops",
        "true",
        "parallel.grad_sync.deterministic: the same bits from run to run",
        "option dump of XLA; no GPU ran",
    ),
)

# Set on GPUs with `precision: fp8`, whatever the preset, for the programs that evaluate and generate as for the step
# (`jaxdist.parallel.blocks.compiler_options`).
FLOAT8 = (
    Setting(
        f"--{TRITON}",
        "false",
        "precision: fp8: products by cuBLASLt alone. The choice between it and Triton's kernels had not ended after 130"
        " s (Llama of 0.9 B); without that choice compiling took 28 s",
        "one H200, jax 0.11.2: docs/measurements/one_h200.json",
    ),
)


def resolve(preset: Iterable[Setting], flags: Sequence[str], given: str) -> list[str]:
    """The flags to add to XLA_FLAGS, which has the value `given`. A flag of the environment wins over one of `flags`,
    and that over one of the preset."""
    wanted = {each.name: f"{each.name}={each.value}" for each in preset if each.name.startswith("--")}
    wanted |= {flag_name(flag): flag for flag in flags}
    known = names_given(given)
    return [flag for name, flag in wanted.items() if name not in known]


def why_refused(flags: Sequence[str]) -> str | None:
    """Why XLA would abort on these flags, or None."""
    environ = {**os.environ, "XLA_FLAGS": " ".join(flags)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", FLAG_PROBE],
            env=environ,
            capture_output=True,
            text=True,
            timeout=FLAG_PROBE_S,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError):
        return None  # not known: XLA itself will accept or refuse them
    if done.returncode == 0:
        return None
    found = re.search(r"Unknown flags? in XLA_FLAGS: *(.*)|(Couldn't interpret value .*)", done.stderr)
    if found is None:
        return f"a value is refused ({done.stderr.strip().splitlines()[-1:] or ['no message']})"
    return f"unknown: {found[1]}" if found[1] else found[2]


def check_known(flags: Sequence[str], given: str) -> None:
    """Raise `UserError` naming the flag on which XLA would abort. given: the value of XLA_FLAGS."""
    if why_refused([given, *flags]) is None or why_refused([]) is not None:  # or the trial itself fails
        return
    jaxlib = f"jaxlib {version('jaxlib')}"
    for flag in flags:
        if why_refused([flag]) is not None:
            raise UserError(
                f"{FLAGS_KEY}: {jaxlib} does not know {flag}, or not this value, and would"
                " abort; allowed: flags of this version (docs/compiler.md); remove it"
            )
    raise UserError(
        f"XLA_FLAGS: {given!r} in the environment: {jaxlib} would abort on it"
        f" ({why_refused([given])}); remove what it does not know"
    )


def set_flags(config: Config, backend: str, *, started: bool) -> None:
    """Add the flags of `devices.xla` to XLA_FLAGS. Must run before JAX starts its devices.

    Raises `UserError` for flags that XLA would abort on, and, once JAX has started, for flags that the configuration
    names or that deterministic sums need; what else would be set is left out then.

    Args:
        config: The configuration.
        backend: "gpu" or "cpu", as far as it is known by then.
        started: Whether JAX has its devices already, as in a notebook.
    """
    xla, given = config.devices.xla, os.environ.get("XLA_FLAGS", "")
    fixed = DETERMINISTIC if backend == "gpu" and config.parallel.grad_sync.deterministic else ()
    float8 = FLOAT8 if backend == "gpu" and config.precision.resolved()[0].fp8 else ()
    flags = resolve((*fixed, *float8, *(PRESETS[backend] if xla.preset == "fast" else ())), xla.flags, given)
    if started and flags and (missing := resolve(fixed, (), given)):
        raise UserError(
            f"parallel.grad_sync.deterministic: true needs {missing[0]} on GPUs, but JAX has started its"
            " devices, which read flags once; put it into XLA_FLAGS before JAX starts"
        )
    if started and (asked := resolve((), xla.flags, given)):
        raise UserError(
            f"{FLAGS_KEY}: {asked[0]}, but JAX has started its devices, which read flags once; allowed: [] here;"
            " or put them into XLA_FLAGS before JAX starts"
        )
    if flags and not started:
        if given.strip() and not given.lstrip().startswith("-"):
            raise UserError(
                f"XLA_FLAGS: {given!r} names a file, which XLA reads in place of flags; put {flags[0]}"
                " into it, or flags into the environment"
            )
        check_known(flags, given)
        os.environ["XLA_FLAGS"] = " ".join([given, *flags]).strip()


def set_options(config: Config, backend: str) -> None:
    """Set the preset's options of jax for this backend, where neither the environment nor a program has set them."""
    if config.devices.xla.preset != "fast" or prefetches(config, gpu=backend == "gpu"):
        return
    for each in PRESETS[backend]:
        untouched = each.name.upper() not in os.environ and str(jax.config.values[each.name]) == "UNKNOWN"
        if not each.name.startswith("--") and untouched:
            jax.config.update(each.name, each.value)


@contextlib.contextmanager
def compiling_for(config: Config, backend: str) -> Iterator[None]:
    """A context in which `set_options` is done, for a process that compiles several configurations. At its end options
    are what they were before; what a program has set before it stays within."""
    before = {each.name: jax.config.values[each.name] for each in PRESETS[backend] if not each.name.startswith("--")}
    try:
        set_options(config, backend)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def settings() -> dict[str, Any]:
    """The settings that the compiler runs with, for env.json."""
    return {
        "xla_flags": os.environ.get("XLA_FLAGS", "").split(),
        "optimization_level": str(jax.config.values["jax_optimization_level"]),
        "compilation_cache": folder_in_use(),
    }
