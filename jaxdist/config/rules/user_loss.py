"""What the loss of a user, or of a module, cannot have, as it is one unit without blocks. Imports no jax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxdist.config.rules.fields import show
from jaxdist.config.rules.pipeline import refuse_stages
from jaxdist.config.rules.remat import REMAT, Remat
from jaxdist.errors import UserError

if TYPE_CHECKING:
    from jaxdist.config.schema import Config

LOSS_AXES = ("pipe", "context", "expert", "tensor")  # of the mesh: a loss is split over data and fsdp only


def check_one_unit(*, prefetch: int, remat: Remat, fp8: bool) -> None:
    """Raise `UserError` for options of a step that need a model with blocks, or with layers of jaxdist."""
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


def check_loss(config: Config, *, several: bool) -> None:
    """Raise `UserError` for keys that have no meaning where `model.name` is a loss.

    several: whether the schedule is one of several stages
    """
    parallel, unset = config.parallel, type(config.parallel)()
    if several:
        refuse_stages(f"model.name: {config.model.name!r}", parallel.schedule, allowed="parallel.schedule=accumulate")
    for key in ("prefetch", "stages", "sequence_parallel", "collective_matmul"):
        if given := getattr(parallel, key):
            raise UserError(
                f"parallel.{key}: {show(given)} is for models with blocks, and model.name {config.model.name!r} is a"
                f" loss, which is one unit; allowed: {show(getattr(unset, key))}"
            )
    check_one_unit(prefetch=0, remat=config.memory.remat, fp8=config.precision.resolved()[0].fp8)
