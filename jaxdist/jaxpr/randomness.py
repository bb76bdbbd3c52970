"""Random numbers of a program that are the same whenever it runs."""

import operator
from collections.abc import Sequence
from typing import Any

from jaxdist.errors import UserError
from jaxdist.jaxpr.dependence import copies, depends
from jaxdist.jaxpr.evaluate import without_dead_code
from jaxdist.jaxpr.source import line_of_user
from jaxdist.jaxpr.walk import primitives

# Their first operand is the key. Others make keys of keys, and what nothing reads is no matter.
DRAWS = primitives("random_bits random_gamma rng_bit_generator")


def moving(jaxpr: Any, fresh: Sequence[bool], carried: int) -> list[bool]:
    """Whether each argument of a program is another one at every step.

    fresh: whether each argument is new at every step, as a batch is.
    carried: so many of the last results are, at the next step, the last arguments. Such an argument moves if it is not
        returned as it was, and its new value is computed from it, from another, or from what is fresh.
    """
    if not carried:
        return list(fresh)
    first = len(fresh) - carried
    kept = copies(jaxpr, range(len(fresh)))[-carried:]
    moves = [*fresh[:first], *(name != first + i for i, name in enumerate(kept))]
    while True:  # what is computed only from what stays, stays
        computed = depends(jaxpr, moves)[-carried:]
        left = [*fresh[:first], *map(operator.and_, moves[first:], computed)]
        if left == moves:
            return moves
        moves = left


def drawn_with_stored_keys(jaxpr: Any, moves: Sequence[bool]) -> list[str]:
    """The lines where a program draws random numbers with a key that is computed from nothing that moves.

    moves: whether each argument is another one at every step. Raises `UserError` for draws that take no key.
    """
    frozen = []

    def visit(inside: tuple[Any, ...], equation: Any, operands: list[bool]) -> None:
        name = equation.primitive.name
        if name == "rng_uniform":
            raise UserError(
                f"loss_fn: draws random numbers with lax.rng_uniform ({line_of_user(equation)}), which takes no key;"
                " use jax.random.uniform(keys[0], ...)"
            )
        if any(operands) if name == "threefry2x32" else operands[0] if name in DRAWS else True:
            return
        # jax traces its own functions once, such as "_bernoulli": what is inside has the line of the first call.
        calls = (each for each in inside if str(each.params.get("name")).startswith("_"))
        frozen.append(line_of_user(next(calls, equation)))

    depends(without_dead_code(jaxpr), moves, visit)
    return frozen


def refuse_stored_keys(jaxpr: Any, moves: Sequence[bool]) -> None:
    """Raise `UserError` if a program draws random numbers with a stored key (`drawn_with_stored_keys`)."""
    if frozen := drawn_with_stored_keys(jaxpr, moves):
        raise UserError(
            f"loss_fn: draws random numbers with a stored key, the same at every step ({frozen[0]}); use the keys that "
            "loss_fn is given: for stored Rngs jaxdist.nnx_loss(model, fn), or nnx.reseed(model, default=keys[0], ...);"
            " or jax.random.bernoulli(keys[0], ...); draw outside of loss_fn what shall stay the same"
        )
