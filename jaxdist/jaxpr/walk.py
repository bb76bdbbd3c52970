"""Walks over jaxprs: no other module of jaxdist looks at the equations of a jaxpr by itself.

Some equations hold jaxprs of their own: the body of a `scan` or `while`, the branches of a `cond`, the function that a
`jit`, `checkpoint`, `shard_map`, `custom_jvp_call` or `custom_vjp_call` calls. There are two ways to read them all:

- `every_equation` lists the equations at any depth, each with its place in the program;
- `interpret` pushes values of any kind through one jaxpr, by a rule for its equations. The rule decides whether to go
  into an equation's own jaxprs: `scan_of` says how the operands of a scan meet its body.

All functions take a closed jaxpr (as from `jax.make_jaxpr`) or an open one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from jax.extend.core import Literal, jaxprs_in_params

V = TypeVar("V")


def primitives(names: str) -> frozenset[str]:
    """A set of primitives, from a text of their names."""
    return frozenset(names.split())


def opened(jaxpr: Any) -> Any:
    """The jaxpr without its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr."""
    return hasattr(value, "eqns")


def equations(jaxpr: Any) -> list[Any]:
    """The equations of a jaxpr, in program order, without those inside them."""
    found: list[Any] = opened(jaxpr).eqns
    return found


def inner_jaxprs(equation: Any) -> list[Any]:
    """The jaxprs that an equation holds: of a scan its body, of a cond its branches, of a call the function."""
    return list(jaxprs_in_params(equation.params))


def nbytes_of(aval: Any) -> int:
    """Bytes of an array by its type."""
    return math.prod(aval.shape) * int(getattr(aval.dtype, "itemsize", 0))


def operand_bytes(equation: Any) -> int:
    """Bytes of the operands of an equation."""
    return sum(nbytes_of(atom.aval) for atom in equation.invars)


class Site(NamedTuple):
    """An equation and its place in the program.

    names: all named scopes around it, as "/jvp()/while/body/blocks/attention"
    times: how often it runs: the product of the lengths of the scans around it
    inside: the equations around it, the outermost first
    """

    equation: Any
    names: str
    times: int
    inside: tuple[Any, ...]


def names_at(names: str, equation: Any) -> str:
    """The named scopes of an equation in a jaxpr under the scopes `names`."""
    return f"{names}/{equation.source_info.name_stack}"


def length_of(equation: Any) -> int:
    """How often the jaxprs inside an equation run: a scan's length, else once; a `while` does not say its rounds."""
    length: int = equation.params["length"] if equation.primitive.name == "scan" else 1
    return length


def every_equation(jaxpr: Any, *, names: str = "", times: int = 1, inside: tuple[Any, ...] = ()) -> Iterator[Site]:
    """All equations at any depth, in program order, an equation before those inside it.

    All branches of a `cond` are listed.
    """
    for equation in equations(jaxpr):
        site = Site(equation, names_at(names, equation), times, inside)
        yield site
        for inner in inner_jaxprs(equation):
            yield from every_equation(
                inner, names=site.names, times=times * length_of(equation), inside=(*inside, equation)
            )


def interpret(
    jaxpr: Any,
    constants: Sequence[V],
    values: Sequence[V],
    rule: Callable[[Any, list[V]], Sequence[V]],
    literal: Callable[[Any], V],
) -> list[V]:
    """The values of a jaxpr's results.

    constants, values: of the jaxpr's constants and arguments
    rule: (equation, values of its operands) -> values of its results
    literal: the value of a number that is written in the program
    """
    jaxpr = opened(jaxpr)
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *values), strict=True))

    def value_of(atom: Any) -> V:
        return literal(atom) if isinstance(atom, Literal) else known[atom]

    for equation in equations(jaxpr):
        results = rule(equation, [value_of(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


class Scan(NamedTuple):
    """The layout of a scan: its operands are constants, carry and rows, its results carry and rows.

    A round of the body sees one row of each array of rows. constants, carried: how many operands are such.
    """

    body: Any
    length: int
    reverse: bool
    constants: int
    carried: int

    def split(self, operands: Sequence[V]) -> tuple[list[V], list[V], list[V]]:
        """(constants, carry, rows) of the operands, or of the body's arguments."""
        first, last = self.constants, self.constants + self.carried
        return list(operands[:first]), list(operands[first:last]), list(operands[last:])


def scan_of(equation: Any) -> Scan:
    """The layout of an equation that is a scan."""
    params, body = equation.params, equation.params["jaxpr"]
    # A row has a dim less inside. (The parameters count them too, but under other names in other versions of jax.)
    carried = len(equation.outvars) - _rows(equation.outvars, body.jaxpr.outvars)
    constants = len(equation.invars) - _rows(equation.invars, body.jaxpr.invars) - carried
    return Scan(body, params["length"], params["reverse"], constants, carried)


def _rows(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(a.aval.ndim > b.aval.ndim for a, b in zip(outside, inside, strict=True))
