"""A user's own loss, under every data-parallel strategy.

Ordinary code, such as a `lax.scan` from `jnp.zeros`, does not type-check under `check_vma=True`. A user loss therefore
runs in a second region, which is not checked. It may contain no collective and may not ask on which device it runs:
all reductions are the strategy's, explicit and outside autodiff, and the check has nothing to find.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.errors import UserError
from jaxdist.jaxpr.axes import named_axes
from jaxdist.jaxpr.randomness import refuse_stored_keys
from jaxdist.jaxpr.walk import every_equation
from jaxdist.mesh import AnyMesh
from jaxdist.parallel.blocks.remat import rematerialise
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.schedule import Program, UserLoss
from jaxdist.parallel.strategy import Strategy, regathers
from jaxdist.precision.autocast import autocast
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import PyTree


def unchecked_region(
    function: Callable[..., Any], *, mesh: AnyMesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map` without the check, for programs made by `user_program` only."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def refuse_collectives(jaxpr: Any) -> None:
    """Raise `UserError` when the jaxpr, or one inside it, names a mesh axis."""
    for site in every_equation(jaxpr):
        if axes := named_axes(site.equation):
            name = site.equation.primitive.name
            raise UserError(
                f"loss_fn: contains {name} over {', '.join(axes)}; a loss may use no collective and no axis_index: "
                "return this shard's (sum, weight), jaxdist adds them up"
            )


def user_program(loss_fn: UserLoss, strategy: Strategy, specs: PyTree, mesh: AnyMesh, options: StepOptions) -> Program:
    """A `Program` around loss_fn(params, batch, keys) -> (sum, weight).

    The whole tree is one unit: under zero3 the state is sharded, but a step gathers all parameters at once.
    weight: the sum of losses is divided by the sum of weights, over the global batch. No gradient flows through it.
    params: in the dtype that the policy gives layers; the loss casts its inputs to it.
    """
    _check_options(options)
    idle = [axis for axis in ("pipe", "context", "expert", "tensor") if mesh.shape[axis] > 1]
    if idle:
        raise UserError(
            f"mesh.{idle[0]}={mesh.shape[idle[0]]}: a user's loss_fn is split over data and fsdp only; set {idle[0]} "
            "to 1, or build the model from jaxdist.nn layers"
        )
    loss_fn = autocast(loss_fn, options.precision.compute) if options.precision.per_op else loss_fn

    def run(params: PyTree, batch: PyTree, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        result: Any = loss_fn(params, batch, keys)
        if not isinstance(result, tuple) or len(result) != 2 or any(jnp.shape(part) for part in result):
            raise UserError("loss_fn: must return two scalars (sum of losses, weight); say losses.sum(), losses.size")
        total = jnp.asarray(result[0])
        wide = accumulation_dtype(total.dtype)
        return total.astype(wide), jax.lax.stop_gradient(jnp.asarray(result[1]).astype(wide))

    def loss(diff: PyTree, captured: PyTree, batch: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        params = strategy.gather(diff, captured, specs)
        # Its gradient is searched, which contains the loss: a custom_vjp may hide a collective in its backward pass.
        total_of = lambda params: run(params, batch["batch"], batch["keys"])[0]  # noqa: E731
        refuse_collectives(jax.make_jaxpr(jax.grad(total_of))(params))
        refuse_stored_keys(lambda batch: run(params, batch["batch"], batch["keys"]), batch)
        return run(params, batch["batch"], batch["keys"])

    return Program(rematerialise(loss, options.remat, gathers=regathers(strategy, specs), in_scan=False))


def _check_options(options: StepOptions) -> None:
    """Raise `UserError` for options of a step that need a model with blocks."""
    if options.prefetch:
        raise UserError(
            "prefetch=1: a user's loss_fn is one unit, gathered at once; leave prefetch out, or build the "
            "model from jaxdist.nn layers"
        )
    if options.remat in ("sqrt", "offload"):
        raise UserError(
            f"memory.remat: {options.remat!r} is for blocks, and a user's loss_fn is one unit; allowed: none, full, "
            "dots, a list of names; or build the model from jaxdist.nn layers"
        )
    if options.precision.fp8:
        raise UserError(
            "precision: fp8 is for models of jaxdist.nn layers; allowed with a user's loss_fn: bf16, in"
            " which it may call jaxdist.nn.product(x, kernel, fp8=True) itself"
        )
