"""Temporary memory of a step, from the traced program: the largest sum of the arrays that are there at one time.

Program order stands for the compiler's schedule. An elementwise operation, or one that moves elements, is taken to be
fused into whatever reads it: it has an array of its own only where a product, a collective, a loop or a result needs
one. Until then the arrays that it is computed from stay. A `scan` needs its results and what one round of it needs; a
`while` counts as its results.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxdist.jaxpr.axes import moving_axes
from jaxdist.jaxpr.walk import inner_jaxprs, interpret, nbytes_of, opened, primitives, scan_of
from jaxdist.plan.traced.program import traced_program
from jaxdist.specs import PyTree, bytes_per_device
from jaxdist.state import TrainState
from jaxdist.train_step import TrainStep

# The same array under another name or shape.
_SAME = primitives(
    "reshape squeeze expand_dims transpose name optimization_barrier copy copy_p layout_constraint pvary pcast"
)
# Nothing is fused into these.
_WHOLE = primitives(
    """
    dot_general conv_general_dilated reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin
    sort top_k cumsum cumlogsumexp cummax random_bits threefry2x32
    """
)
_IN_PLACE = primitives("dynamic_update_slice scatter scatter-add scatter_add")
# Too dear to be computed again for a second reader.
_DEAR = primitives("exp exp2 log log1p expm1 tanh logistic erf pow sqrt rsqrt sin cos gather")
# Bytes of arrays, in each of the sizes that a program is read for: see `peaks_of_sizes`.
BytesOfSizes = tuple[float, ...]
Measure = Callable[[Any], float]  # type of an array -> its bytes


@dataclass(eq=False)
class _Value:
    """An array of the program, or a number.

    nbytes: on one device, in each of the sizes
    own: whether it has an array of its own; otherwise it is computed where it is read
    inside: whether the array is made by the jaxpr that is being read
    dear: whether it gets an array of its own when it is read twice
    roots: the arrays that it is computed from: itself, if it has one of its own
    """

    nbytes: BytesOfSizes
    own: bool = True
    inside: bool = True
    dear: bool = False
    roots: frozenset["_Value"] = frozenset()

    def __post_init__(self) -> None:
        self.roots = frozenset({self}) if self.own else self.roots


def _outside(nbytes: BytesOfSizes) -> _Value:
    return _Value(nbytes, inside=False)


@dataclass
class _Operation:
    """An operation in the order of the program.

    fused: whether its results have no arrays of their own
    whole: whether its operands must have some
    workspace: bytes that it needs while it runs, in each of the sizes; (): none
    places: pairs (operand, result) that may be one array
    """

    reads: list[_Value]
    made: list[_Value]
    fused: bool = False
    whole: bool = True
    workspace: BytesOfSizes = ()
    places: Sequence[tuple[_Value, _Value]] = ()


class _Event(NamedTuple):
    """An operation that makes arrays. places: as of `_Operation`; None if it is elementwise."""

    reads: frozenset[_Value]
    made: list[_Value]
    workspace: BytesOfSizes
    places: Sequence[tuple[_Value, _Value]] | None


def temporary_bytes(step: TrainStep, state: TrainState, batch: PyTree) -> int:
    """The most bytes that one device holds beside state and batch at any time of a step. Arguments: see `ledger`."""
    jaxpr = traced_program(step, state, batch)
    sizes = [bytes_per_device(x, x.sharding.spec, x.sharding.mesh) for x in jax.tree.leaves((state, batch))]
    return peak_bytes(jaxpr, sizes)


def peak_bytes(jaxpr: Any, sizes: Sequence[int]) -> int:
    """The most bytes that a program holds beside its arguments and results. sizes: of the arguments, on one device."""
    return peaks_of_sizes(jaxpr, [(float(size),) for size in sizes], (nbytes_of,))[0]


def peaks_of_sizes(jaxpr: Any, given: Sequence[BytesOfSizes], measures: Sequence[Measure]) -> tuple[int, ...]:
    """`peak_bytes` of a program that was traced in one size and is read for several, such as numbers of rows.

    given: bytes of the arguments on one device, in each of the sizes.
    """
    body = _Body(lambda aval: tuple([each(aval) for each in measures]), len(measures))
    return tuple(map(round, body.peak(body.read(jaxpr, [_outside(size) for size in given]))))


def _on_host(atom: Any) -> bool:
    return bool(atom.aval.memory_space == jax.memory.Space.Host)


class _Body:
    """A jaxpr that runs from its first to its last operation: the program, a round of a loop, a branch."""

    def __init__(self, measure: Callable[[Any], BytesOfSizes], sizes: int) -> None:
        self.operations: list[_Operation] = []
        self.measure, self.sizes = measure, sizes

    def read(self, jaxpr: Any, inputs: Sequence[_Value]) -> list[_Value]:
        """Values of the arguments -> values of the results."""
        constants = [_outside(self.measure(each.aval)) for each in opened(jaxpr).constvars]
        return interpret(jaxpr, constants, inputs, self.equation, lambda literal: _outside(self.measure(literal.aval)))

    def equation(self, equation: Any, given: list[_Value]) -> list[_Value]:
        """The values of an equation's results."""
        name, inner = equation.primitive.name, inner_jaxprs(equation)
        if name == "scan":
            return self.scan(equation, given)
        if name == "cond":
            return self.condition(equation, given)
        if len(inner) == 1 and len(opened(inner[0]).invars) == len(given):  # a call
            return self.read(inner[0], given)
        made = [_Value(self.size(equation, given, each)) for each in equation.outvars]
        if name == "device_put":
            return self.moved(equation, given, made)
        if name in _SAME and len(given) == len(made):
            return given
        if name in _IN_PLACE:
            made = given[:1] if given[0].own else made
            self.operations.append(_Operation(given, made, whole=False))
        elif name in _WHOLE or inner or moving_axes(equation):
            self.operations.append(_Operation(given, made))
        else:
            for each in made:
                each.own, each.dear = False, name in _DEAR
            self.operations.append(_Operation(given, made, fused=True))
        return made

    def moved(self, equation: Any, given: list[_Value], made: list[_Value]) -> list[_Value]:
        """The values of results that may be in another memory: what is on the host is not in the device's."""
        fetched = [_on_host(before) for before in equation.invars]
        self.operations.append(_Operation(given, [new for new, there in zip(made, fetched, strict=True) if there]))
        arrived = [new if there else old for old, new, there in zip(given, made, fetched, strict=True)]
        return [
            _outside(each.nbytes) if _on_host(x) else each for x, each in zip(equation.outvars, arrived, strict=True)
        ]

    def size(self, equation: Any, given: list[_Value], result: Any) -> BytesOfSizes:
        """Bytes of a result on one device. Outside of `shard_map` types are global: it is split like its operands."""
        whole, count = self.measure(result.aval), math.prod(result.aval.shape)
        shares = [
            (self.share(value, atom), math.prod(atom.aval.shape) == count)
            for value, atom in zip(given, equation.invars, strict=True)
            if atom.aval.shape and self.measure(atom.aval)[0]
        ]
        alike = [share for share, same in shares if same] or [share for share, _ in shares]
        share = min(alike, default=1.0)
        return whole if share == 1.0 else tuple(each * share for each in whole)

    def share(self, value: _Value, atom: Any) -> float:
        """The share of an array that one device has."""
        return value.nbytes[0] / self.measure(atom.aval)[0]

    def scan(self, equation: Any, given: list[_Value]) -> list[_Value]:
        """The values of a scan's results: what it carries, and stacked rows."""
        scan, body = scan_of(equation), _Body(self.measure, self.sizes)
        constants, carry, rows = scan.split(given)
        before = [_outside(each.nbytes) for each in carry]
        stacked, one = scan.split(equation.invars)[2], scan.split(opened(scan.body).invars)[2]
        own = [_Value(self.row(*each), own=False) for each in zip(rows, stacked, one, strict=True)]
        after = body.read(scan.body, [*(_outside(each.nbytes) for each in constants), *before, *own])
        made = [_Value(self.size(equation, given, each)) for each in equation.outvars]
        workspace = body.peak(after[: scan.carried], before=before)
        places = list(zip(carry, made[: scan.carried], strict=True))
        self.operations.append(_Operation([*constants, *rows], []))  # a carry is computed into the loop's own array
        self.operations.append(_Operation(given, made, whole=False, workspace=workspace, places=places))
        return made

    def row(self, value: _Value, stacked: Any, one: Any) -> BytesOfSizes:
        """Bytes of one row of a stacked array on one device."""
        share = self.share(value, stacked) if self.measure(stacked.aval)[0] else 1.0
        return tuple(each * share for each in self.measure(one.aval))

    def condition(self, equation: Any, given: list[_Value]) -> list[_Value]:
        """The values of a condition's results. What a branch only hands on is changed in place by the others."""
        needed, passed = list[BytesOfSizes](), dict[int, _Value]()
        for branch in equation.params["branches"]:
            body, inputs = _Body(self.measure, self.sizes), [_outside(each.nbytes) for each in given[1:]]
            results = body.read(branch, inputs)
            needed.append(body.peak(results))
            handed = {id(mine): each for mine, each in zip(inputs, given[1:], strict=True)}
            passed |= {i: handed[id(each)] for i, each in enumerate(results) if id(each) in handed}
        made = [
            passed[i] if i in passed and passed[i].own else _Value(self.size(equation, given, each))
            for i, each in enumerate(equation.outvars)
        ]
        self.operations.append(_Operation(given, made, workspace=tuple(map(max, zip(*needed, strict=True)))))
        return made

    def peak(self, results: Sequence[_Value], *, before: Sequence[_Value] = ()) -> BytesOfSizes:
        """The most bytes at one time, in each of the sizes.

        results: written to arrays that are there already, in place of `before`.
        """
        events = self.events(frozenset(results))
        first, last, free = dict[_Value, int](), dict[_Value, int](), set(results)
        for i, each in enumerate(events):
            last |= dict.fromkeys(each.reads, i)
            for value in each.made:
                first.setdefault(value, i)
        for old, new in zip(before, results, strict=False):
            if new is not old and new in first:
                places, read = events[first[new]].places, last.get(old, -1)
                if read > first[new] or (read == first[new] and places is not None and (old, new) not in places):
                    free.discard(new)  # the old one is still read
                    last[new] = len(events)

        return tuple(_most(events, last, free, size) for size in range(self.sizes))

    def events(self, results: frozenset[_Value]) -> list[_Event]:
        """The operations that make arrays, those that others are fused into among them."""
        uses = Counter(value for each in self.operations for value in set(each.reads))
        found: list[_Event] = []

        def realise(value: _Value) -> None:
            if not value.own:
                found.append(_Event(value.roots, [value], (), None))
                value.own, value.roots = True, frozenset({value})

        for each in self.operations:
            roots = frozenset[_Value]().union(*(value.roots for value in each.reads))
            if each.fused:
                for value in each.made:
                    value.roots = roots
                    if value in results or (value.dear and uses[value] > 1):
                        realise(value)
                continue
            if each.whole:
                for value in each.reads:
                    realise(value)
                roots = frozenset(each.reads)
            if each.made:
                found.append(_Event(roots, each.made, each.workspace, each.places))
        return found


def _most(events: list[_Event], last: dict[_Value, int], free: set[_Value], size: int) -> float:
    """The most bytes at one time, in one of the sizes. last: the event that reads a value last. free: cost nothing."""

    def cost(values: Iterable[_Value]) -> float:
        return sum(value.nbytes[size] for value in values if value.inside and value not in free)

    live, most, there = 0.0, 0.0, set[_Value]()
    for i, each in enumerate(events):
        made = set(each.made) - there
        dying = {value for value in each.reads & there if last[value] == i}
        if each.places is None:
            sizes = {value.nbytes for value in made}
            shared = min(cost(made), cost(value for value in dying if value.nbytes in sizes))
        else:
            shared = cost(b for a, b in each.places if a in dying and a.nbytes == b.nbytes)
        most = max(most, live + cost(made) - shared + (each.workspace[size] if each.workspace else 0.0))
        gone = dying | {value for value in made if last.get(value, -1) < i}
        live += cost(made) - cost(gone)
        there = (there | made) - gone
    return most
