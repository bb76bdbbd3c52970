"""Counting primitives in a jaxpr: what a program communicates, before any compiler has seen it."""

from collections import Counter
from typing import Any

from jax.extend.core import jaxprs_in_params


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
