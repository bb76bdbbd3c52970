"""Counts of primitives in a jaxpr: what a program communicates, before any compiler has seen it."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxdist.jaxpr import walk


def primitive_counts(jaxpr: Any) -> Counter[str]:
    """How often each primitive runs, scans multiplied out."""
    counts: Counter[str] = Counter()
    for site in walk.every_equation(jaxpr):
        counts[site.equation.primitive.name] += site.times
    return counts


def collectives(jaxpr: Any, axis: str) -> Counter[tuple[str, str]]:
    """How often each (primitive, dtype) runs over mesh axis `axis`."""
    counts: Counter[tuple[str, str]] = Counter()
    for equation, _, times, _ in walk.every_equation(jaxpr):
        axes = equation.params.get("axes", equation.params.get("axis_name", ()))
        moves_data = equation.invars and equation.primitive.name != "pvary"  # pvary only changes the type
        if moves_data and axis in (axes if isinstance(axes, tuple) else (axes,)):
            counts[equation.primitive.name.removesuffix("_invariant"), str(equation.invars[0].aval.dtype)] += times
    return counts


def scans_with(jaxpr: Any, primitive: str) -> Iterator[Any]:
    """The scans, at any depth, in whose bodies `primitive` stands (not only in a loop inside)."""
    for equation, *_ in walk.every_equation(jaxpr):
        bodies = walk.inner_jaxprs(equation) if equation.primitive.name == "scan" else []
        if any(inner.primitive.name == primitive for body in bodies for inner in walk.equations(body)):
            yield equation


def ancestors(jaxpr: Any, primitive: str) -> set[str]:
    """Names of the primitives that operands of `primitive` come from, in this jaxpr and in what it calls."""
    makers = {out: equation for equation in walk.equations(jaxpr) for out in equation.outvars}
    todo = [atom for each in walk.equations(jaxpr) if each.primitive.name == primitive for atom in each.invars]
    names, seen = set(), set()
    while todo:
        atom = todo.pop()
        if isinstance(atom, Literal) or atom not in makers or id(makers[atom]) in seen:
            continue
        seen.add(id(makers[atom]))
        names |= names_in(makers[atom])
        todo += makers[atom].invars
    return names


def equations(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    """(names on the way, equation) of all equations at any depth."""
    return ((site.names, site.equation) for site in walk.every_equation(jaxpr))


def floats(equation: Any) -> set[str]:
    """Names of the floating-point types of its operands."""
    return {str(x.aval.dtype) for x in equation.invars if jnp.issubdtype(x.aval.dtype, jnp.floating)}


def names_in(equation: Any) -> set[str]:
    """The equation's primitive and all inside it."""
    inner = walk.inner_jaxprs(equation)
    return {equation.primitive.name, *(name for each in inner for name in primitive_counts(each))}


def names_of_values(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    """(name, equation) wherever a value is named by `checkpoint_name`, at any depth."""
    return ((each.params["name"], each) for _, each in equations(jaxpr) if each.primitive.name == "name")
