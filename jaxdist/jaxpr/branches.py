"""How often each branch of a condition is taken, where the program says it.

A pipeline's conditions depend on constants (its table), on the number of the tick and on the stage. All of these are in
the jaxpr, so that what stands in a branch can be counted exactly: its predicate is computed for every stage and every
turn of the loops around it, all at once, on integers only.

Legend: N contexts, one for each pair of (stage, turn of the loops around).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from jaxdist.jaxpr.axes import SILENT, named_axes
from jaxdist.jaxpr.evaluate import CALLS

AXIS = "pipe"  # devices at one place on this axis take the same branches
LARGEST = 1 << 16  # elements of a value that is followed
MOST = 1 << 22  # contexts times elements: with more, a loop's turns are not told apart


class Value(NamedTuple):
    """What is known of a variable. array: [N, ...] if it differs from context to context, else [...]."""

    array: np.ndarray
    differs: bool


class Scope(NamedTuple):
    """Where in a program a reader is. stage: of each context, [N]. live: how often each context gets here, [N]. known:
    values of variables. certain: whether `live` is exact: it is not below a condition that depends on data. at_most:
    how often a device would get here if it took every branch."""

    stage: np.ndarray
    live: np.ndarray
    known: dict[Any, Value]
    certain: bool
    at_most: int

    @property
    def calls(self) -> np.ndarray:
        """How often each stage gets here, [stages]."""
        return np.bincount(self.stage, weights=self.live).astype(np.int64)

    def read(self, atom: Any) -> Value | None:
        """What is known of a variable or literal."""
        return Value(np.asarray(atom.val), False) if isinstance(atom, Literal) else self.known.get(atom)

    def follow(self, equation: Any) -> None:
        """Note what an equation gives, if that can be known."""
        operands = [self.read(atom) for atom in equation.invars]
        name, outputs = equation.primitive.name, equation.outvars
        if name == "axis_index" and named_axes(equation) == (AXIS,):
            self.known[outputs[0]] = Value(self.stage.astype(outputs[0].aval.dtype), True)
            return
        values = [operand for operand in operands if operand is not None]
        if len(values) < len(operands) or not operands or not all(map(_small, outputs)):
            return
        if name in SILENT:
            self.known.update(zip(outputs, values, strict=True))
        elif not named_axes(equation) and not list(jaxprs_in_params(equation.params)):
            self.known.update(zip(outputs, _compute(equation, values), strict=True))

    def inside(self, jaxpr: Any, equation: Any = None) -> "Scope":
        """In a jaxpr of a call. Its arguments are the equation's operands if there are as many, and whole if they are
        the same on all devices."""
        atoms = [] if equation is None else list(equation.invars)
        if len(getattr(jaxpr, "jaxpr", jaxpr).invars) != len(atoms):
            atoms = []
        specs = [] if equation is None else equation.params.get("in_specs", [])
        parts = [any(entry is not None for entry in spec) for spec in specs] or [False] * len(atoms)
        values = [None if part else self.read(atom) for atom, part in zip(atoms, parts, strict=False)]
        return self._replace(known=_bound(jaxpr, values))

    def returned(self, equation: Any, jaxpr: Any, called: "Scope") -> None:
        """Note what a call gives, if that is known in the scope of its jaxpr."""
        found = getattr(jaxpr, "jaxpr", jaxpr).outvars
        if equation.primitive.name in CALLS and len(found) == len(equation.outvars):
            values = zip(equation.outvars, map(called.read, found), strict=True)
            self.known.update((name, value) for name, value in values if value is not None)

    def turns(self, equation: Any) -> "Scope":
        """In the body of a scan: a context a turn, if what goes into a turn is known at all, else counted only."""
        params, body = equation.params, equation.params["jaxpr"]
        # Inputs are constants, carry and rows, outputs carry and rows; a row has a dim less inside. (The parameters say
        # it too, in every version of jax in other words.)
        length = params["length"]
        carried = len(equation.outvars) - _rows(equation.outvars, body.jaxpr.outvars)
        constants = len(equation.invars) - _rows(equation.invars, body.jaxpr.invars) - carried
        operands = [self.read(atom) for atom in equation.invars]
        rows = operands[constants + carried :]
        scope = self._replace(at_most=self.at_most * length)
        size = max((value.array.size for value in operands if value is not None), default=1)
        if all(row is None for row in rows) or length * len(self.live) * max(size // len(self.live), 1) > MOST:
            return scope._replace(live=self.live * length, known=_bound(body, [*operands[:constants]]))
        order = np.arange(length)[:: -1 if params["reverse"] else 1]
        values = [value and _repeated(value, length) for value in operands[:constants]] + [None] * carried
        values += [row and _turned(row, order, len(self.live)) for row in rows]
        stage, live = (np.repeat(each, length) for each in (self.stage, self.live))
        return scope._replace(stage=stage, live=live, known=_bound(body, values))

    def branches(self, equation: Any) -> list["Scope"]:
        """In each branch of a condition."""
        chosen, found = self.read(equation.invars[0]), []
        operands = [self.read(atom) for atom in equation.invars[1:]]
        for number, body in enumerate(equation.params["branches"]):
            scope = self._replace(known=_bound(body, operands))
            if chosen is None:
                found.append(scope._replace(certain=False))
            else:
                found.append(scope._replace(live=np.where(chosen.array == number, self.live, 0)))
        return found


def outermost(jaxpr: Any, mesh: Mapping[Any, int]) -> Scope:
    """At the start of a program."""
    stages = mesh.get(AXIS, 1)
    return Scope(np.arange(stages), np.ones(stages, np.int64), _bound(jaxpr, []), True, 1)


def _rows(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """How many variables of a scan are rows inside."""
    return sum(a.aval.ndim > b.aval.ndim for a, b in zip(outside, inside, strict=True))


def _bound(jaxpr: Any, values: Sequence[Value | None]) -> dict[Any, Value]:
    """What is known at the start of a jaxpr, closed or not: its constants, and the first of its arguments."""
    plain = getattr(jaxpr, "jaxpr", jaxpr)
    constants = [Value(np.asarray(x), False) if _small(x) else None for x in getattr(jaxpr, "consts", ())]
    names: Iterable[Any] = (*plain.constvars[: len(constants)], *plain.invars[: len(values)])
    return {name: value for name, value in zip(names, [*constants, *values], strict=True) if value is not None}


def _small(x: Any) -> bool:
    """Whether an array or variable is one to follow: integers and truth values, not too many."""
    if isinstance(x, jax.core.Tracer):
        return False
    aval = x.aval if hasattr(x, "aval") else jax.typeof(x)
    whole = jnp.issubdtype(aval.dtype, np.integer) or aval.dtype == np.bool_
    return whole and math.prod(aval.shape) <= LARGEST


def _compute(equation: Any, values: list[Value]) -> list[Value]:
    """The results of an equation in every context."""

    def run(*operands: Any) -> list[Any]:
        found = equation.primitive.bind(*operands, **equation.params)
        return list(found) if equation.primitive.multiple_results else [found]

    differs = any(value.differs for value in values)
    axes = [0 if value.differs else None for value in values]
    with jax.ensure_compile_time_eval():
        found = (jax.vmap(run, in_axes=axes) if differs else run)(*(value.array for value in values))
    return [Value(np.asarray(each), differs) for each in found]


def _repeated(value: Value, length: int) -> Value:
    return Value(np.repeat(value.array, length, axis=0), True) if value.differs else value


def _turned(value: Value, order: np.ndarray, contexts: int) -> Value:
    """A row for each context, of values [N, turns, ...] or [turns, ...]."""
    array = value.array if value.differs else np.broadcast_to(value.array, (contexts, *value.array.shape))
    return Value(array[:, order].reshape(-1, *array.shape[2:]), True)
