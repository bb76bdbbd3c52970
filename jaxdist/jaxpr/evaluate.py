"""Run a jaxpr equation by equation, to change it or to run some of it."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Literal, jaxprs_in_params

CALLS = ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2")
Bind = Callable[[Any, Sequence[Any]], list[Any]]


def where_written(equation: Any) -> AbstractContextManager[None]:
    """What is traced inside has the names and the source line of the equation."""
    names = source_info_util.current_name_stack() + equation.source_info.name_stack
    return source_info_util.user_context(equation.source_info.traceback, name_stack=names)


def bind(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation, under its own name. Operands may vary over more mesh axes than when it was traced."""
    with where_written(equation):
        return apply(equation, operands)


def apply(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """`bind` under the names that hold here."""
    if equation.primitive.name in ("pvary", "pcast") and equation.params.get("to", "varying") == "varying":
        return [_vary(operands[0], equation.params["axes"])]
    if not list(jaxprs_in_params(equation.params)):
        grown = {axis for operand in operands for axis in _axes(operand)}
        operands = [_vary(operand, grown) for operand in operands]
    with equation.ctx.manager:  # settings that held where it was traced, such as the width of numbers
        params = equation.primitive.get_bind_params(equation.params)  # with the rules of a custom_vjp as functions
        found = equation.primitive.bind(*operands, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def _axes(x: Any) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _vary(x: Any, axes: Iterable[str]) -> Any:
    missing = tuple(axis for axis in axes if axis not in _axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def read(known: dict[Any, Any], atom: Any) -> Any:
    """The value of a variable or literal."""
    return atom.val if isinstance(atom, Literal) else known[atom]


def evaluate(
    jaxpr: Any, constants: Sequence[Any], values: Sequence[Any], bind: Bind = bind, *, calls: Collection[str] = CALLS
) -> list[Any]:
    """The results of a jaxpr. What it calls is evaluated in place, so that traced again it has no calls; loops and
    conditions are equations like others, and so are calls by other names than `calls`."""
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *values), strict=True))
    for equation in jaxpr.eqns:
        operands, inner = [read(known, atom) for atom in equation.invars], list(jaxprs_in_params(equation.params))
        if equation.primitive.name in calls and len(inner) == 1:
            called, consts = getattr(inner[0], "jaxpr", inner[0]), getattr(inner[0], "consts", ())
            with where_written(equation), equation.ctx.manager:
                results = evaluate(called, consts, operands, bind, calls=calls)
        else:
            results = bind(equation, operands)
        known.update(zip(equation.outvars, results, strict=True))
    return [read(known, atom) for atom in jaxpr.outvars]


def inlined(function: Callable[..., Any], *arguments: Any) -> Any:
    """The closed jaxpr of function(*arguments) without calls in it. Arguments may be ShapeDtypeStructs."""
    traced = jax.make_jaxpr(function)(*arguments)
    flat = lambda *values: evaluate(traced.jaxpr, traced.consts, values)  # noqa: E731
    return jax.make_jaxpr(flat)(*jax.tree.leaves(arguments))


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The atoms that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def needed(equations: list[Any], outputs: list[Any], given: set[Any]) -> tuple[list[Any], set[Any]]:
    """(equations that the outputs need where `given` is there, in order; all variables read)."""
    reads, chosen = set(variables(outputs)), []
    for equation in reversed(equations):
        if any(variable in reads and variable not in given for variable in equation.outvars):
            chosen.append(equation)
            reads.update(variables(equation.invars))
    return chosen[::-1], reads


def trimmed(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), without equations that its results do not need: a compiler would drop them as well, but who
    reads the program would count them."""
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    chosen, _ = needed(traced.jaxpr.eqns, traced.jaxpr.outvars, set())
    results = evaluate(traced.jaxpr.replace(eqns=chosen), traced.consts, jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)
