"""Counting primitives in a jaxpr: what a program communicates, before any compiler has seen it."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params


def primitive_counts(jaxpr: Any, times: int = 1) -> Counter[str]:
    """How often each primitive runs, scans multiplied out."""
    counts: Counter[str] = Counter()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        counts[equation.primitive.name] += times
        inner = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for sub in jaxprs_in_params(equation.params):
            counts += primitive_counts(sub, inner)
    return counts


def collectives(jaxpr: Any, axis: str, times: int = 1) -> Counter[tuple[str, str]]:
    """How often each (primitive, dtype) runs over mesh axis `axis`."""
    counts: Counter[tuple[str, str]] = Counter()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        axes = equation.params.get("axes", equation.params.get("axis_name", ()))
        moves_data = equation.invars and equation.primitive.name != "pvary"  # pvary only changes the type
        if moves_data and axis in (axes if isinstance(axes, tuple) else (axes,)):
            counts[equation.primitive.name.removesuffix("_invariant"), str(equation.invars[0].aval.dtype)] += times
        inner = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for sub in jaxprs_in_params(equation.params):
            counts += collectives(sub, axis, inner)
    return counts


def scans_with(jaxpr: Any, primitive: str) -> Iterator[Any]:
    """The scans, at any depth, in whose bodies `primitive` stands (not only in a loop inside)."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for sub in jaxprs_in_params(equation.params):
            body = getattr(sub, "jaxpr", sub)
            if equation.primitive.name == "scan" and any(inner.primitive.name == primitive for inner in body.eqns):
                yield equation
            yield from scans_with(sub, primitive)


def ancestors(jaxpr: Any, primitive: str) -> set[str]:
    """Names of the primitives that operands of `primitive` come from, in this jaxpr and in what it calls."""
    makers = {out: equation for equation in jaxpr.eqns for out in equation.outvars}
    todo = [atom for equation in jaxpr.eqns if equation.primitive.name == primitive for atom in equation.invars]
    names, seen = set(), set()
    while todo:
        atom = todo.pop()
        if isinstance(atom, Literal) or atom not in makers or id(makers[atom]) in seen:
            continue
        seen.add(id(makers[atom]))
        names |= names_in(makers[atom])
        todo += makers[atom].invars
    return names


def equations(jaxpr: Any, stack: str = "") -> Iterator[tuple[str, Any]]:
    """(names on the way, equation) of all equations at any depth."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = f"{stack}/{equation.source_info.name_stack}"
        yield inner, equation
        for sub in jaxprs_in_params(equation.params):
            yield from equations(sub, inner)


def floats(equation: Any) -> set[str]:
    """Names of the floating-point types of its operands."""
    return {str(x.aval.dtype) for x in equation.invars if jnp.issubdtype(x.aval.dtype, jnp.floating)}


def names_in(equation: Any) -> set[str]:
    """The equation's primitive and all inside it."""
    found = {equation.primitive.name}
    for sub in jaxprs_in_params(equation.params):
        for inner in getattr(sub, "jaxpr", sub).eqns:
            found |= names_in(inner)
    return found


def names_of_values(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    """(name, equation) wherever a value is named by `checkpoint_name`, at any depth."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "name":
            yield equation.params["name"], equation
        for sub in jaxprs_in_params(equation.params):
            yield from names_of_values(sub)
