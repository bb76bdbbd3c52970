"""Origins of an equation: its phase of the step, the layer or parameter whose scope it is in, and its source line."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxdist.parallel.pipeline.relay import BACKWARD, FORWARD

PACKAGE = Path(__file__).parents[2]
SENDING = ("collectives/", "parallel/batch_mean.py", "specs.py")  # code that only sends what its caller gave it
# Parts of a name stack that nobody wrote: transformations, primitives, einsums.
_WRAPPER = re.compile(r"\b\w+\(|\)")
_NOISE = re.compile(
    r"^(rematted_computation|checkpoint|while|body|cond|branch_\d+_fun|closed_call|shard_map|.*->.*"
    rf"|{FORWARD}|{BACKWARD})?$"
)


def phase_of(names: str) -> str:
    """The phase of an equation: "forward", "backward", "recompute" or "once a step".

    names: the named scopes around it, see `jaxdist.jaxpr.walk.Site`
    """
    scopes = names.split("/")
    # "transpose(rematted_computation)" is the backward pass of the forward pass that ran again (`sqrt_remat`).
    if any("rematted_computation" in scope and not scope.startswith("transpose(") for scope in scopes):
        return "recompute"
    if "jvp" in names and "transpose(" in names:
        return "backward"
    if "jvp" in names:
        return "recompute" if BACKWARD in scopes else "forward"
    # In a pipeline, the embedding of the forward tick and the halves of a backward pass are not differentiated there.
    return "forward" if FORWARD in scopes else "backward" if BACKWARD in scopes else "once a step"


def scope_of(names: str) -> str:
    """The scopes that somebody named: "blocks.attention" of "/jvp()/while/body/blocks/attention/BSD,DE->BSE"."""
    written = [name for name in _WRAPPER.sub("", names).split("/") if not _NOISE.match(name)]
    return ".".join(dict.fromkeys(written))


def source_of(equation: Any, skipped: tuple[str, ...] = SENDING) -> str:
    """The source line of an equation, as "jaxdist/nn/linear.py:37"; of a file outside jaxdist, as "loss.py:12".

    It is the innermost line that is not in jax, another installed package, or a `skipped` part of jaxdist.
    """
    return next(_lines(equation, skipped), "unknown")


def _lines(equation: Any, skipped: tuple[str, ...]) -> Iterator[str]:
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else []:
        path = Path(frame.file_name)
        if path.is_relative_to(PACKAGE):
            inside = path.relative_to(PACKAGE).as_posix()
            if not inside.startswith(skipped):
                yield f"{PACKAGE.name}/{inside}:{frame.line_num}"
        elif not {"site-packages", "lib"} & set(path.parts) and not frame.file_name.startswith("<"):
            yield f"{path.name}:{frame.line_num}"
