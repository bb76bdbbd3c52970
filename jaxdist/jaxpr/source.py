"""The source line of an equation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
SENDING = ("collectives/", "parallel/batch_mean.py", "specs.py")  # code that only sends what its caller gave it


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
