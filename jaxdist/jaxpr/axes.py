"""Mesh axes that the equations of a jaxpr name."""

from typing import Any

SILENT = ("axis_index", "pvary", "pcast")  # they name axes, and send nothing


def named_axes(equation: Any) -> tuple[str, ...]:
    """Mesh axes that an equation names: collectives and axis_index have them, ordinary primitives do not."""
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    return tuple(axis for axis in (axes if isinstance(axes, tuple | list) else (axes,)) if isinstance(axis, str))


def moving_axes(equation: Any) -> tuple[str, ...]:
    """Mesh axes over which an equation sends data: () unless it is a collective."""
    return () if equation.primitive.name in SILENT else named_axes(equation)
