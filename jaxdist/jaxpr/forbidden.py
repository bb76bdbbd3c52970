"""What the program of a user's loss may not do, beside what depends on the types of its results.

A loss runs on the rows of one device, and a `batch_mean` is the only thing in it that other devices take part in.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.extend.core import primitives as of_jax
from jax.interpreters.partial_eval import dce_jaxpr
from jax.ref import AbstractRef

from jaxdist.errors import UserError
from jaxdist.jaxpr.axes import named_axes
from jaxdist.jaxpr.evaluate import evaluate, needed
from jaxdist.jaxpr.source import line_of_user
from jaxdist.jaxpr.walk import Site, every_equation

SHARED_SCOPE = "jaxdist.batch_mean"  # the named scope of the operations of a `batch_mean` over all devices
LOCAL_SCOPE = "jaxdist.device_mean"  # that of one with sync=False
_HANGS = "which devices may run differently, and wait for each other for ever; call it outside"
_RULE = "whose derivative is a rule that adds up nothing over devices; call it outside, and give it the mean"
# Why equations may hold no `batch_mean` over all devices, by the names of their primitives.
NO_MEAN_IN = {
    "cond": f"{_HANGS}, and choose by jnp.where",
    "while": f"{_HANGS}, or run a fixed number of rounds, lax.fori_loop(0, 3, ...)",
    "custom_linear_solve": _RULE,
    "linear_call": _RULE,
}
_OF_JAX = {each for module in (of_jax, jax.lax) for each in vars(module).values() if isinstance(each, Primitive)}


def refuse_collectives(jaxpr: Any) -> None:
    """Raise `UserError` when the jaxpr names a mesh axis at any depth, or has a `batch_mean` where none may be."""
    for site in every_equation(jaxpr):
        if axes := named_axes(site.equation):
            name = site.equation.primitive.name
            raise UserError(
                f"loss_fn: contains {name} over {', '.join(axes)}; a loss may use no collective and no axis_index: "
                "return this shard's (sum, weight), jaxdist adds them up; for statistics use jaxdist.batch_mean"
            )
        inside = [each.primitive.name for each in site.inside if each.primitive.name in NO_MEAN_IN]
        if inside and is_shared(site):
            raise UserError(f"loss_fn: batch_mean in a {inside[-1]}, {NO_MEAN_IN[inside[-1]]}")


def refuse_in_forward(jaxpr: Any) -> None:
    """Raise `UserError` when the jaxpr of a loss, before it is differentiated, uses refs, or has the gradient of a
    `batch_mean`."""
    for site in every_equation(jaxpr):
        atoms = (*site.equation.invars, *site.equation.outvars)
        kernel = any(each.primitive.name == "pallas_call" for each in site.inside)
        if any(isinstance(atom.aval, AbstractRef) for atom in atoms) and not kernel:
            raise UserError(
                f"loss_fn: uses a jax.Ref ({line_of_user(site.equation)}), through which devices come to differ"
                " unnoticed; return what it would hold, in model_state or metrics"
            )
        if is_shared(site) and "transpose(" in site.names:
            raise UserError(
                f"loss_fn: takes the gradient of something with a batch_mean ({line_of_user(site.equation)}), which"
                " would depend on the number of devices; take gradients of single rows, and their mean:"
                " jaxdist.batch_mean(jax.vmap(jax.grad(f), (None, 0))(params, x))"
            )


def has_rules(jaxpr: Any) -> bool:
    """Whether the derivative of a program may hold what the program itself does not: it has a rule of somebody's own,
    or a primitive that jax does not list."""
    found = {site.equation.primitive for site in every_equation(jaxpr)}
    return not found <= _OF_JAX or any(each.name.startswith(("custom_", "linear_call")) for each in found)


def is_shared(site: Site) -> bool:
    """Whether an equation is part of a `batch_mean` over all devices."""
    return SHARED_SCOPE in site.names


def refuse_means_with_rows(jaxpr: Any, other: Any) -> None:
    """Raise `UserError` if the result of a `batch_mean` still has the rows in it, or there is one for each row.

    jaxpr, other: of the same loss, with other numbers of rows.
    """
    # The division by the count is the last operation of a mean, and the only one.
    found, others = (
        [site for site in every_equation(each) if is_shared(site) and site.equation.primitive.name == "div"]
        for each in (jaxpr, other)
    )
    if len(found) != len(others):  # code that branches on the number of rows: nothing can be said
        return
    for one, two in zip(found, others, strict=True):
        shapes = [site.equation.outvars[0].aval.shape for site in (one, two)]
        if shapes[0] != shapes[1] or one.times != two.times:
            raise UserError(
                f"batch_mean: called for each row, or with the rows in another dim than 0, so that its result, of shape"
                f" {shapes[0]}, mixes rows ({line_of_user(one.equation)}); call it outside of a jax.vmap or loop over"
                " rows, with the rows as dim 0: batch_mean(jnp.moveaxis(x, 1, 0))"
            )


def counting_rows(jaxpr: Any, other: Any, results: int) -> Sequence[bool]:
    """Whether each of the last results, which are computed from no row, has another value with other rows.

    jaxpr, other: of the same loss, with other numbers of rows.
    """

    def alive(wanted: Sequence[bool]) -> list[Any]:
        """Both programs of some results alone, without what is printed on the way."""
        programs = [each.jaxpr for each in (jaxpr, other)]
        used = [*[False] * (len(programs[0].outvars) - results), *wanted]
        read = [[v for v, own in zip(each.outvars, used, strict=True) if own] for each in programs]
        chosen = [needed(each.eqns, atoms, set())[0] for each, atoms in zip(programs, read, strict=True)]
        return [dce_jaxpr(each.replace(eqns=eqns), used)[0] for each, eqns in zip(programs, chosen, strict=True)]

    def alike(wanted: Sequence[bool]) -> bool:
        one, two = (re.sub("0x[0-9a-f]+", "", str(each)) for each in alive(wanted))  # without addresses of rules
        return one == two

    def counts(wanted: Sequence[bool]) -> bool:
        """Whether the values differ: another program may have the same one, as the mean of equal rows has."""
        programs = alive(wanted)
        sites = [site.equation for each in programs for site in every_equation(each)]
        # What may not run at a wrong time, or not end with such numbers, is not run.
        if alike(wanted) or any(each.effects or each.primitive.name in ("while", "pure_callback") for each in sites):
            return False
        values = map(_value, programs, (jaxpr.consts, other.consts))
        return not _close(*values)

    if alike([True] * results):
        return [False] * results
    return [counts(wanted) for wanted in np.eye(results, dtype=bool).tolist()]


def _value(jaxpr: Any, constants: Sequence[Any]) -> Any:
    """The only result of a jaxpr, computed from arguments of about 1."""
    with jax.ensure_compile_time_eval():
        arguments = [
            np.linspace(0.5, 1.5, v.aval.size).reshape(v.aval.shape).astype(v.aval.dtype) for v in jaxpr.invars
        ]
        return np.asarray(evaluate(jaxpr, constants, arguments)[0], np.float64)


def _close(one: Any, two: Any) -> bool:
    return np.allclose(one, two, rtol=1e-4, equal_nan=True)
