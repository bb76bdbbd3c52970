"""A loss as a list of operations, traced with all rows and with some: the same operations on two sizes.

A dim that differs between the two is one that rows are in. Nothing is concluded from a size alone, so that a batch may
have as many rows as a layer is wide.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxdist.jaxpr.evaluate import CALLS, apply
from jaxdist.jaxpr.source import installed, line_of_user
from jaxdist.jaxpr.walk import equations, inner_jaxprs, opened, scan_of

PARTS_AXIS = "jaxdist.parts"  # the axis of a `vmap` over parts of a batch, over which a `batch_mean` adds up
UNROLLED = 64  # rounds of a loop that are looked at one by one


class Operation(NamedTuple):
    """One operation.

    name: of its primitive; "row" and "stack" for what a loop reads and writes.
    reads, writes: numbers of values
    line: of the user's code, "loss.py:12"
    run: values -> results, with all rows and with some
    pair: the equations
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    line: str
    run: tuple[Callable[..., Any], Callable[..., Any]]
    pair: tuple[Any, Any]


class Operations(NamedTuple):
    """A function as operations on numbered values. The first values are its arguments.

    given: values that are no result: constants and numbers in the program, by their number, of both sizes
    constants: the numbers of those that are arrays, made outside of the program
    outputs: the numbers of the results
    size: how many values there are
    """

    operations: list[Operation]
    given: dict[int, tuple[Any, Any]]
    constants: frozenset[int]
    arguments: int
    outputs: tuple[int, ...]
    size: int

    def run(self, which: int, arguments: Sequence[Any], patches: dict[int, Any] | None = None) -> list[Any]:
        """All values. which: 0 with all rows, 1 with some. patches: values in place of those that are computed."""
        patches, known = patches or {}, list[Any]([None] * self.size)
        known[: self.arguments] = arguments
        for number, pair in self.given.items():
            known[number] = patches.get(number, pair[which])
        for each in self.operations:
            results = each.run[which](*(known[number] for number in each.reads))
            for number, result in zip(each.writes, results, strict=True):
                known[number] = patches.get(number, result)
        return known

    def origins(self) -> list[frozenset[int]]:
        """The arguments that each value is computed from."""
        found = [frozenset({number}) if number < self.arguments else frozenset[int]() for number in range(self.size)]
        for each in self.operations:
            origin = frozenset[int]().union(*(found[number] for number in each.reads))
            for number in each.writes:
                found[number] = origin
        return found


class ProgramsDiffer(Exception):
    """Two traces hold different operations. The line of the first that differs."""


def pair_up(whole: Any, part: Any, *, unroll: bool = False) -> Operations:
    """The program of two closed jaxprs of the same function. Raises `ProgramsDiffer`.

    unroll: whether loops are taken apart into their rounds, unless they run over rows
    """
    reader = _Reader(unroll)
    numbers = [reader.number() for _ in opened(whole).invars]
    outputs = reader.read(whole, part, numbers, "")
    return Operations(
        reader.operations, reader.given, frozenset(reader.constants), len(numbers), tuple(outputs), reader.count
    )


def constants_of(jaxpr: Any) -> Sequence[Any]:
    """The constants of a jaxpr; none of an open one."""
    return getattr(jaxpr, "consts", ())


class _Reader:
    def __init__(self, unroll: bool) -> None:
        self.unroll, self.count = unroll, 0
        self.operations, self.given, self.constants = list[Operation](), dict[int, tuple[Any, Any]](), set[int]()

    def number(self) -> int:
        self.count += 1
        return self.count - 1

    def constant(self, pair: tuple[Any, Any], *, array: bool) -> int:
        number = self.number()
        self.given[number] = pair
        self.constants |= {number} if array else set()
        return number

    def read(self, whole: Any, part: Any, arguments: list[int], line: str) -> list[int]:
        """The numbers of the results of a jaxpr. line: of the call of code that is no user's, around it."""
        one, two = opened(whole), opened(part)
        pairs = zip(constants_of(whole), constants_of(part), strict=False)
        constants = [self.constant(pair, array=True) for pair in pairs]
        known = dict(zip((*one.constvars, *one.invars), (*constants, *arguments), strict=True))

        def number_of(a: Any, b: Any) -> int:
            if isinstance(a, Literal) and isinstance(b, Literal):
                return self.constant((_strong(a), _strong(b)), array=bool(np.ndim(a.val)))
            if isinstance(a, Literal) or isinstance(b, Literal):
                raise ProgramsDiffer("unknown")
            return known[a]

        lists = equations(one), equations(two)
        for a, b in zip(*lists, strict=False):
            here = line or line_of_user(a)
            if not _alike(a, b):
                raise ProgramsDiffer(here)
            reads = [number_of(x, y) for x, y in zip(a.invars, b.invars, strict=True)]
            known.update(zip(a.outvars, self.step(a, b, reads, here, line), strict=True))
        if len(lists[0]) != len(lists[1]):
            longer = max(lists, key=len)
            raise ProgramsDiffer(line or line_of_user(longer[min(map(len, lists))]))
        return [number_of(x, y) for x, y in zip(one.outvars, two.outvars, strict=True)]

    def step(self, a: Any, b: Any, reads: list[int], here: str, line: str) -> list[int]:
        inner, others = inner_jaxprs(a), inner_jaxprs(b)
        name = a.primitive.name
        if name in CALLS and len(inner) == 1:
            return self.read(inner[0], others[0], reads, line or (here if installed(inner[0]) else ""))
        if name == "scan" and self.unroll and a.params["length"] == b.params["length"] <= UNROLLED:
            return self.rounds(a, b, reads, here, line)
        if name == "debug_callback":
            return []
        runs = functools.partial(_apply, a), functools.partial(_apply, b)
        return self.add(name, reads, len(a.outvars), here, runs, (a, b))

    def add(self, name: str, reads: Sequence[int], count: int, line: str, runs: Any, pair: Any) -> list[int]:
        writes = [self.number() for _ in range(count)]
        self.operations.append(Operation(name, tuple(reads), tuple(writes), line, runs, pair))
        return writes

    def rounds(self, a: Any, b: Any, reads: list[int], here: str, line: str) -> list[int]:
        """A scan, one round after the other."""
        loop, other = scan_of(a), scan_of(b)
        constants, carry, rows = loop.split(reads)
        order = list(range(loop.length))[:: -1 if loop.reverse else 1]
        stacked: dict[int, list[int]] = {}
        for i in order:
            take = functools.partial(_row, i)
            own = [self.add("row", [row], 1, here, (take, take), (a, b))[0] for row in rows]
            results = self.read(loop.body, other.body, [*constants, *carry, *own], line)
            carry, stacked[i] = results[: loop.carried], results[loop.carried :]
        columns = zip(*(stacked[i] for i in range(loop.length)), strict=True)
        return carry + [self.add("stack", list(column), 1, here, (_stack, _stack), (a, b))[0] for column in columns]


def _row(i: int, x: Any) -> list[Any]:
    return [x[i]]


def _stack(*rows: Any) -> list[Any]:
    return [jnp.stack(rows)]


def _apply(equation: Any, *operands: Any) -> list[Any]:
    return apply(equation, operands)


def _strong(literal: Any) -> Any:
    return jnp.asarray(literal.val, literal.aval.dtype)


def _alike(a: Any, b: Any) -> bool:
    return bool(
        a.primitive is b.primitive
        and (len(a.invars), len(a.outvars)) == (len(b.invars), len(b.outvars))
        and all(
            x.aval.ndim == y.aval.ndim for x, y in zip(a.outvars, b.outvars, strict=True) if hasattr(x.aval, "ndim")
        )
    )
