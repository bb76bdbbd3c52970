"""Parts of a program that differ in numbers alone, computed as one: how the blocks of a model are drawn.

The blocks of a model are made one after the other, each with keys from the same stream. As one program that is as many
times what a block takes: for 24 blocks XLA compiled for some 40 s on a machine with an H200. The blocks' programs are
the same operations on other counts of the stream. So one of them runs, by `jax.vmap`, on all counts at once, and gives
the same numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.jaxpr.evaluate import apply
from jaxdist.jaxpr.walk import every_equation, interpret
from jaxdist.specs import PyTree

_THREEFRY = str(jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype)


class _Value:
    """A value of the program. Equal only to itself, and a leaf of trees."""


@dataclass(frozen=True, eq=False)
class _Result(_Value):
    """The result `index` of an equation on these operands."""

    equation: Any
    index: int
    operands: tuple[_Value, ...]


@dataclass(frozen=True, eq=False)
class _Array(_Value):
    """What is there before the program runs: a tracer, an array, or a number that it computes from constants alone."""

    array: Any

    @property
    def is_number(self) -> bool:
        return isinstance(self.array, np.ndarray) and not self.array.shape


@dataclass(frozen=True, eq=False)
class _Numbers(_Value):
    """The place of a number that each part has another of."""

    index: int


class _DifferentError(Exception):
    """Parts are not the same operations."""


def stacked(function: Callable[..., tuple[Sequence[PyTree], PyTree]], *args: Any) -> tuple[PyTree, PyTree]:
    """(parts, others) that function(*args) returns, with the parts, trees of equal structure, stacked leaf by leaf.

    The function runs as it is where one program for all might give something else: where it has effects, or draws by
    keys that are not threefry's, of which `jax.vmap` may draw other numbers; and where it is too deep to follow.
    """
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    try:
        if not _has_one_meaning(jaxpr):
            return _one_by_one(*function(*args))
        return _together(jaxpr, shapes, args)
    except RecursionError:  # hundreds of operations in a row
        return _one_by_one(*function(*args))


def _one_by_one(parts: Sequence[PyTree], others: PyTree) -> tuple[PyTree, PyTree]:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts), others


def _has_one_meaning(jaxpr: Any) -> bool:
    """Whether a program gives the same for many operands at once."""
    equations = [site.equation for site in every_equation(jaxpr.jaxpr)]
    dtypes = [atom.aval.dtype for each in equations for atom in each.invars if hasattr(atom.aval, "dtype")]
    keys = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jax.dtypes.prng_key)]
    drawn = any(each.primitive.name == "rng_bit_generator" for each in equations)
    return not jaxpr.effects and not drawn and all(str(dtype) == _THREEFRY for dtype in keys)


def _together(jaxpr: Any, shapes: Any, args: Sequence[Any]) -> tuple[PyTree, PyTree]:
    results = _results(jaxpr, [_Array(leaf) for leaf in jax.tree.leaves(args)])
    parts, others = jax.tree.unflatten(jax.tree.structure(shapes), results)
    done: dict[int, Any] = {}
    leaves = zip(*map(jax.tree.leaves, parts), strict=True)
    columns = [_stack(column, done) for column in leaves]
    return (
        jax.tree.unflatten(jax.tree.structure(parts[0]), columns),
        jax.tree.map(lambda each: _run(each, [], done), others),
    )


def _results(jaxpr: Any, args: Sequence[_Value]) -> list[_Value]:
    """The results of a program, of which only numbers are computed yet."""

    def rule(equation: Any, given: list[_Value]) -> list[_Value]:
        operands = tuple(given)  # one object for all results, which `_run` knows them by
        numbers = [each.array for each in operands if isinstance(each, _Array) and each.is_number]
        if operands and len(numbers) == len(operands) and all(_is_small(out.aval) for out in equation.outvars):
            with jax.ensure_compile_time_eval():
                return [_Array(np.asarray(each)) for each in apply(equation, numbers)]
        return [_Result(equation, i, operands) for i in range(len(equation.outvars))]

    constants = [_Array(each) for each in jaxpr.consts]
    return interpret(jaxpr, constants, args, rule, lambda literal: _Array(np.asarray(literal.val)))


def _is_small(aval: Any) -> bool:
    return not aval.shape and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def _stack(column: Sequence[_Value], done: dict[int, Any]) -> jax.Array:
    """The stack of one leaf of all parts."""
    numbers: list[np.ndarray] = []
    try:
        one = _aligned(column, numbers, {})
    except _DifferentError:
        return jnp.stack([_run(each, [], done) for each in column])
    if not numbers:
        value = _run(one, [], done)
        return jnp.broadcast_to(value, (len(column), *value.shape))
    return jax.vmap(lambda own: _run(one, own, {}))([jnp.asarray(each) for each in numbers])


def _aligned(column: Sequence[_Value], numbers: list[np.ndarray], done: dict[Any, _Value]) -> _Value:
    """The value that stands for all, with places for the numbers in which they differ. Raises `_DifferentError`."""
    first, key = column[0], tuple(column)
    if all(each is first for each in column):
        return first
    if key not in done:
        own = [each.array for each in column if isinstance(each, _Array) and each.is_number]
        results = [each for each in column if isinstance(each, _Result)]
        if len(own) == len(column) and len({each.dtype for each in own}) == 1:
            done[key] = first
            if len({each.tobytes() for each in own}) > 1:  # so that -0.0 is not 0.0
                numbers.append(np.stack(own))
                done[key] = _Numbers(len(numbers) - 1)
        elif len(results) == len(column) and all(_same_operation(results[0], each) for each in results):
            operands = zip(*(each.operands for each in results), strict=True)
            aligned = tuple(_aligned(each, numbers, done) for each in operands)
            done[key] = replace(results[0], operands=aligned)
        else:
            raise _DifferentError
    return done[key]


def _same_operation(one: _Result, other: _Result) -> bool:
    a, b = one.equation, other.equation
    same = a.primitive is b.primitive and one.index == other.index and len(one.operands) == len(other.operands)
    return (
        same and a.params.keys() == b.params.keys() and all(_same(a.params[name], b.params[name]) for name in a.params)
    )


def _same(one: Any, other: Any) -> bool:
    """Whether two parameters of an equation are the same. Functions, programs and arrays are so if they are one
    object."""
    if one is other:
        return True
    if any(isinstance(leaf, np.ndarray | jax.Array) for leaf in jax.tree.leaves((one, other))):
        return False
    return type(one) is type(other) and bool(one == other)


def _run(value: _Value, numbers: Sequence[jax.Array], done: dict[int, Any]) -> Any:
    """The array of a value. done: the results of equations, by the identity of the operands, which it keeps alive."""
    if isinstance(value, _Numbers):
        return numbers[value.index]
    if isinstance(value, _Array):
        return value.array
    assert isinstance(value, _Result)
    key = id(value.operands) if value.operands else id(value.equation)
    if key not in done:
        operands = [_run(each, numbers, done) for each in value.operands]
        done[key] = value, apply(value.equation, operands)
    return done[key][1][value.index]
