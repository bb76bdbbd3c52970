"""When a device has no memory left: what the step needs, and what would make it fit, in place of a traceback."""

import sys
from pathlib import Path

import jax

from jaxdist.config.load import to_yaml
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.plan.compiled.memory import check_windows
from jaxdist.plan.explain import explain
from jaxdist.plan.remedies import remedies
from jaxdist.plan.report.text import memory_text, remedies_text


def is_out_of_memory(error: BaseException) -> bool:
    """Whether XLA could not allocate, on a device or in its pool of host memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def advise(config: Config, folder: Path, reason: str, *, compiling: bool) -> None:
    """Say on standard error what the step of this configuration holds, and the remedies with what each saves.

    compiling: compile them here and now, for the devices of this process; if not, or if the compiler too runs out of
    memory, say the command that does it for simulated devices. Call it with nothing on the devices any more.
    """
    said = f"out of memory: {reason.splitlines()[0]}"
    try:
        check_windows(config)
    except UserError as error:  # shapes are in the data: nothing more can be said
        say(said, f"what the step holds cannot be said: {error}")
        return
    say(said, "", "\n".join(memory_text(explain(config))), "")
    file = folder / "config.yaml"
    if not file.exists():  # the run had not begun
        file.write_text(to_yaml(config), encoding="utf-8")
    command = f"python scripts/explain.py --config {file} --remedies"
    try:
        table = remedies(config, progress=say) if compiling else None
    except jax.errors.JaxRuntimeError as error:
        say(f"the remedies cannot be compiled here: {str(error).splitlines()[0]}")
        table = None
    say(remedies_text(table) if table is not None else f"what would save memory, and how much: {command}")


def say(*lines: str) -> None:
    """Print to standard error at once."""
    print(*lines, sep="\n", file=sys.stderr, flush=True)
