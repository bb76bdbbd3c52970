"""`mesh`: axes that nothing uses, and the number of processes that its devices are of. Imports no jax."""

from collections.abc import Mapping

from jaxdist.config.rules.fields import show
from jaxdist.errors import UserError


def check_axis(axis: str, size: int, model: str = "the model") -> None:
    """Raise `UserError` for a mesh axis that no layer uses, unless its size is 1. -1: the rest of the devices."""
    if size != 1:
        raise UserError(
            f"mesh.{axis}: {size} is given, but no layer of {model} uses this axis yet; allowed: 1; use data, fsdp or"
            " tensor instead"
        )


def read_count(environ: Mapping[str, str], name: str, *, at_least: int) -> int:
    """The rank or number of processes in a variable of the environment. Raises `UserError` for what is none."""
    text = environ.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= at_least):
        raise UserError(
            f"{name}: {show(text)} in the environment is no rank or process count; allowed: an integer >= {at_least}"
        )
    return int(text)
