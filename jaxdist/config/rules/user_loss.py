"""What the loss of a user, or of a module, cannot have, as it is one unit without blocks. Imports no jax."""

from __future__ import annotations

from jaxdist.config.rules.remat import REMAT, Remat
from jaxdist.errors import UserError

LOSS_AXES = ("pipe", "context", "expert", "tensor")  # of the mesh: a loss is split over data and fsdp only


def check_one_unit(*, prefetch: int, remat: Remat, fp8: bool, batch_split: int = 1) -> None:
    """Raise `UserError` for options of a step that need a model with blocks, or with layers of jaxdist."""
    if batch_split > 1:
        raise UserError(
            f"batch_split={batch_split}: a user's loss_fn is one unit without blocks; leave batch_split out, or build"
            " the model from jaxdist.nn layers"
        )
    if prefetch:
        raise UserError(
            "prefetch=1: a user's loss_fn is one unit, gathered at once; leave prefetch out, or build the "
            "model from jaxdist.nn layers"
        )
    if remat in ("sqrt", "offload"):
        raise UserError(
            f"{REMAT}: {remat!r} is for blocks, and a user's loss_fn is one unit; allowed: none, full, "
            "dots, a list of names; or build the model from jaxdist.nn layers"
        )
    if fp8:
        raise UserError(
            "precision: fp8 is for models of jaxdist.nn layers; allowed with a user's loss_fn: bf16, in"
            " which it may call jaxdist.nn.product(x, kernel, fp8=True) itself"
        )
