"""`mesh`: axes that nothing uses, and the number of processes that its devices are of. Imports no jax."""

from collections.abc import Container, Mapping

from jaxdist.config.rules.fields import show
from jaxdist.errors import UserError


def check_axis(axis: str, size: int, model: str = "the model", *, unused: Container[str] = ()) -> None:
    """Raise `UserError` for a mesh axis that no layer uses, unless its size is 1. -1: the rest of the devices.

    unused: all axes that no layer of the model uses; none of them is proposed.
    """
    use = "data or fsdp" if "tensor" in unused else "data, fsdp or tensor"
    why, more = f"no layer of {model} uses this axis yet", ""
    if axis == "tensor":  # jaxdist has layers for it, and the model has none of them
        why = f"no layer of {model} is split over this axis, so that all its devices would compute the same"
        more = ", or build layers of jaxdist.nn.ColumnParallelLinear and RowParallelLinear"
    if axis == "expert":
        why = f"no layer of {model} is a mixture of experts"
        more = ", or model.name=gpt and model.moe.experts=8"
    if axis == "context":
        why = f"no attention of {model} is split over this axis"
        more = ", or model.name=gpt; from Python, gpt(..., context='all_to_all')"
    if size != 1:
        raise UserError(f"mesh.{axis}: {size} is given, but {why}; allowed: 1; use {use} instead{more}")


def read_count(environ: Mapping[str, str], name: str, *, at_least: int) -> int:
    """The rank or number of processes in a variable of the environment. Raises `UserError` for what is none."""
    text = environ.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= at_least):
        raise UserError(
            f"{name}: {show(text)} in the environment is no rank or process count; allowed: an integer >= {at_least}"
        )
    return int(text)
