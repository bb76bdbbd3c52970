"""Layouts that a loss or a layer asks for inside the manual region, where a device sees its own part of arrays only."""

import ast
import linecache
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxdist.errors import UserError
from jaxdist.jaxpr.source import PACKAGE, is_installed, line_of_user
from jaxdist.jaxpr.walk import every_equation

ASKING = {"sharding_constraint": "with_sharding_constraint", "device_put": "device_put"}  # primitives
# What asks for a layout, in a call that failed while it was traced: a function, or a keyword that is not None.
_CALLED = {"with_sharding_constraint", "device_put", "reshard", "shard_map"}
_KEYWORDS = {"in_shardings", "out_shardings"}


def refuse_layouts(error: ValueError, trace: Callable[[], Any]) -> None:
    """Raise `UserError` if a step could not be compiled because code inside the manual region asks for a layout.

    jax says what is wrong with the axes of its mesh, and often not where.

    trace: gives the closed jaxpr of the step, if it can be traced
    """
    frames = list(_frames_of_user(error))
    found = _asked(frames[0]) if frames else []  # one further out called code of its own, which has failed
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if not is_installed(frame.filename)]
    if not frames:  # it was traced, and failed later
        asking = [site.equation for site in every_equation(trace()) if _asks(site.equation, site.inside)]
        found = [ASKING[equation.primitive.name] for equation in asking]
        places = list(map(line_of_user, asking))
    if found:
        raise UserError(
            f"{found[0]}: in a loss or a layer ({places[0] if places else 'of a package'}), where each device computes"
            " with its own part of the arrays; leave it out: mesh and strategy say how parameters and batches are laid"
            f" out; jax says: {str(error).partition(chr(10))[0]}"
        ) from error


def _asks(equation: Any, inside: tuple[Any, ...]) -> bool:
    """Whether an equation inside the manual region asks for a layout; one that names a memory does not."""
    if equation.primitive.name not in ASKING or not any(each.primitive.name == "shard_map" for each in inside):
        return False
    targets = equation.params.get("devices", (equation.params.get("sharding"),))
    return any(hasattr(target, "device_set") for target in targets)


def _frames_of_user(error: ValueError) -> Iterator[traceback.FrameSummary]:
    """The frames inside the innermost one of jaxdist, the innermost first, without those of jax."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE):
            return
        if not path.is_relative_to(Path(jax.__file__).parent):
            yield frame


def _asked(frame: traceback.FrameSummary) -> list[str]:
    """What asks for a layout in the call that a frame was in: in its function and keywords, but not its arguments,
    which are there already. [] where it was in no call, as of an error that the user raises."""
    first, last = frame.lineno, frame.end_lineno
    if first is None or last is None or frame.colno is None or frame.end_colno is None:  # Python without debug ranges
        return []
    lines = [linecache.getline(frame.filename, line).encode() for line in range(first, last + 1)]
    lines[-1] = lines[-1][: frame.end_colno]  # the first may be the last
    lines[0] = lines[0][frame.colno :]
    try:
        call = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except SyntaxError:  # a statement
        return []
    if not isinstance(call, ast.Call):
        return []
    nodes = [*ast.walk(call.func), *call.keywords]
    names = [getattr(node, "id", getattr(node, "attr", "")) for node in nodes]
    keywords = [node for node in nodes if isinstance(node, ast.keyword) and ast.unparse(node.value) != "None"]
    return [name for name in names if name in _CALLED] + [str(each.arg) for each in keywords if each.arg in _KEYWORDS]
