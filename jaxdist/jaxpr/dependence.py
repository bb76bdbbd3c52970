"""Which results of a program depend on which of its arguments, and which are such an argument unchanged."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxdist.jaxpr.evaluate import CALLS
from jaxdist.jaxpr.walk import inner_jaxprs, interpret, opened, primitives, scan_of

Visit = Callable[[tuple[Any, ...], Any, list[bool]], None]


def depends(jaxpr: Any, marked: Sequence[bool], visit: Visit | None = None, inside: tuple[Any, ...] = ()) -> list[bool]:
    """Whether each result of a jaxpr is computed from a marked argument.

    Calls, loops and branches are followed result by result. Any result of another equation with a jaxpr of its own
    depends on all of its operands.

    visit: (the equations around, equation, whether each operand depends on a marked argument) -> None, called for every
        equation at any depth
    inside: the equations around this jaxpr, the outermost first
    """
    plain = opened(jaxpr)

    def rule(equation: Any, operands: list[bool]) -> list[bool]:
        if visit is not None:
            visit(inside, equation, operands)
        inner = inner_jaxprs(equation)
        if (visit is None and not any(operands)) or not inner:
            return [any(operands)] * len(equation.outvars)
        return _through((*inside, equation), inner, operands, visit)

    return interpret(plain, [False] * len(plain.constvars), list(marked), rule, lambda _: False)


def _through(around: tuple[Any, ...], inner: list[Any], operands: list[bool], visit: Visit | None) -> list[bool]:
    """The rule of an equation with jaxprs of its own, the last of `around`."""
    equation, run = around[-1], functools.partial(depends, visit=visit, inside=around)
    name, params, everything = equation.primitive.name, equation.params, [any(operands)] * len(equation.outvars)
    if name in CALLS and len(inner) == 1:
        return run(inner[0], operands)
    if name == "cond":
        branches = [run(branch, operands[1:]) for branch in params["branches"]]
        return everything if operands[0] else [any(found) for found in zip(*branches, strict=True)]
    if name == "scan":
        scan = scan_of(equation)
        constants, carry, rows = scan.split(operands)
        return _loop(run, scan.body, constants, carry, rows)
    if name == "while":
        first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        rounds = _loop(run, params["body_jaxpr"], operands[first:last], operands[last:], [])
        found = [before or after for before, after in zip(operands[last:], rounds, strict=True)]  # it may run no round
        [decides] = run(params["cond_jaxpr"], operands[:first] + found)
        return everything if decides else found
    for each in inner if visit is not None else []:
        run(each, [any(operands)] * len(opened(each).invars))
    return everything


def _loop(
    run: Callable[..., list[bool]], body: Any, constants: list[bool], carry: list[bool], rows: list[bool]
) -> list[bool]:
    """The results of a loop: once a round adds nothing, the body is visited."""
    while True:  # what one round writes into the carry, the next one reads
        found = depends(body, constants + carry + rows)
        grown = [before or after for before, after in zip(carry, found, strict=False)]
        if grown == carry:
            return run(body, constants + carry + rows)
        carry = grown


SAME = primitives("stop_gradient copy optimization_barrier layout_constraint")


def copies(jaxpr: Any, names: Sequence[Any]) -> list[Any]:
    """The name of the argument that each result of a jaxpr is, unchanged; None for results that are computed.

    Loops and branches need no rule: what they hand on as they got it, jax takes out of them.

    names: of the arguments; None for those that do not matter
    """
    plain = opened(jaxpr)

    def rule(equation: Any, operands: list[Any]) -> list[Any]:
        name, inner = equation.primitive.name, inner_jaxprs(equation)
        if name in SAME:
            return operands
        if name in CALLS and len(inner) == 1:
            return copies(inner[0], operands)
        return [None] * len(equation.outvars)

    return interpret(plain, [None] * len(plain.constvars), list(names), rule, lambda _: None)
