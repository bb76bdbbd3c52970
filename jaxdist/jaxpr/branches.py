"""Counts of how often each equation of a program runs, with those in branches counted exactly.

Which branch of a pipeline's `cond` runs depends on constants (the schedule's table), on the number of the tick, and on
the stage. All three are in the jaxpr. So a predicate is computed here for every stage and every round of the loops
around it, all at once, from integers only.

Legend: N contexts, one for each pair of (stage, round of the loops around).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxdist.jaxpr.axes import SILENT, named_axes
from jaxdist.jaxpr.evaluate import CALLS, apply
from jaxdist.jaxpr.walk import equations, inner_jaxprs, names_at, opened, scan_of

AXIS = "pipe"  # devices with the same coordinate on this axis take the same branches
LARGEST = 1 << 16  # elements: the values of larger arrays are not computed
ROWS = 1 << 8  # the longest `iota` that is computed: the numbers of a stage's rows, which may hold no block
MOST_ELEMENTS = 1 << 22  # contexts times elements: with more, the rounds of a loop are counted but not told apart


class Value(NamedTuple):
    """The value of a variable.

    array: [N, ...] if it differs between contexts, else [...]
    """

    array: np.ndarray
    differs: bool


class Scope(NamedTuple):
    """A place in a program, with what is known there.

    stage: the stage of each context, [N]
    live: how often each context gets here, [N]
    known: the values of variables, where they could be computed
    certain: whether `live` is exact: no condition around depends on data
    at_most: how often a device would get here if it took every branch
    """

    stage: np.ndarray
    live: np.ndarray
    known: dict[Any, Value]
    certain: bool
    at_most: int

    @property
    def calls(self) -> np.ndarray:
        """How often each stage gets here, [stages]."""
        return np.bincount(self.stage, weights=self.live).astype(np.int64)

    def value_of(self, atom: Any) -> Value | None:
        """The value of a variable or literal; None if it is not known."""
        return Value(np.asarray(atom.val), False) if isinstance(atom, Literal) else self.known.get(atom)

    def follow(self, equation: Any) -> None:
        """Add the results of an equation to `known`, if they can be computed."""
        operands = [self.value_of(atom) for atom in equation.invars]
        name, outputs = equation.primitive.name, equation.outvars
        if name == "axis_index" and named_axes(equation) == (AXIS,):
            self.known[outputs[0]] = Value(self.stage.astype(outputs[0].aval.dtype), True)
            return
        values = [operand for operand in operands if operand is not None]
        if len(values) < len(operands) or not all(map(_small, outputs)):
            return
        if not operands and not (name == "iota" and math.prod(outputs[0].aval.shape) <= ROWS):
            return
        if name in SILENT:  # the results are the operands, with another type
            self.known.update(zip(outputs, values, strict=True))
        elif not named_axes(equation) and not inner_jaxprs(equation):
            self.known.update(zip(outputs, _compute(equation, values), strict=True))

    def inside(self, jaxpr: Any, equation: Any) -> "Scope":
        """The scope inside a call.

        The jaxpr's arguments are the equation's operands if there are as many. Operands of a `shard_map` are known
        inside if all devices have the whole.
        """
        atoms = equation.invars if len(opened(jaxpr).invars) == len(equation.invars) else []
        specs = equation.params.get("in_specs", [])
        split = [any(entry is not None for entry in spec) for spec in specs] or [False] * len(atoms)
        values = [None if parts else self.value_of(atom) for atom, parts in zip(atoms, split, strict=False)]
        return self._replace(known=_bound(jaxpr, values))

    def returned(self, equation: Any, jaxpr: Any, called: "Scope") -> None:
        """Add the results of a call to `known`, if they are known in the scope of its jaxpr."""
        found = opened(jaxpr).outvars
        if equation.primitive.name in CALLS and len(found) == len(equation.outvars):
            values = zip(equation.outvars, map(called.value_of, found), strict=True)
            self.known.update((name, value) for name, value in values if value is not None)

    def rounds(self, equation: Any) -> "Scope":
        """The scope inside a scan: a context for each round, if any of its rows is known."""
        scan = scan_of(equation)
        operands = [self.value_of(atom) for atom in equation.invars]
        constants, _, rows = scan.split(operands)
        length, scope = scan.length, self._replace(at_most=self.at_most * scan.length)
        # Inside, there are as many contexts for each one here as there are rounds. The largest value decides.
        size = max((value.array.size for value in operands if value is not None), default=1)
        if all(row is None for row in rows) or length * len(self.live) * max(size // len(self.live), 1) > MOST_ELEMENTS:
            return scope._replace(live=self.live * length, known=_bound(scan.body, constants))
        order = np.arange(length)[:: -1 if scan.reverse else 1]
        values = [value and _repeated(value, length) for value in constants] + [None] * scan.carried
        values += [row and _by_round(row, order, len(self.live)) for row in rows]
        stage, live = (np.repeat(each, length) for each in (self.stage, self.live))
        return scope._replace(stage=stage, live=live, known=_bound(scan.body, values))

    def branches(self, equation: Any) -> list["Scope"]:
        """The scope inside each branch of a condition."""
        chosen, *operands = map(self.value_of, equation.invars)
        found = []
        for number, body in enumerate(equation.params["branches"]):
            live = self.live if chosen is None else np.where(chosen.array == number, self.live, 0)
            certain = self.certain and chosen is not None
            found.append(self._replace(live=live, certain=certain, known=_bound(body, operands)))
        return found


def outermost(jaxpr: Any, mesh: Mapping[Any, int]) -> Scope:
    """The scope at the start of a program. mesh: {axis: size}."""
    stages = mesh.get(AXIS, 1)
    return Scope(np.arange(stages), np.ones(stages, np.int64), _bound(jaxpr, []), True, 1)


class Reached(NamedTuple):
    """An equation, the named scopes around it (as `walk.Site.names`), and its scope."""

    equation: Any
    names: str
    scope: Scope


def reached(
    jaxpr: Any, scope: Scope, wanted: Callable[[Any], bool], weight: Callable[[Reached], float], names: str = ""
) -> Iterator[Reached]:
    """The wanted equations of a program at any depth, in program order.

    wanted: whether an equation is one; what is inside it is not looked at then
    weight: of a condition that depends on data, the branch is followed whose equations weigh most
    """
    for equation in equations(jaxpr):
        here, name = names_at(names, equation), equation.primitive.name
        if wanted(equation):
            yield Reached(equation, here, scope)
        elif name == "scan":
            yield from reached(equation.params["jaxpr"], scope.rounds(equation), wanted, weight, here)
        elif name == "cond":
            bodies = zip(equation.params["branches"], scope.branches(equation), strict=True)
            found = [list(reached(body, branch, wanted, weight, here)) for body, branch in bodies]
            if scope.value_of(equation.invars[0]) is None:
                found = [max(found, key=lambda branch: sum(map(weight, branch)))]
            yield from (each for branch in found for each in branch)
        elif inner := inner_jaxprs(equation):
            for each in inner:
                called = scope.inside(each, equation)
                yield from reached(each, called, wanted, weight, here)
                scope.returned(equation, each, called)
        else:
            scope.follow(equation)


def _bound(jaxpr: Any, values: Sequence[Value | None]) -> dict[Any, Value]:
    """The values known at the start of a jaxpr: of its constants, and of its first arguments, which are given."""
    plain = opened(jaxpr)
    constants = [Value(np.asarray(x), False) if _small(x) else None for x in getattr(jaxpr, "consts", ())]
    names: Iterable[Any] = (*plain.constvars[: len(constants)], *plain.invars[: len(values)])
    return {name: value for name, value in zip(names, [*constants, *values], strict=True) if value is not None}


def _small(x: Any) -> bool:
    """Whether the value of an array or variable is computed here: of integers and truth values, if they are few."""
    if isinstance(x, jax.core.Tracer):
        return False
    aval = x.aval if hasattr(x, "aval") else jax.typeof(x)
    whole = jnp.issubdtype(aval.dtype, np.integer) or aval.dtype == np.bool_
    return whole and math.prod(aval.shape) <= LARGEST


def _compute(equation: Any, values: list[Value]) -> list[Value]:
    """The results of an equation in every context."""
    run = lambda *operands: apply(equation, operands)  # noqa: E731
    differs = any(value.differs for value in values)
    axes = [0 if value.differs else None for value in values]
    with jax.ensure_compile_time_eval():
        found = (jax.vmap(run, in_axes=axes) if differs else run)(*(value.array for value in values))
    return [Value(np.asarray(each), differs) for each in found]


def _repeated(value: Value, length: int) -> Value:
    """A value that is the same in all rounds, for the contexts inside a scan."""
    return Value(np.repeat(value.array, length, axis=0), True) if value.differs else value


def _by_round(value: Value, order: np.ndarray, contexts: int) -> Value:
    """Rows of an array [N, rounds, ...] or [rounds, ...], for the contexts inside a scan."""
    array = value.array if value.differs else np.broadcast_to(value.array, (contexts, *value.array.shape))
    return Value(array[:, order].reshape(-1, *array.shape[2:]), True)
