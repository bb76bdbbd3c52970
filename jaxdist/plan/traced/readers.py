"""The first reader of each parameter: the line of a layer, or of a user's loss, that computes with it.

A strategy gathers all parameters in one line of code, so that this line says nothing about a single gather. What does
is the line that the gathered value is for. It is found in the jaxpr: values made under a parameter's named scope are
followed through casts, layout changes, barriers, loops and calls to the first equation that a layer has written.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxdist.jaxpr.evaluate import CALLS
from jaxdist.jaxpr.source import PACKAGE, SENDING, source_of
from jaxdist.jaxpr.walk import inner_jaxprs, interpret, names_at, opened, primitives, scan_of
from jaxdist.plan.traced.origin import phase_of, scope_of

# A product's own code, and whatever evaluates a jaxpr, work for the layer that calls them.
_HELPERS = (*SENDING, "nn/matmul/", "jaxpr/", "precision/")
_LAYERS = tuple(f"{PACKAGE.name}/{folder}/" for folder in ("nn", "models"))
# Primitives whose result is still the parameter: cast, moved, or cut out of it.
_MOVES = primitives(
    """
    convert_element_type reduce_precision reshape transpose squeeze expand_dims broadcast_in_dim rev copy copy_p slice
    dynamic_slice dynamic_update_slice concatenate pad split device_put optimization_barrier name stop_gradient pvary
    pcast layout_constraint all_gather all_gather_invariant all_to_all ppermute
    """
)


def first_readers(jaxpr: Any, parameters: set[str]) -> dict[str, str]:
    """{parameter: source line of its first reader}, without those for which none is found.

    parameters: names as in the named scopes of the program, "blocks.mlp.up.kernel"
    """
    search = _Search(parameters)
    search.read(jaxpr, [None] * len(opened(jaxpr).invars), "")
    return search.lines


class _Call(NamedTuple):
    """A call that a layer makes, by its source line.

    of_library: whether the function is jax's own, such as `jnp.einsum`. All calls of such a function may share one
        jaxpr, whose equations have the line of the first call, if any.
    """

    line: str
    of_library: bool


def _of_library(jaxpr: Any) -> bool:
    return "site-packages" in (opened(jaxpr).debug_info.func_filename or "")


class _Search:
    """A walk in which each value is the name of the parameter that it holds, or None.

    lines: the source line of the first reader of each parameter, as far as found
    call: the call of a layer whose function is being read
    """

    def __init__(self, parameters: set[str]) -> None:
        self.parameters, self.lines = parameters, dict[str, str]()
        self.call: _Call | None = None

    def read(self, jaxpr: Any, values: Sequence[str | None], names: str) -> list[str | None]:
        """Values of a jaxpr's arguments -> values of its results."""
        return interpret(
            jaxpr,
            [None] * len(opened(jaxpr).constvars),
            values,
            lambda equation, given: self.equation(equation, given, names_at(names, equation)),
            lambda _: None,
        )

    def equation(self, equation: Any, given: list[str | None], names: str) -> list[str | None]:
        """The values of an equation's results."""
        scope, inner, count = scope_of(names), inner_jaxprs(equation), len(equation.outvars)
        if scope in self.parameters and phase_of(names) != "backward":  # backward the scope has its gradient
            return [scope] * count
        held = next((name for name in given if name is not None), None)
        if held is None and not inner:
            return [None] * count
        line, call = source_of(equation, _HELPERS), self.call
        if call and (call.of_library or line == "unknown"):
            line = call.line
        in_layer = line.startswith(_LAYERS) or not line.startswith((f"{PACKAGE.name}/", "unknown"))
        if inner:
            if in_layer and equation.primitive.name in CALLS:
                self.call = _Call(line, _of_library(inner[0]))
            results = self.inside(equation, inner, given, names)
            self.call = call
            return results
        if equation.primitive.name in _MOVES or not in_layer or held is None:
            return [held] * count
        self.lines.setdefault(held, line)
        return [None] * count

    def inside(self, equation: Any, inner: list[Any], given: list[str | None], names: str) -> list[str | None]:
        """The values of the results of a loop, a condition or a call."""
        if equation.primitive.name == "scan":
            return self.scan(equation, given, names)
        results: list[str | None] = [None] * len(equation.outvars)
        arguments = given[1:] if equation.primitive.name == "cond" else given
        for each in inner:
            if len(opened(each).invars) == len(arguments):
                found = self.read(each, arguments, names)
                if len(found) == len(results):
                    results = [old or new for old, new in zip(results, found, strict=True)]
        return results

    def scan(self, equation: Any, given: list[str | None], names: str) -> list[str | None]:
        """The values of a scan's results; what a round hands on is read by the next."""
        scan = scan_of(equation)
        constants, carry, rows = scan.split(given)
        while True:
            found = self.read(scan.body, [*constants, *carry, *rows], names)
            merged = [old or new for old, new in zip(carry, found, strict=False)]
            if merged == carry:
                return found
            carry = merged
