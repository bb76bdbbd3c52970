"""`mesh`: axes that nothing uses. Imports no jax."""

from collections.abc import Container

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
