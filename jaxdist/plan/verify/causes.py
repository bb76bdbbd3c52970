"""The names of roots: which cause an operation is that makes a loss unsound, and its line."""

from collections.abc import Callable
from typing import Any

from jaxdist.jaxpr.randomness import DRAWS
from jaxdist.jaxpr.walk import every_equation, inner_jaxprs, primitives
from jaxdist.plan.verify.findings import Fault
from jaxdist.plan.verify.follow import Follower, Kind, Root, Values

RANKS = primitives("sort top_k approx_top_k argmax argmin")
PICKS = primitives("slice squeeze dynamic_slice gather random_unwrap row split reshape")
ORDERED = primitives(
    "iota cumsum cumprod cummax cummin cumlogsumexp rev slice dynamic_slice dynamic_update_slice gather squeeze"
    " concatenate pad row stack split conv_general_dilated reduce_window_sum reduce_window_max reduce_window"
)
# Operations that are linear in each of their operands.
LINEAR = primitives(
    "add add_any sub neg mul div convert_element_type reshape broadcast_in_dim squeeze reduce_sum copy transpose"
    " dot_general stop_gradient reduce_precision select_n stack row"
)
BODIES = primitives("scan while cond")


def faults_of_roots(follower: Follower, roots: list[tuple[Root, Values]], output: int, *, keys: int) -> list[Fault]:
    """The findings of roots, one a line: a root that rows are read for tells more than one that is made of numbers.

    keys: the number of the argument that random keys are
    """
    namers = [(_Namer(follower, values, output, keys), root) for root, values in roots]
    found: dict[tuple[str, ...], Fault] = {}
    for namer, root in sorted(namers, key=lambda pair: not pair[0].reads_rows(pair[1])):
        each = namer.name(root)
        found.setdefault(each.where, each)
    return list(found.values())


class _Namer:
    """values: those that a root was seen in."""

    def __init__(self, follower: Follower, values: Values, output: int, keys: int) -> None:
        self.follower, self.values, self.output, self.keys = follower, values, output, keys
        self.program = follower.program
        self.origins = self.program.origins()
        self.rowwise = {number for number, own in enumerate(follower.split) if own}

    def reads_rows(self, root: Root) -> bool:
        """Whether a root is computed from rows."""
        return bool(self.origins[root.value] & self.rowwise)

    def name(self, root: Root) -> Fault:
        place = self.follower.place_of(root)
        operation = self.program.operations[place]
        cause = self._cause(root, operation)
        line = operation.line
        if cause == "batch statistics":
            line = self._line_of_statistic(operation) or line
        if cause == "other samples of the batch":
            line = self._line_of_pairs(operation) or line
        if line == "unknown":
            line = self._known_line_after(place)
        return Fault(cause, (line,))

    def _cause(self, root: Root, operation: Any) -> str:
        origins = self.origins[root.value] & self.rowwise
        name = operation.name
        if not origins:
            return self._without_rows(root, operation)
        if origins == {self.keys} and (name in PICKS or self._is_key(operation)):
            return "one key for all samples"
        if Kind.PAIRS in [self.values.kinds[number] for number in operation.reads]:
            return "other samples of the batch"
        if name in RANKS or (name in BODIES and self._holds(operation, RANKS)):
            return "sort or top-k over the batch"
        if len(self.values.scaled[root.value]) > 1:
            return "other samples of the batch"
        if name == "gather" and self._rows_choose(operation):
            return "other samples of the batch"
        if name in BODIES:
            over_rows = len({each.params.get("length") for each in operation.pair}) > 1
            return "order dependence" if over_rows else "batch statistics"
        if root.in_rows:
            return "order dependence" if name in ORDERED else "batch statistics"
        return self._of_the_result(root, operation)

    def _without_rows(self, root: Root, operation: Any) -> str:
        """Of a root that no row is read for."""
        if operation.name in DRAWS or self._holds(operation, DRAWS):
            return "randomness without keys"
        if root.operation is not None and set(operation.reads) & self.program.constants:
            return "closed-over rows"
        if not root.in_rows and not self.values.scaled[root.value]:
            return self._of_the_result(root, operation)
        return "order dependence"

    def _of_the_result(self, root: Root, operation: Any) -> str:
        """Of a root that reaches the result only, and no other row."""
        kinds = [self.values.kinds[number] for number in operation.reads]
        adds = operation.name in ("add", "sub", "add_any") and {Kind.SAME, Kind.SUM} == set(kinds)
        if adds and self._is_linear(root, by=frozenset([Kind.SAME])):
            return "penalty in each call"
        if operation.name in ("reduce_max", "reduce_min"):
            return "sort or top-k over the batch"
        if operation.name in ORDERED:
            return "order dependence"
        divides = operation.name in ("div", "mul") and self._is_linear(root)
        return "mean of means" if divides else "batch statistics"

    def _is_linear(self, root: Root, by: frozenset[Kind] = frozenset(Kind)) -> bool:
        """Whether the result is linear in a root. by: of what it may be multiplied by."""
        after = {root.value}
        for place, operation in enumerate(self.program.operations):
            own = [number for number in operation.reads if number in after]
            if not own or place == root.operation:
                continue
            if self.values.kinds[operation.writes[0]] is not Kind.UNSOUND and self.output not in operation.writes:
                continue
            products = operation.name in ("mul", "dot_general") and len(own) > 1
            divided = operation.name == "div" and operation.reads[1] in after
            others = {self.values.kinds[number] for number in operation.reads if number not in after}
            products |= operation.name in ("mul", "div", "dot_general") and not others <= by
            if operation.name not in LINEAR or products or divided:
                return False
            after |= set(operation.writes)
        return self.output in after

    def _is_key(self, operation: Any) -> bool:
        return self.keys in operation.reads

    def _rows_choose(self, operation: Any) -> bool:
        """Whether rows are gathered, by numbers that rows hold."""
        what, where = operation.reads[:2]
        both = self.values.scaled[what] and self.values.scaled[where]
        return bool(both and self.origins[where] & self.rowwise)

    def _holds(self, operation: Any, names: frozenset[str]) -> bool:
        inner = inner_jaxprs(operation.pair[0])
        return any(site.equation.primitive.name in names for jaxpr in inner for site in every_equation(jaxpr))

    def _line_of_pairs(self, operation: Any) -> str | None:
        """The line where rows met other rows."""

        def meet(number: int, maker: Any) -> bool:
            kinds = [self.values.kinds[read] for read in maker.reads]
            return Kind.PAIRS not in kinds and Kind.ROWS in kinds and bool(self.origins[number] & self.rowwise)

        return self._line_before(operation, Kind.PAIRS, meet)

    def _line_of_statistic(self, operation: Any) -> str | None:
        """The line where the rows were reduced: that of the operation, or of those before it that lost them."""

        def reduced(number: int, maker: Any) -> bool:
            return maker.line != "unknown" and any(self.values.kinds[read] is Kind.ROWS for read in maker.reads)

        return self._line_before(operation, Kind.SUM, reduced)

    def _line_before(self, operation: Any, kind: Kind, found: Callable[[int, Any], bool]) -> str | None:
        """The line of the nearest operation before another that made a value as is looked for, by way of values of a
        kind. found: (value, the operation that made it)."""
        seen, todo = set[int](), list(operation.reads)
        while todo:
            number = todo.pop(0)
            if number in seen or number not in self.follower.maker or self.values.kinds[number] is not kind:
                continue
            seen.add(number)
            maker = self.program.operations[self.follower.maker[number]]
            if found(number, maker):
                return str(maker.line)
            todo += maker.reads
        return None

    def _known_line_after(self, place: int) -> str:
        after = set(self.program.operations[place].writes)
        for operation in self.program.operations[place + 1 :]:
            if after & set(operation.reads):
                if operation.line != "unknown":
                    return str(operation.line)
                after |= set(operation.writes)
        return "unknown"
