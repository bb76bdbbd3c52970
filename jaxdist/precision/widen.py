"""A loss in float64 with what it computes of constants and integers alone, such as frozen parameters, in float64 too.

Parameters and batch can be given in float64. An array that a function closes over stays as it is, and where it meets
only integers and others of its kind, as the table of a frozen model does, so does what is computed of it.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.jaxpr.evaluate import CALLS, apply, where_written
from jaxdist.jaxpr.source import installed
from jaxdist.jaxpr.walk import every_equation, inner_jaxprs, interpret, is_jaxpr, primitives
from jaxdist.precision.autocast import FP32, HALF, IN_PLACE, LOOPS, WIDEST, with_inner

# Operations that work in the type of their operands, or in one that a parameter names.
RETYPED = HALF | FP32 | WIDEST | primitives("iota sort top_k psum psum_invariant fft real imag complex")
DTYPES = ("new_dtype", "dtype", "preferred_element_type")


class _Value(NamedTuple):
    """A value of the program.

    fixed: whether no gradient flows into it: it is computed of constants and integers. A narrow float of these is in
        float64
    exact: the same in the type that it was traced with, where nothing is rounded by that; else None
    """

    value: Any
    fixed: bool
    exact: Any = None


def widen_fixed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with what it computes of constants and integers alone in float64, within `jax.enable_x64`.

    It can be differentiated: no gradient flows into what is widened. What floating arguments reach stays as it was
    traced if it is a loop, a `jax.checkpoint`, or a function with a rule of its own.
    """

    @functools.wraps(function)
    def wide(*arguments: Any) -> Any:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        values = [_value(x, fixed=False) for x in jax.tree.leaves(arguments)]
        results = _run(traced, values, installed_around=False)
        return jax.tree.unflatten(jax.tree.structure(shapes), [each.value for each in results])

    return wide


def _run(jaxpr: Any, values: Sequence[_Value], *, installed_around: bool) -> list[_Value]:
    """installed_around: whether it is a function of a package, whose equations have the lines of another call."""

    def rule(equation: Any, operands: list[_Value]) -> list[_Value]:
        fixed = all(each.fixed for each in operands)
        name, inner = equation.primitive.name, inner_jaxprs(equation)
        around = nullcontext() if installed_around else where_written(equation)
        with around, equation.ctx.manager:
            if _has_narrow(equation):
                wide = [each.value for each in operands]
                if len(inner) == 1 and name in (CALLS if fixed else IN_PLACE):
                    called = next(filter(is_jaxpr, equation.params.values()), inner[0])  # with its constants
                    return _run(called, operands, installed_around=installed_around or installed(called))
                if name in RETYPED and (fixed or _takes_wide(equation, operands)) and not _is_settled(equation):
                    wider = {key: _wide(equation.params[key]) for key in DTYPES if equation.params.get(key) is not None}
                    changed = equation.replace(params=equation.params | wider)
                    return [_value(x, fixed=fixed) for x in apply(changed, wide)]
                if name in LOOPS and fixed:
                    body = functools.partial(_wide_jaxpr, installed_around=installed_around)
                    return [_value(x, fixed=True) for x in apply(with_inner(equation, body), wide)]
            return [_value(x, fixed=fixed) for x in apply(equation, _as_traced(equation, operands))]

    constants = [_value(x, fixed=not isinstance(x, jax.core.Tracer)) for x in getattr(jaxpr, "consts", ())]
    return interpret(jaxpr, constants, values, rule, _literal)


def _wide_jaxpr(jaxpr: Any, *, installed_around: bool) -> Any:
    """The jaxpr of a loop or a branch that takes and gives wide values alone."""

    def wide(*values: Any) -> list[Any]:
        found = _run(jaxpr, [_Value(x, True) for x in values], installed_around=installed_around)
        return [each.value for each in found]

    types: list[Any] = list(jaxpr.in_avals)
    return jax.make_jaxpr(wide)(*(each.update(dtype=_wide(each.dtype)) for each in types))


def _value(x: Any, *, fixed: bool) -> _Value:
    """A result or a constant. Integers have no gradient, whatever they are computed of."""
    fixed = fixed or not _is_inexact(x)
    if not fixed or not _is_narrow(x):
        return _Value(x, fixed)
    wide = _wide(x.dtype)
    traced = isinstance(x, jax.core.Tracer)
    return _Value(lax.convert_element_type(x, wide) if traced else np.asarray(x).astype(wide), True, x)


def _literal(literal: Any) -> _Value:
    narrow = _is_narrow(literal.aval)
    return _value(np.asarray(literal.val, literal.aval.dtype), fixed=True) if narrow else _Value(literal.val, True)


def _takes_wide(equation: Any, operands: Sequence[_Value]) -> bool:
    """Whether an equation has no narrow float but what was widened: a product of two types."""
    return not any(map(_is_narrow, (*(each.value for each in operands), *(atom.aval for atom in equation.outvars))))


def _is_settled(equation: Any) -> bool:
    """Whether a product is to be computed by an algorithm, which is one for a type."""
    return isinstance(equation.params.get("precision"), lax.DotAlgorithm | lax.DotAlgorithmPreset)


def _as_traced(equation: Any, operands: Sequence[_Value]) -> list[Any]:
    """The operands in the types that the equation was traced with."""
    found = []
    for atom, each in zip(equation.invars, operands, strict=True):
        if not _is_narrow(atom.aval) or each.value.dtype == atom.aval.dtype:
            found.append(each.value)
        else:
            found.append(
                each.exact if each.exact is not None else lax.convert_element_type(each.value, atom.aval.dtype)
            )
    return found


def _has_narrow(equation: Any) -> bool:
    """Whether an equation, or one inside it, has a narrow float."""
    inside = (site.equation for jaxpr in inner_jaxprs(equation) for site in every_equation(jaxpr))
    return any(_is_narrow(atom.aval) for each in (equation, *inside) for atom in (*each.invars, *each.outvars))


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def _is_narrow(x: Any) -> bool:
    """Whether an array, or the type of one, has floats that are narrower than float64."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact)) and _wide(dtype) != dtype


def _wide(dtype: Any) -> Any:
    """The widest type of the kind of a dtype: floats and complex numbers; others are kept."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float64)
    return np.dtype(np.complex128) if jnp.issubdtype(dtype, jnp.complexfloating) else dtype
