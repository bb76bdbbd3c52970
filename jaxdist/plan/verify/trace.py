"""What is wrong with a loss by its program alone: nothing is computed."""

import re
from typing import Any

import jax
import numpy as np

from jaxdist.errors import UserError
from jaxdist.jaxpr.forbidden import LOCAL_SCOPE, refuse_collectives, refuse_in_forward
from jaxdist.jaxpr.randomness import drawn_with_stored_keys, moving
from jaxdist.jaxpr.source import installed, line_of_user
from jaxdist.jaxpr.walk import every_equation, inner_jaxprs, primitives
from jaxdist.plan.verify.findings import Fault
from jaxdist.plan.verify.program import ProgramsDiffer, pair_up
from jaxdist.plan.verify.subject import Subject, line_of

DEPENDS_ON_DATA = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
CALLBACKS = primitives("pure_callback io_callback")


def findings_of_trace(subject: Subject) -> tuple[list[Fault], bool]:
    """(what was found, whether the loss can be run: its program is one, and is the same for fewer rows)."""
    try:
        whole = subject.traced(subject.results)
    except DEPENDS_ON_DATA as error:
        return [Fault("data-dependent shape", (line_of(error),), first_line_of(error))], False
    except jax.errors.TracerArrayConversionError as error:
        return [Fault("numpy on a traced value", (line_of(error),), first_line_of(error))], False
    except NameError as error:
        if "axis name" not in str(error):
            raise
        return [Fault("collective", (line_of(error),), first_line_of(error))], False
    except UserError:
        raise
    except Exception as error:  # a user's code may fail in any way
        raise UserError(f"loss_fn: {type(error).__name__} at {line_of(error)}: {first_line_of(error)}") from error
    found = _of_randomness(subject, whole)
    for check in (refuse_in_forward, refuse_collectives):
        try:
            check(whole)
        except UserError as error:
            return [*found, Fault("refused", (), str(error))], False
    calls = [site.equation for site in every_equation(whole) if site.equation.primitive.name in CALLBACKS]
    found += [Fault("host callback", (line_of_user(each),)) for each in calls]
    if (line := _differs(subject, whole)) is not None:
        found.append(Fault("program differs at each trace", (line,)))
    local = [site.equation for site in every_equation(whole) if LOCAL_SCOPE in site.names]
    if local:
        found.append(Fault("batch statistics", (line_of_user(local[0]),), "batch_mean(..., sync=False) asks for it"))
    return found, not calls and line is None


def _of_randomness(subject: Subject, whole: Any) -> list[Fault]:
    count = len(jax.tree.leaves(subject.model_state))
    sizes = [len(jax.tree.leaves(tree)) for tree in subject.arguments]
    fresh = [move for size, move in zip(sizes, (False, True, True, False), strict=True) for move in [move] * size]
    try:
        lines = drawn_with_stored_keys(whole, moving(whole, fresh, count))
    except UserError as error:
        return [Fault("randomness without keys", (), str(error))]
    return [Fault("randomness without keys", tuple(dict.fromkeys(lines)))] if lines else []


def _differs(subject: Subject, whole: Any) -> str | None:
    """The line where two traces differ; None where they do not."""
    if _calls_of_users(whole):
        jax.clear_caches()  # or a function under the user's own jax.jit would be traced once only
    try:
        again = subject.traced(subject.results)
    except Exception as error:  # the first call left something behind, such as a traced array
        return line_of(error)
    try:
        program = pair_up(whole, again)
    except ProgramsDiffer as error:
        return str(error)
    for number, (a, b) in program.given.items():
        if not np.array_equal(_data(a), _data(b), equal_nan=_is_float(a)):
            return next((each.line for each in program.operations if number in each.reads), "unknown")
    for operation in program.operations:
        if len({re.sub("0x[0-9a-f]+", "", str(each)) for each in _params(operation.pair)}) > 1:
            return operation.line
    return None


def _params(pair: Any) -> list[Any]:
    return [[value for name, value in each.params.items() if "thunk" not in name] for each in pair]


def _data(x: Any) -> Any:
    return jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)


def _is_float(x: Any) -> bool:
    return bool(jax.numpy.issubdtype(x.dtype, jax.numpy.inexact))


def _calls_of_users(jaxpr: Any) -> bool:
    """Whether a user's own function is called under `jax.jit`."""
    return any(
        each.primitive.name == "jit" and not installed(inner_jaxprs(each)[0])
        for each in (site.equation for site in every_equation(jaxpr))
    )


def of_fewer_rows(subject: Subject, rows: Any, whole: Any, trace: Any) -> tuple[Any, list[Fault]]:
    """(the jaxpr of the loss with some of the rows, or None; why it has none)."""
    try:
        return trace(subject.part(rows)), []
    except UserError:
        raise
    except Exception as error:  # of the user's code, which ran with all rows
        line = line_of(error)
        told = f"with {len(rows)} of {subject.rows} rows: {first_line_of(error)}"
        closed = holds_constant(whole, line, subject.rows)
        return None, [Fault("closed-over rows" if closed else "fixed number of rows", (line,), told)]


def holds_constant(whole: Any, line: str, rows: int) -> bool:
    """Whether a line reads an array of as many rows that is no argument."""
    program = pair_up(whole, whole)
    return any(
        rows in np.shape(program.given[number][0])
        for operation in program.operations
        if operation.line == line
        for number in operation.reads
        if number in program.constants
    )


def first_line_of(error: BaseException) -> str:
    """The first line of an exception's text."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
