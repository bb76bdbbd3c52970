"""The source line of an equation."""

import functools
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxdist.jaxpr.walk import opened

PACKAGE = Path(__file__).parents[1]
SENDING = ("collectives/", "parallel/batch_mean.py", "specs.py")  # code that only sends what its caller gave it
# Folders of Python and of installed packages, not by their names: a user's own folder may be called "lib".
INSTALLED = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}


def source_of(equation: Any, skipped: tuple[str, ...] = SENDING) -> str:
    """The source line of an equation, as "jaxdist/nn/linear.py:37"; of a file outside jaxdist, as "loss.py:12".

    It is the innermost line that is not in jax, another installed package, or a `skipped` part of jaxdist.
    """
    return next(_lines(equation, skipped), "unknown")


def line_of_user(equation: Any) -> str:
    """The source line of an equation in the code of a user, which is the innermost that is in no package."""
    return source_of(equation, ("",))


def is_installed(file: str | Path) -> bool:
    """Whether a file is Python's own, or of an installed package."""
    return _is_installed(str(file))


def installed(jaxpr: Any) -> bool:
    """Whether a function is of jax or another package. Its equations have the lines of the first call anywhere."""
    told = getattr(getattr(opened(jaxpr), "debug_info", None), "func_src_info", None) or ""
    found = re.search(r" at (.*):\d+$", told)
    return found is not None and is_installed(found[1])


@functools.cache
def _is_installed(file: str) -> bool:
    path = Path(file)
    return bool({"site-packages", "dist-packages"} & set(path.parts) or INSTALLED & set(path.parents))


def _lines(equation: Any, skipped: tuple[str, ...]) -> Iterator[str]:
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else []:
        path = Path(frame.file_name)
        if path.is_relative_to(PACKAGE):
            inside = path.relative_to(PACKAGE).as_posix()
            if not inside.startswith(skipped):
                yield f"{PACKAGE.name}/{inside}:{frame.line_num}"
        elif not is_installed(path) and not frame.file_name.startswith("<frozen"):
            yield f"{path.name}:{frame.line_num}"
