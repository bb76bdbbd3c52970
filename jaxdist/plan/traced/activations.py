"""What the forward pass leaves for the backward pass: activations, read from the traced step.

Whatever strategy, schedule and remat mode a step is made of, it is one jaxpr, with a forward pass, a backward pass, and
arrays that the first makes and the second reads. Those a device holds from one to the other, for one microbatch at a
time. What a block needs beside them while it runs (workspace, and with remat what is recomputed) is not among them:
only a compiler knows that. Not for pipelines, where both passes, of several microbatches, stand in one loop.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxdist.jaxpr.walk import inner_jaxprs, interpret, names_at, opened, scan_of
from jaxdist.plan.traced.origin import phase_of, scope_of, source_of
from jaxdist.specs import STACKED, PyTree, is_model
from jaxdist.state import TrainState
from jaxdist.train_step import TrainStep

ACTIVATIONS, COPIES, CONSTANTS = SAVED_KINDS = ("activations", "copies of parameters", "constants")
ON_HOST = "activations on the host"  # offloaded; not in the device's memory
# Primitives that hand on what they are given: no array of its own in the compiled program.
PASSING = ("name", "device_put", "stop_gradient", "pvary", "pcast", "reduce_precision", "optimization_barrier")


class SavedArray(NamedTuple):
    """An array that stays from the forward to the backward pass.

    kind: one of `SAVED_KINDS`, or `ON_HOST`. Activations come from the batch (or the step: dropout masks), copies of
    parameters from nothing but parameters (cast, gathered, or stacked once more by the loop over blocks), constants
    from neither (causal masks, tables). what: the layer that makes it, the parameter, or "input of a block"; "carry of
    a loop" of other loops. shape: on one device; [blocks, ...] where all blocks keep one. source: the line that makes
    it.
    """

    kind: str
    what: str
    shape: tuple[int, ...]
    dtype: str
    bytes_per_device: int
    source: str


class _Value(NamedTuple):
    """Where a value of a jaxpr comes from. array: the same object for values that are one array; None for a number.
    equation: that makes it, under the names in `stack`. carried: it is the carry of a loop."""

    array: object = None
    batch: bool = False
    parameters: bool = False
    equation: Any = None
    stack: str = ""
    carried: bool = False


def saved_activations(step: TrainStep, state: TrainState, batch: PyTree) -> list[SavedArray]:
    """What one microbatch of `step(state, batch)` keeps on one device, the largest first. Arguments as for `ledger`."""
    jaxpr = step.jitted(state).trace(state, batch).jaxpr
    marks = (
        TrainState(
            step=_Value(object(), batch=True),
            params=jax.tree.map(lambda _: _Value(object(), parameters=True), state.params),
            opt_state=jax.tree.map(lambda _: _Value(object()), state.opt_state),
            residual=jax.tree.map(lambda _: _Value(object()), state.residual),
            guard=jax.tree.map(lambda _: _Value(object()), state.guard),
        ),
        jax.tree.map(lambda _: _Value(object(), batch=True), batch),
    )
    carries = ("input of a block", STACKED) if is_model(state.params) else ("carry of a loop", "carry of a loop")
    reader = _Reader(*carries)
    reader.values(jaxpr, jax.tree.leaves(marks, is_leaf=lambda node: isinstance(node, _Value)), "")
    # Microbatches that a schedule runs in several places keep the same; a part of one keeps less.
    found = max(reader.found.values(), key=lambda kept: sum(each.bytes_per_device for each in kept), default=[])
    return sorted(found, key=lambda each: -each.bytes_per_device)


class _Reader:
    """Follows values through jaxprs. carry, copies: what is called that the outermost loop carries, and of that what
    comes from parameters alone. found: what is kept, by the jaxpr that holds both passes."""

    def __init__(self, carry: str, copies: str) -> None:
        self.carry, self.copies, self.found = carry, copies, dict[int, list[SavedArray]]()

    def values(self, jaxpr: Any, inputs: Sequence[_Value], stack: str) -> list[_Value]:
        """Where the outputs of a jaxpr come from, given where its inputs do."""
        plain = opened(jaxpr)
        constants = [_Value(variable) for variable in plain.constvars]
        seen = {id(value.array) for value in (*inputs, *constants) if value.array is not None}
        outside: frozenset[int] | None = None  # arrays that were there before the forward pass
        made: frozenset[int] | None = None  # arrays that the forward pass has made, once it is over
        kept: dict[int, SavedArray] = {}

        def rule(equation: Any, given: list[_Value]) -> list[_Value]:
            nonlocal outside, made
            here = names_at(stack, equation)
            phase = phase_of(here)
            if outside is None and phase == "forward":
                outside = frozenset(seen)
            if phase in ("backward", "recompute") and outside is not None:
                made = frozenset(seen - outside) if made is None else made
                for value, atom in zip(given, equation.invars, strict=True):
                    if id(value.array) in made:
                        kept[id(value.array)] = self.kept(value, atom.aval)
            results = self.made(equation, given, here)
            seen.update(id(value.array) for value in results if value.array is not None)
            return results

        results = interpret(plain, constants, inputs, rule, lambda _: _Value())
        if kept:
            self.found[id(plain)] = list(kept.values())
        return results

    def kept(self, value: _Value, aval: Any) -> SavedArray:
        kind, scope = ACTIVATIONS if value.batch else COPIES if value.parameters else CONSTANTS, scope_of(value.stack)
        kind = ON_HOST if aval.memory_space == jax.memory.Space.Host else kind
        what = scope or "the loss"
        if value.carried:
            what = f"carry of a loop in {scope}" if scope else self.copies if kind == COPIES else self.carry
        source = source_of(value.equation) if value.equation else "unknown"
        return SavedArray(
            kind, what, tuple(aval.shape), str(aval.dtype), math.prod(aval.shape) * aval.dtype.itemsize, source
        )

    def made(self, equation: Any, given: list[_Value], stack: str) -> list[_Value]:
        """The values that an equation makes of those that it is given."""
        name = equation.primitive.name
        if name in PASSING and len(given) == len(equation.outvars):
            return [
                value if value.carried or scope_of(value.stack) else value._replace(equation=equation, stack=stack)
                for value in given
            ]
        inner = [opened(each) for each in inner_jaxprs(equation)]
        if name == "scan":
            return self.looped(equation, given, stack)
        if len(inner) == 1 and (len(inner[0].invars), len(inner[0].outvars)) == (len(given), len(equation.outvars)):
            return _called(equation, given, self.values(inner[0], given, stack))
        if all(value.array is None for value in given) and all(x.aval.ndim == 0 for x in equation.outvars):
            return [_Value() for _ in equation.outvars]  # a number from numbers is no array that is kept
        batch, parameters = any(value.batch for value in given), any(value.parameters for value in given)
        return [_Value(variable, batch, parameters, equation, stack) for variable in equation.outvars]

    def looped(self, equation: Any, given: list[_Value], stack: str) -> list[_Value]:
        """The values of a scan's results: arrays of its own, also where its body only hands something on."""
        scan = scan_of(equation)
        constants, before, rows = scan.split(given)
        carry = [_Value(object(), value.batch, value.parameters, equation, stack, True) for value in before]
        while True:
            made = self.values(scan.body, [*constants, *carry, *rows], stack)
            # A carry comes from all that goes into it in any round.
            merged = [
                before._replace(batch=before.batch or after.batch, parameters=before.parameters or after.parameters)
                for before, after in zip(carry, made[: scan.carried], strict=True)
            ]
            if merged == carry:
                return [value._replace(array=variable) for value, variable in zip(made, equation.outvars, strict=True)]
            carry = merged


def _called(equation: Any, given: list[_Value], values: list[_Value]) -> list[_Value]:
    """What a call returns. What it does not hand on is this call's own, array and line: several calls of a function may
    share a jaxpr, which knows the line of the first only."""
    passed = {id(value.array) for value in given} | {id(None)}
    own: dict[int, Any] = {}
    for value, variable in zip(values, equation.outvars, strict=True):
        own.setdefault(id(value.array), variable)
    return [
        value if id(value.array) in passed else value._replace(array=own[id(value.array)], equation=equation)
        for value in values
    ]
