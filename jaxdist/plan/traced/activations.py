"""Saved activations: the arrays that the forward pass makes and the backward pass reads, found in the traced step.

A step is one jaxpr, whatever its strategy, schedule and remat mode. A device holds these arrays from the forward pass
to the backward pass, for one microbatch at a time. A block needs more memory while it runs: workspace, and with remat
what it computes again (see `jaxdist.plan.traced.liveness`). In a pipeline, forward and backward passes of several
microbatches alternate: a stage holds what its loop over ticks carries, in as many slots as its table needs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxdist.jaxpr.source import source_of
from jaxdist.jaxpr.walk import inner_jaxprs, interpret, names_at, nbytes_of, opened, primitives, scan_of
from jaxdist.parallel.pipeline.relay import CROSSING, KEPT, LATE, RECEIVED
from jaxdist.plan.traced.origin import phase_of, scope_of
from jaxdist.plan.traced.program import traced_program
from jaxdist.specs import STACKED, PyTree, is_model
from jaxdist.state import TrainState
from jaxdist.train_step import TrainStep

ACTIVATIONS, COPIES, CONSTANTS = SAVED_KINDS = ("activations", "copies of parameters", "constants")
ON_HOST = "activations on the host"  # offloaded; not in the device's memory
BETWEEN_STAGES = "buffers between stages"
# What a stage of a pipeline carries from tick to tick, by its scope: (kind, what).
CARRIED = {
    KEPT: (ACTIVATIONS, "residuals of blocks, in slots"),
    CROSSING: (ACTIVATIONS, "from B to W, in slots"),
    LATE: (ACTIVATIONS, "gradient of the head's input"),
    RECEIVED: (BETWEEN_STAGES, "received from a neighbouring stage"),
}
# Primitives whose result is their operand: the compiled program has no second array for it.
PASSING = primitives(
    "name device_put stop_gradient pvary pcast reduce_precision optimization_barrier layout_constraint"
)


class SavedArray(NamedTuple):
    """An array that a device holds from the forward to the backward pass.

    kind: one of `SAVED_KINDS`, `ON_HOST` or `BETWEEN_STAGES`
        - activations are computed from the batch, or from the number of the step (dropout masks)
        - copies of parameters are computed from parameters alone: cast, gathered, or stacked by the loop over blocks
        - constants are computed from neither: causal masks, tables
    what: the layer that makes it, the parameter, "input of a block", or "carry of a loop"
    shape: on one device; [blocks, ...] where all blocks keep one, [slots, ...] of a pipeline
    source: the line that makes it
    """

    kind: str
    what: str
    shape: tuple[int, ...]
    dtype: str
    bytes_per_device: int
    source: str


class _Value(NamedTuple):
    """The origin of a value of a jaxpr.

    array: an object that stands for the array: the same for all values that are one array; None for a number
    batch, parameters: whether it is computed from the batch, from parameters
    equation, stack: the equation that makes it, and the named scopes around that
    carried: whether it is the carry of a loop
    """

    array: object = None
    batch: bool = False
    parameters: bool = False
    equation: Any = None
    stack: str = ""
    carried: bool = False


def saved_activations(step: TrainStep, state: TrainState, batch: PyTree) -> list[SavedArray]:
    """The arrays that one microbatch of `step(state, batch)` saves on one device, the largest first.

    In a pipeline: of all microbatches that a stage has begun, and its buffers. The arguments are those of `ledger`.
    """
    jaxpr = traced_program(step, state, batch)
    marks = (
        jax.tree.map(lambda _: _Value(object()), state)._replace(
            step=_Value(object(), batch=True),
            params=jax.tree.map(lambda _: _Value(object(), parameters=True), state.params),
        ),
        jax.tree.map(lambda _: _Value(object(), batch=True), batch),
    )
    carries = ("input of a block", STACKED) if is_model(state.params) else ("carry of a loop", "carry of a loop")
    reader = _Reader(*carries)
    reader.read(jaxpr, jax.tree.leaves(marks, is_leaf=lambda node: isinstance(node, _Value)), "")
    # A schedule may run microbatches in several places of the program. All save the same; a part of one saves less.
    found = max(reader.found.values(), key=lambda kept: sum(each.bytes_per_device for each in kept), default=[])
    found = list(reader.slots.values()) or found
    return sorted(found, key=lambda each: -each.bytes_per_device)


class _Reader:
    """A walk that follows values through jaxprs.

    carry, copies: names for the carry of the outermost loop, and for that part of it which is computed from parameters
    found: the saved arrays, by the jaxpr in which both passes are
    slots: what a pipeline carries from tick to tick, by the variable
    """

    def __init__(self, carry: str, copies: str) -> None:
        self.carry, self.copies, self.found = carry, copies, dict[int, list[SavedArray]]()
        self.slots = dict[Any, SavedArray]()

    def read(self, jaxpr: Any, inputs: Sequence[_Value], stack: str) -> list[_Value]:
        """The origins of a jaxpr's results, from those of its arguments."""
        plain = opened(jaxpr)
        constants = [_Value(variable) for variable in plain.constvars]
        seen = {id(value.array) for value in (*inputs, *constants) if value.array is not None}
        before: frozenset[int] | None = None  # arrays that were there before the forward pass
        made: frozenset[int] | None = None  # arrays that the forward pass has made, once it is over
        kept: dict[int, SavedArray] = {}

        def rule(equation: Any, given: list[_Value]) -> list[_Value]:
            nonlocal before, made
            here = names_at(stack, equation)
            phase = phase_of(here)
            if before is None and phase == "forward":
                before = frozenset(seen)
            if phase in ("backward", "recompute") and before is not None:
                made = frozenset(seen - before) if made is None else made
                for value, atom in zip(given, equation.invars, strict=True):
                    if id(value.array) in made:
                        kept[id(value.array)] = self.saved(value, atom.aval)
            results = self.equation(equation, given, here)
            seen.update(id(value.array) for value in results if value.array is not None)
            return results

        results = interpret(plain, constants, inputs, rule, lambda _: _Value())
        if kept:
            self.found[id(plain)] = list(kept.values())
        return results

    def saved(self, value: _Value, aval: Any) -> SavedArray:
        """The entry of an array that the backward pass reads. aval: its type where that reads it."""
        kind = ACTIVATIONS if value.batch else COPIES if value.parameters else CONSTANTS
        if aval.memory_space == jax.memory.Space.Host:
            kind = ON_HOST
        scope = scope_of(value.stack)
        what = scope or "the loss"
        if value.carried and scope:
            what = f"carry of a loop in {scope}"
        elif value.carried:
            what = self.copies if kind == COPIES else self.carry
        source = source_of(value.equation) if value.equation else "unknown"
        return SavedArray(kind, what, tuple(aval.shape), str(aval.dtype), nbytes_of(aval), source)

    def equation(self, equation: Any, given: list[_Value], stack: str) -> list[_Value]:
        """The origins of an equation's results."""
        name = equation.primitive.name
        if name in PASSING and len(given) == len(equation.outvars):
            return [
                value if value.carried or scope_of(value.stack) else value._replace(equation=equation, stack=stack)
                for value in given
            ]
        inner = [opened(each) for each in inner_jaxprs(equation)]
        if name == "scan":
            return self.scan(equation, given, stack)
        if len(inner) == 1 and (len(inner[0].invars), len(inner[0].outvars)) == (len(given), len(equation.outvars)):
            return _called(equation, given, self.read(inner[0], given, stack))
        if all(value.array is None for value in given) and all(x.aval.ndim == 0 for x in equation.outvars):
            return [_Value() for _ in equation.outvars]  # a number from numbers is no array that is kept
        batch, parameters = any(value.batch for value in given), any(value.parameters for value in given)
        return [_Value(variable, batch, parameters, equation, stack) for variable in equation.outvars]

    def scan(self, equation: Any, given: list[_Value], stack: str) -> list[_Value]:
        """The origins of a scan's results: arrays of its own, also where its body only hands something on."""
        scan = scan_of(equation)
        constants, before, rows = scan.split(given)
        for value, variable in zip(before, equation.outvars, strict=False):
            if (scope := scope_of(value.stack)) in CARRIED:
                kind, what = CARRIED[scope]
                self.slots[variable] = self.saved(value, variable.aval)._replace(kind=kind, what=what)
        carry = [_Value(object(), value.batch, value.parameters, equation, stack, True) for value in before]
        while True:
            made = self.read(scan.body, [*constants, *carry, *rows], stack)
            # A carry comes from all that goes into it in any round.
            merged = [
                before._replace(batch=before.batch or after.batch, parameters=before.parameters or after.parameters)
                for before, after in zip(carry, made[: scan.carried], strict=True)
            ]
            if merged == carry:
                return [value._replace(array=variable) for value, variable in zip(made, equation.outvars, strict=True)]
            carry = merged


def _called(equation: Any, given: list[_Value], values: list[_Value]) -> list[_Value]:
    """The origins of a call's results. Arrays that the call makes get the line of the call.

    Several calls of a function may share one jaxpr, whose equations have the line of the first call only.
    """
    passed = {id(value.array) for value in given} | {id(None)}
    own: dict[int, Any] = {}
    for value, variable in zip(values, equation.outvars, strict=True):
        own.setdefault(id(value.array), variable)
    return [
        value if id(value.array) in passed else value._replace(array=own[id(value.array)], equation=equation)
        for value in values
    ]
