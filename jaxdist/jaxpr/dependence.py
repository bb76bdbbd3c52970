"""Which results of a program depend on which of its arguments."""

from collections.abc import Sequence
from typing import Any

from jaxdist.jaxpr.evaluate import CALLS
from jaxdist.jaxpr.walk import inner_jaxprs, interpret, opened, scan_of


def depends(jaxpr: Any, marked: Sequence[bool]) -> list[bool]:
    """Whether each result of a jaxpr is computed from a marked argument.

    Calls, scans and branches are followed result by result. Any result of another equation with a jaxpr of its own,
    such as `while`, depends on all of its operands.
    """
    plain = opened(jaxpr)
    return interpret(plain, [False] * len(plain.constvars), list(marked), _rule, lambda _: False)


def _rule(equation: Any, operands: list[bool]) -> list[bool]:
    name, inner = equation.primitive.name, inner_jaxprs(equation)
    if not any(operands):
        return [False] * len(equation.outvars)
    if name in CALLS and len(inner) == 1:
        return depends(inner[0], operands)
    if name == "cond" and not operands[0]:  # the predicate
        branches = [depends(branch, operands[1:]) for branch in equation.params["branches"]]
        return [any(found) for found in zip(*branches, strict=True)]
    if name != "scan":
        return [True] * len(equation.outvars)
    scan = scan_of(equation)
    constants, carry, rows = scan.split(operands)
    while True:  # until a round adds nothing: what one round writes into the carry, the next one reads
        found = depends(scan.body, constants + carry + rows)
        grown = [before or after for before, after in zip(carry, found, strict=False)]
        if grown == carry:
            return found
        carry = grown
