"""Whether sum, weight and gradients of a batch are those of its parts together, on one device; and if not, why."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist.optim import leave_out
from jaxdist.plan.verify.causes import BODIES, faults_of_roots
from jaxdist.plan.verify.findings import Fault
from jaxdist.plan.verify.follow import Follower, Kind, close, quick
from jaxdist.plan.verify.layout import largest_number
from jaxdist.plan.verify.program import PARTS_AXIS, ProgramsDiffer, pair_up
from jaxdist.plan.verify.subject import Subject
from jaxdist.plan.verify.trace import holds_constant, of_fewer_rows
from jaxdist.specs import PyTree, leaves_by_name

SUM, WEIGHT = 0, 1  # places in the results


class _Totals(NamedTuple):
    """Of some rows: sum, weight, and the gradient of the sum."""

    total: np.ndarray
    weight: np.ndarray
    grads: dict[str, np.ndarray]


class SumSizes(NamedTuple):
    """How large sums are before their terms cancel: those of two halves together, without their signs.

    total: of the sum of losses. loss, figures: of the loss and of its own metrics, for each unit of weight.
    """

    total: float
    loss: float
    figures: dict[str, float]


def equal_parts(rows: int, parts: int) -> list[np.ndarray]:
    """The rows of equal parts, in order."""
    return np.split(np.arange(rows), parts)


def halves(rows: int) -> list[np.ndarray]:
    """The rows of two halves, or of the fewest equal parts."""
    return equal_parts(rows, next(count for count in range(2, rows + 1) if not rows % count))


def orders(rows: int) -> list[np.ndarray]:
    """Orders of the rows, the first as they are: a loss may add up over neighbours by chance, or as it reads pairs."""
    rng = np.random.default_rng(0)
    return [np.arange(rows), *(rng.permutation(rows) for _ in range(2))]


def _sizes(parts: Sequence[tuple[Any, Any, Any]]) -> SumSizes:
    """parts: (sum, weight, metrics) of each."""

    def without_signs(sums: Sequence[Any], weights: Sequence[Any]) -> float:
        weight = abs(float(sum(weights)))
        return float(sum(map(abs, sums))) / weight if weight else 0.0

    sums, weights, metrics = zip(*parts, strict=True)
    figures = {name: without_signs(*zip(*(each[name] for each in metrics), strict=True)) for name in metrics[0]}
    return SumSizes(float(sum(map(abs, sums))), without_signs(sums, weights), figures)


class Adder:
    """A subject in parts. shared: whether it has a `batch_mean`, which adds up over parts. tol: of the comparison."""

    def __init__(self, subject: Subject, *, shared: bool, tol: float) -> None:
        self.subject, self.shared, self.tol = subject, shared, tol

        def totals(params: PyTree, *rest: PyTree) -> Any:
            run = subject.in_parts if shared else subject.results
            both = jax.value_and_grad(lambda params: run(params, *rest)[:2], has_aux=True)
            (total, weight), grads = both(params)
            return total, weight, grads

        self.function = totals
        self.run = self._of_each_part(totals)

    def _of_each_part(self, function: Callable[..., Any]) -> Callable[[Sequence[np.ndarray]], list[Any]]:
        """The rows of parts -> what a function of the subject's arguments gives for each of them."""
        mapped = jax.vmap(function, in_axes=(None, 0, 0, None), axis_name=PARTS_AXIS) if self.shared else function
        compiled = jax.jit(mapped, compiler_options=quick())

        def run(parts: Sequence[np.ndarray]) -> list[Any]:
            if not self.shared:
                return [jax.device_get(compiled(*self.subject.part(own).arguments)) for own in parts]
            found = jax.device_get(compiled(*self.subject.part(np.stack(parts)).arguments))
            return [jax.tree.map(lambda leaf: leaf[i], found) for i in range(len(parts))]  # noqa: B023

        return run

    def totals(self, parts: Sequence[np.ndarray]) -> list[_Totals]:
        """Of each part."""
        return [_Totals(total, weight, leaves_by_name(grads)) for total, weight, grads in self.run(parts)]

    @functools.cached_property
    def sizes(self) -> SumSizes:
        """Of what the loss gives, the largest of several ways to halve the rows: neighbours may cancel each other, too,
        as advantages of a group do. The loss must run with half of the rows."""
        run = self._of_each_part(self.subject.with_metrics)
        found = [_sizes(run([order[each] for each in halves(len(order))])) for order in orders(self.subject.rows)]
        figures = {name: max(each.figures[name] for each in found) for name in found[0].figures}
        return SumSizes(max(each.total for each in found), max(each.loss for each in found), figures)

    def moving_weight(self, freeze: Sequence[str]) -> list[Fault]:
        """The cause that the weight depends on parameters which are trained. freeze: patterns of the others."""
        subject, gradient = self.subject, jax.grad(self.subject.differentiable_weight)
        if self.shared:
            subject = subject.part(np.arange(subject.rows)[None])
            gradient = jax.vmap(gradient, in_axes=(None, 0, 0, None), axis_name=PARTS_AXIS)
        grads = leave_out(jax.jit(gradient, compiler_options=quick())(*subject.arguments), freeze)
        return [Fault("weight of parameters")] if any(map(np.any, jax.tree.leaves(grads))) else []

    def findings(self) -> tuple[list[Fault], list[str]]:
        """(causes, what was compared)."""
        rows = self.subject.rows
        everything, cut = np.arange(rows), halves(rows)
        trace = functools.partial(self._trace, parts=1)
        whole_jaxpr = trace(self.subject)
        part_jaxpr, found = of_fewer_rows(
            self.subject, cut[0], whole_jaxpr, functools.partial(self._trace, parts=len(cut))
        )
        if found:
            return found, []
        whole, again = self.totals([everything])[0], self.totals([everything])[0]
        if any(a.tobytes() != b.tobytes() for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(again), strict=True)):
            return [Fault("same call, other bits")], []
        for order in orders(rows):
            own = [order[each] for each in cut]
            parts = self.totals(own)
            found = self._explained(whole, parts, own, (whole_jaxpr, part_jaxpr))
            if found:
                break
        return found, [f"one device: {_beside(whole, parts)}"]

    def findings_of(self, count: int) -> list[Fault]:
        """The causes by so many equal parts, for a layout that differs where halves add up."""
        cut, everything = equal_parts(self.subject.rows, count), np.arange(self.subject.rows)
        jaxprs = self._trace(self.subject, parts=1), self._trace(self.subject.part(cut[0]), parts=count)
        return self._explained(self.totals([everything])[0], self.totals(cut), cut, jaxprs)

    def _trace(self, subject: Subject, *, parts: int) -> Any:
        return subject.traced(subject.in_parts, parts=parts) if self.shared else subject.traced(subject.results)

    def _apart(self, whole: _Totals, parts: list[_Totals]) -> list[str]:
        """The names of what does not add up."""
        largest = np.asarray(largest_number(whole.grads))
        found = []
        for name in ("total", "weight"):
            own = [getattr(part, name) for part in parts]
            pair = getattr(whole, name), sum(own[1:], start=own[0])
            alike = close(*pair, self.tol, *own)
            if not alike and name == "total":  # of losses that cancel each other only rounding is left
                alike = close(*pair, self.tol, np.asarray(self.sizes.total))
            found += [] if alike else [name]
        for name, leaf in whole.grads.items():
            own = [part.grads[name] for part in parts]
            # A gradient that is zero but for rounding is compared with the others.
            if not close(leaf, sum(own[1:], start=own[0]), self.tol, *own, largest * 1e-3):
                found.append(name)
        return found

    def _explained(
        self, whole: _Totals, parts: list[_Totals], cut: list[np.ndarray], jaxprs: tuple[Any, Any]
    ) -> list[Fault]:
        apart = self._apart(whole, parts)
        if not apart:
            return []
        found: list[Fault] = []
        if "total" in apart:
            found += self._causes(jaxprs, cut, SUM, "total")
        if "weight" in apart and "mean of means" not in [each.cause for each in found]:
            found += self._causes(jaxprs, cut, WEIGHT, "weight")
        if not found:
            found += self._of_gradients(cut, apart)
        return found or [Fault("does not add up", (), _beside(whole, parts))]

    def _follower(self, jaxprs: tuple[Any, Any], cut: list[np.ndarray], *, unroll: bool) -> Follower:
        program = pair_up(*jaxprs, unroll=unroll)
        split = [
            own
            for tree, own in zip(self.subject.arguments, (False, True, True, False), strict=True)
            for _ in jax.tree.leaves(tree)
        ]
        leaves = jax.tree.leaves(self.subject.arguments)
        return Follower(program, leaves, split, cut, tol=self.tol, shared=self.shared)

    @property
    def _keys(self) -> int:
        return len(jax.tree.leaves((self.subject.params, self.subject.batch)))

    def _causes(self, jaxprs: tuple[Any, Any], cut: list[np.ndarray], place: int, what: str) -> list[Fault]:
        """The causes for which a result is no sum."""
        for unroll in (False, True):
            try:
                follower = self._follower(jaxprs, cut, unroll=unroll)
            except ProgramsDiffer as error:
                line, told = str(error), "other code runs for another number of them"
                closed = any(holds_constant(each, line, self.subject.rows) for each in jaxprs)
                return [Fault("closed-over rows" if closed else "fixed number of rows", (line,), told)]
            output = follower.program.outputs[place]
            roots, values = follower.roots(output)
            names = [follower.program.operations[follower.place_of(root)].name for root, _ in roots]
            if unroll or not BODIES & set(names):
                break
        if not roots and values.kinds[output] is Kind.SAME:
            places = [output, follower.program.outputs[SUM]]
            lines = [line for line in (self._line_of(follower, number) for number in places) if line is not None]
            return [Fault("constant weight" if what == "weight" else "penalty in each call", tuple(lines[:1]))]
        return faults_of_roots(follower, roots, output, keys=self._keys)

    @staticmethod
    def _line_of(follower: Follower, number: int) -> str | None:
        """The line that made a value, or one before it."""
        while number in follower.maker:
            operation = follower.program.operations[follower.maker[number]]
            if operation.line != "unknown":
                return str(operation.line)
            number = operation.reads[0]
        return None

    def _of_gradients(self, cut: list[np.ndarray], apart: list[str]) -> list[Fault]:
        """Why gradients do not add up, where sum and weight do: a rule of somebody's own, or `stop_gradient`."""
        graded = self.subject.traced(self.function, parts=1 if self.shared else 0)
        part = self.subject.part(cut[0])
        other = part.traced(self.function, parts=len(cut) if self.shared else 0)
        names = list(leaves_by_name(self.subject.params))
        places = [2 + names.index(name) for name in apart if name in names]
        return [
            each._replace(detail="the sum adds up, its gradient does not")
            for each in (self._causes((graded, other), cut, places[0], "gradient") if places else [])
        ]


def _beside(whole: _Totals, parts: list[_Totals]) -> str:
    sums = [sum(float(getattr(part, name)) for part in parts) for name in ("total", "weight")]
    return (
        f"sum {float(whole.total):.9g} of the batch, {sums[0]:.9g} of its {len(parts)} parts together;"
        f" weight {float(whole.weight):.9g}, {sums[1]:.9g}"
    )
