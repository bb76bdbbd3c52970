"""Evaluation of a jaxpr, equation by equation: to change some of its operations, or to run only some of them."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr

from jaxdist.jaxpr.axes import SILENT
from jaxdist.jaxpr.walk import equations, inner_jaxprs, interpret, opened
from jaxdist.specs import PyTree

CALLS = ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2")
Bind = Callable[[Any, Sequence[Any]], list[Any]]


def where_written(equation: Any) -> AbstractContextManager[None]:
    """A context in which new operations get the named scopes and the source line of the equation."""
    names = source_info_util.current_name_stack() + equation.source_info.name_stack
    return source_info_util.user_context(equation.source_info.traceback, name_stack=names)


def bind(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation, under its own name and source line.

    Operands may vary over more mesh axes than those it was traced with.
    """
    with where_written(equation):
        return apply(equation, operands)


def apply(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation, as `bind`, but under the names of the caller."""
    # The axes that this cast adds may be there already: `pcast` refuses these.
    if equation.primitive.name in ("pvary", "pcast") and equation.params.get("to", "varying") == "varying":
        return [_vary(operands[0], equation.params["axes"])]
    # A primitive wants the same axes of all its operands, unless it computes nothing.
    if not inner_jaxprs(equation) and equation.primitive.name != "optimization_barrier":
        grown = {axis for operand in operands for axis in _axes(operand)}
        operands = [_vary(operand, grown) for operand in operands]
    with equation.ctx.manager:  # the settings of the place where it was traced, such as the width of numbers
        params = equation.primitive.get_bind_params(equation.params)  # makes functions of the rules of a custom_vjp
        found = equation.primitive.bind(*operands, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def _axes(x: Any) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _vary(x: Any, axes: Iterable[str]) -> Any:
    missing = tuple(axis for axis in axes if axis not in _axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def atom_value(known: dict[Any, Any], atom: Any) -> Any:
    """The value of a variable, which is in `known`, or of a literal."""
    return atom.val if isinstance(atom, Literal) else known[atom]


def evaluate(
    jaxpr: Any, constants: Sequence[Any], values: Sequence[Any], bind: Bind = bind, *, calls: Collection[str] = CALLS
) -> list[Any]:
    """The results of a jaxpr, computed equation by equation.

    bind: (equation, operands) -> results
    calls: names of the primitives whose function is evaluated in place, so that a new trace has no call there; `bind`
        gets all others, loops and conditions too
    """

    def rule(equation: Any, operands: list[Any]) -> list[Any]:
        inner = inner_jaxprs(equation)
        if equation.primitive.name not in calls or len(inner) != 1:
            return bind(equation, operands)
        with where_written(equation), equation.ctx.manager:
            return evaluate(opened(inner[0]), getattr(inner[0], "consts", ()), operands, bind, calls=calls)

    return interpret(jaxpr, constants, values, rule, lambda literal: literal.val)


def inlined(function: Callable[..., Any], *arguments: Any) -> Any:
    """The closed jaxpr of function(*arguments) without calls in it. Arguments may be ShapeDtypeStructs."""
    traced = jax.make_jaxpr(function)(*arguments)
    flat = lambda *values: evaluate(traced.jaxpr, traced.consts, values)  # noqa: E731
    return jax.make_jaxpr(flat)(*jax.tree.leaves(arguments))


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The atoms that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def needed(equations: list[Any], outputs: list[Any], given: set[Any]) -> tuple[list[Any], set[Any]]:
    """(the equations that `outputs` depend on, in order; all variables that they read).

    given: variables that are there already: equations that make only these are left out
    """
    reads, chosen = set(variables(outputs)), []
    for equation in reversed(equations):
        if any(variable in reads and variable not in given for variable in equation.outvars):
            chosen.append(equation)
            reads.update(variables(equation.invars))
    return chosen[::-1], reads


def without_dead_code(closed: Any) -> Any:
    """The closed jaxpr without the equations, at any depth, whose results nothing reads.

    Differentiation leaves such: the backward pass of an embedding computes the embedding again, for nothing. A compiler
    drops them, so that a collective among them never runs.
    """
    alive, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return closed.replace(jaxpr=alive)


def trimmed(function: Callable[..., Any], *arguments: Any) -> Any:
    """The results of function(*arguments), `without_dead_code`."""
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    alive = without_dead_code(traced)
    results = evaluate(alive.jaxpr, alive.consts, jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def size_of_count(count: Callable[[PyTree], jax.Array], tree: PyTree) -> float:
    """The likely size of a count of things in a tree of arrays, such as the targets of a batch: finite and positive.

    That is the size of the largest leaf that the count is computed from, such as a mask. A count that reads no leaf is
    a constant: its own value, or the rows of the tree where that cannot be computed here.
    """
    traced, leaves = inlined(count, tree), jax.tree.leaves(tree)
    chosen, reads = needed(equations(traced), traced.jaxpr.outvars, set())
    read = [leaf.size for leaf, own in zip(leaves, traced.jaxpr.invars, strict=True) if own in reads]
    rows = float(max(1, leaves[0].shape[0]))
    if read:
        return float(max(read)) or rows
    constants = zip(traced.jaxpr.constvars, traced.consts, strict=True)
    if any(isinstance(value, jax.core.Tracer) for name, value in constants if name in reads):
        return rows

    def on_host(equation: Any, operands: Sequence[Any]) -> list[Any]:
        return list(operands) if equation.primitive.name in SILENT else apply(equation, operands)

    with jax.ensure_compile_time_eval():
        values = [None] * len(leaves)
        [value] = evaluate(traced.jaxpr.replace(eqns=chosen), traced.consts, values, on_host)
    return abs(float(value)) if math.isfinite(value) and value else rows
