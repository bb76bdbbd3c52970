"""Random numbers of a program that are the same whenever it runs."""

from collections.abc import Callable
from typing import Any

import jax

from jaxdist.errors import UserError
from jaxdist.jaxpr.dependence import depends
from jaxdist.jaxpr.evaluate import without_dead_code
from jaxdist.jaxpr.source import source_of
from jaxdist.jaxpr.walk import primitives

# Their first operand is the key. Others make keys of keys, and what nothing reads is no matter.
DRAWS = primitives("random_bits random_gamma rng_bit_generator")


def refuse_stored_keys(loss: Callable[[Any], Any], batch: Any) -> None:
    """Raise `UserError` if loss(batch) draws random numbers with a key that is computed from nothing in the batch.

    batch: with the keys of this step. Keys that it holds besides are the data's, and as good.
    """
    frozen = []

    def visit(inside: tuple[Any, ...], equation: Any, operands: list[bool]) -> None:
        name = equation.primitive.name
        if any(operands) if name == "threefry2x32" else operands[0] if name in DRAWS else True:
            return
        # jax traces its own functions once, such as "_bernoulli": what is inside has the line of the first call.
        calls = (each for each in inside if str(each.params.get("name")).startswith("_"))
        frozen.append(source_of(next(calls, equation)))

    program = without_dead_code(jax.make_jaxpr(loss)(batch))
    depends(program, [True] * len(jax.tree.leaves(batch)), visit)
    if frozen:
        raise UserError(
            f"loss_fn: draws random numbers with a stored key, the same at every step ({frozen[0]}); use the keys that "
            "loss_fn is given: for stored Rngs jaxdist.nnx_loss(model, fn), or nnx.reseed(model, default=keys[0], ...);"
            " or jax.random.bernoulli(keys[0], ...); draw outside of loss_fn what shall stay the same"
        )
