"""Where a loss stops to be a sum over samples: every value of its program, with all rows beside parts of them.

A value is sound if it is the same whatever rows there are, has its rows, or pairs of rows, as parts have them, or is
the sum of what it is in the parts. What a loss returns must be a sum. Where it is none, the operations to blame are
those that make unsound values of sound ones, and whose values reach the result through unsound ones only.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.plan.verify.program import PARTS_AXIS, Operations

TRIED, RETRIES = 6, 4  # roots that are tried one by one, and how often new ones are looked for


class Kind(Enum):
    """What a value is, beside its values in the parts."""

    SAME = "the same in every part"
    ROWS = "of rows, the same as in the parts"
    PAIRS = "of pairs of rows, the same as in the parts"
    SUM = "the sum of the parts"
    UNSOUND = "none of these"


class Cut(NamedTuple):
    """A dim that rows are in: of size before * rows * after."""

    dim: int
    before: int
    after: int


class Root(NamedTuple):
    """An unsound value that is made of sound ones.

    value: its number
    operation: its place in the program; None for a constant, or a number in the program
    in_rows: whether it reaches other values of rows, and not only the result
    """

    value: int
    operation: int | None
    in_rows: bool


class Values:
    """The values of a program, with all rows and in parts.

    kinds: of each value. scaled: the dims of each that differ with the number of rows
    """

    def __init__(
        self, whole: list[np.ndarray], parts: list[list[np.ndarray]], rows: Sequence[np.ndarray], tol: float
    ) -> None:
        self.whole, self.parts, self.rows, self.tol = whole, parts, rows, tol
        self.count = sum(map(len, rows))
        self.scaled = [
            [d for d, (a, b) in enumerate(zip(np.shape(x), np.shape(y), strict=True)) if a != b]
            for x, y in zip(whole, parts[0], strict=True)
        ]
        self.cuts: dict[int, Cut] = {}
        self.kinds = [self._kind(number) for number in range(len(whole))]

    def _kind(self, number: int) -> Kind:
        whole, parts = self.whole[number], [part[number] for part in self.parts]
        if not self.scaled[number]:
            if all(close(whole, part, self.tol) for part in parts):
                return Kind.SAME
            if whole.dtype != bool and close(whole, sum(parts[1:], start=parts[0]), self.tol, *parts):
                return Kind.SUM
            return Kind.UNSOUND
        blocks = [self._block(number, place) for place in range(len(parts))]
        if all(block is not None and close(block, part, self.tol) for block, part in zip(blocks, parts, strict=True)):
            return Kind.PAIRS
        for cut in self._possible_cuts(number):
            if all(close(take(whole, cut, rows), part, self.tol) for part, rows in zip(parts, self.rows, strict=True)):
                self.cuts[number] = cut
                return Kind.ROWS
        return Kind.UNSOUND

    def _block(self, number: int, place: int) -> np.ndarray | None:
        """Of a value with two dims of rows, those of a part; None of others."""
        whole, dims = self.whole[number], self.scaled[number]
        if len(dims) != 2 or any(whole.shape[dim] != self.count for dim in dims):
            return None
        rows = self.rows[place]
        return whole.take(rows, dims[0]).take(rows, dims[1])

    def _possible_cuts(self, number: int) -> Iterator[Cut]:
        if len(self.scaled[number]) != 1:
            return
        [dim] = self.scaled[number]
        size = self.whole[number].shape[dim]
        inner, left = divmod(size, self.count)
        if left or any(
            part[number].shape[dim] != inner * len(own) for part, own in zip(self.parts, self.rows, strict=True)
        ):
            return
        yield from (Cut(dim, before, inner // before) for before in range(1, inner + 1) if not inner % before)

    def in_part(self, number: int, place: int, like: Sequence[int]) -> np.ndarray | None:
        """A value of the whole as it is to be in a part, or None where that is not known. like: values with rows."""
        if not self.scaled[number]:
            return self.whole[number]
        if (block := self._block(number, place)) is not None:
            return block
        cuts = list(self._possible_cuts(number))
        known = [self.cuts[other]._replace(dim=cuts[0].dim) for other in like if other in self.cuts and cuts]
        chosen = next((cut for cut in known if cut in cuts), cuts[0] if cuts else None)
        return None if chosen is None else take(self.whole[number], chosen, self.rows[place])


def take(x: np.ndarray, cut: Cut, rows: np.ndarray) -> np.ndarray:
    """The rows of an array."""
    count = x.shape[cut.dim] // (cut.before * cut.after)
    split = x.reshape(*x.shape[: cut.dim], cut.before, count, cut.after, *x.shape[cut.dim + 1 :])
    return split.take(rows, cut.dim + 1).reshape(*x.shape[: cut.dim], -1, *x.shape[cut.dim + 1 :])


def close(a: np.ndarray, b: np.ndarray, tol: float, *scales: np.ndarray) -> bool:
    """Whether two arrays differ by no more than `tol` of their largest number. scales: other arrays of that size."""
    if np.shape(a) != np.shape(b):
        return False
    if not np.issubdtype(a.dtype, np.inexact):
        return bool(np.array_equal(a, b))
    alike = (a == b) | (np.isnan(a) & np.isnan(b))
    if alike.all():
        return True
    finite = np.isfinite(a) & np.isfinite(b)
    size = max((float(np.abs(x[np.isfinite(x)]).max(initial=0)) for x in (a, b, *scales)), default=0.0)
    with np.errstate(invalid="ignore"):
        return bool((alike | (finite & (np.abs(a - b) <= tol * size))).all())


class Follower:
    """A program beside itself in parts.

    arguments: (leaves that are not split, leaves that are split by rows), in the order of the program's arguments
    rows: of each part, all parts of the same size
    shared: whether the program adds up over parts itself, by a `batch_mean`
    """

    def __init__(
        self,
        program: Operations,
        arguments: Sequence[Any],
        split: Sequence[bool],
        rows: Sequence[np.ndarray],
        *,
        tol: float,
        shared: bool,
    ) -> None:
        self.program, self.split, self.rows, self.tol, self.shared = program, split, rows, tol, shared
        self.arguments = arguments
        self.readers: dict[int, list[int]] = {}
        self.maker: dict[int, int] = {}
        for place, each in enumerate(program.operations):
            self.maker |= dict.fromkeys(each.writes, place)
            for number in each.reads:
                self.readers.setdefault(number, []).append(place)
        self.runs: list[Callable[..., Any]] = []
        for which in (0, 1):
            run: Callable[..., Any] = functools.partial(program.run, which)
            axes = [0 if own else None for own in split]
            if shared:
                run = jax.vmap(run, in_axes=(axes, 0), axis_name=PARTS_AXIS)
            self.runs.append(jax.jit(run, compiler_options=quick()))
        self.whole = self._all(0, list(arguments), None)

    def _all(self, which: int, arguments: list[Any], patches: Any) -> list[np.ndarray]:
        if self.shared:
            arguments = [x[None] if own else x for x, own in zip(arguments, self.split, strict=True)]
        found = self.runs[which](arguments, patches or {})
        self.dtypes = [x.dtype for x in found]
        return [plain(x[0] if self.shared else x) for x in found]

    def values(self, patches: dict[int, list[Any]]) -> Values:
        """patches: values of each part, in place of what is computed."""
        if self.shared:
            stacked = jnp.stack([jnp.asarray(own) for own in self.rows])
            arguments = [x[stacked] if own else x for x, own in zip(self.arguments, self.split, strict=True)]
            held = {number: jnp.stack([self._typed(number, x) for x in each]) for number, each in patches.items()}
            found = self.runs[1](arguments, held)
            parts = [[plain(x[i]) for x in found] for i in range(len(self.rows))]
        else:
            parts = []
            for i, own in enumerate(self.rows):
                arguments = [x[own] if split else x for x, split in zip(self.arguments, self.split, strict=True)]
                held = {number: self._typed(number, each[i]) for number, each in patches.items()}
                parts.append([plain(x) for x in self.runs[1](arguments, held)])
        return Values(self.whole, parts, self.rows, self.tol)

    def _typed(self, number: int, value: np.ndarray) -> Any:
        """A value of `plain` in the type that it has in the program."""
        dtype = self.dtypes[number]
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(jnp.empty((), dtype)))
        return jnp.asarray(value, dtype)

    def roots(self, output: int) -> tuple[list[tuple[Root, Values]], Values]:
        """What makes a result unsound, in the order of the program, each with the values that it was seen in: those of
        before it are sound there. And the values as they are."""
        patches: dict[int, list[Any]] = {}
        found: list[tuple[Root, Values]] = []
        first = values = self.values(patches)
        for _ in range(RETRIES):
            if values.kinds[output] is Kind.SUM:
                break
            known = [root for root, _ in found]
            roots = [root for root in self._roots(values, output) if root not in known]
            in_rows = [root for root in roots if root.in_rows]
            if not in_rows:
                found += [(root, values) for root in roots]
                break
            real = in_rows
            if len(in_rows) > 1:
                real = [root for root in in_rows[:TRIED] if self._is_real(root, in_rows, output, values, patches)]
            real = real or in_rows[:1]
            found += [(root, values) for root in real]
            for root in real:
                patches |= self._sound(root, output, values)
            values = self.values(patches)
        return found, first

    def place_of(self, root: Root) -> int:
        """The place of the operation that made a root, or that is the first to read it."""
        if root.operation is not None:
            return root.operation
        return min(self.readers.get(root.value, [len(self.program.operations) - 1]))

    def _reads_of(self, number: int) -> Sequence[int]:
        """The values that a value is computed from by one operation."""
        return self.program.operations[self.maker[number]].reads if number in self.maker else ()

    def _made_from(self, number: int) -> list[int]:
        """The values that one operation computes from a value."""
        return [made for place in self.readers.get(number, []) for made in self.program.operations[place].writes]

    def _is_real(self, root: Root, roots: list[Root], output: int, values: Values, patches: dict[int, Any]) -> bool:
        """Whether a root alone makes the result unsound, the others being mended."""
        after = self._after(root.value, self._behind(values, output))
        mended = {
            number: each
            for other in roots
            if other is not root
            for number, each in self._sound(other, output, values).items()
            if number not in after
        }
        return root.value in self._behind(self.values(patches | mended), output)

    def _behind(self, values: Values, output: int) -> set[int]:
        """The unsound values that reach a result through unsound ones."""
        start = [output] if values.kinds[output] is not Kind.ROWS else []
        return _reached(start, self._reads_of, lambda number: number == output or values.kinds[number] is Kind.UNSOUND)

    def _after(self, start: int, inside: set[int]) -> set[int]:
        """The values of a set that are computed from one of them, with it."""
        return _reached([start], self._made_from, inside.__contains__)

    def _roots(self, values: Values, output: int) -> list[Root]:
        behind = self._behind(values, output)
        found = []
        for number in sorted(behind):
            reads = self._reads_of(number)
            if values.kinds[number] is Kind.UNSOUND and not any(values.kinds[r] is Kind.UNSOUND for r in reads):
                in_rows = any(values.scaled[after] for after in self._after(number, behind))
                found.append(Root(number, self.maker.get(number), in_rows))
        return sorted(found, key=lambda root: min(self.readers.get(root.value, [0])))

    def _sound(self, root: Root, output: int, values: Values) -> dict[int, list[Any]]:
        """Values in place of unsound ones: of a root, and of the first values of rows that are computed from it."""
        after = self._after(root.value, self._behind(values, output))
        leading = self._before({number for number in after if values.scaled[number]}, after)
        found: dict[int, list[Any]] = {}
        seen, todo = set[int](), [root.value]
        while todo:
            number = todo.pop()
            if number in seen or number not in leading or number == output:
                continue
            seen.add(number)
            mended = [values.in_part(number, place, self._reads_of(number)) for place in range(len(self.rows))]
            if all(each is not None for each in mended):
                found[number] = mended
                if values.scaled[number]:
                    continue
            todo += self._made_from(number)
        return found

    def _before(self, numbers: set[int], inside: set[int]) -> set[int]:
        """The values of a set that one of the numbers is computed from, with it."""
        return _reached(numbers, self._reads_of, inside.__contains__)


def _reached(start: Iterable[int], further: Callable[[int], Iterable[int]], keep: Callable[[int], bool]) -> set[int]:
    """The numbers of a graph that are kept, and reached from the first ones by way of such."""
    seen, todo = set[int](), list(start)
    while todo:
        number = todo.pop()
        if number not in seen and keep(number):
            seen.add(number)
            todo += further(number)
    return seen


def quick() -> dict[str, Any]:
    """Options of a compiler that is to take little time: what runs once need not be fast."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


def plain(x: Any) -> np.ndarray:
    """An array of NumPy; of a random key its data. Narrow floats, of which NumPy knows little, are widened."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return np.asarray(x.astype(jnp.float32) if narrow else x)
