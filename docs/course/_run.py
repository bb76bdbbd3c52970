"""Runs a lesson cell by cell and says which cell printed what: python docs/course/_run.py 4 [--picture FILE]

`scripts/docs/course.py --output` keeps this as output/NN.txt, so that a page shows real output without running a lesson.
"""

import contextlib
import io
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
HEAD = re.compile(r"^# %%.*$", re.MULTILINE)
MARK = re.compile(r"^--- cell (\d+)\n", re.MULTILINE)


def lessons() -> list[Path]:
    """The files of all lessons, in order."""
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


def cells(source: str) -> list[tuple[bool, str]]:
    """(whether it is text, the source) of each cell, without the module's docstring."""
    heads, bodies = HEAD.findall(source), HEAD.split(source)[1:]
    return [("[markdown]" in head, body.strip("\n")) for head, body in zip(heads, bodies, strict=True)]


def outputs(kept: str) -> dict[int, str]:
    """{number of the cell: what it printed}, from the text of output/NN.txt."""
    _, *parts = MARK.split(kept)
    return {int(number): text for number, text in zip(parts[::2], parts[1::2], strict=True)}


def run(path: Path) -> str:
    """The output of a lesson, with a line before that of each cell that printed."""
    space, text = {"__name__": "__main__", "__file__": str(path)}, []
    for number, (is_text, body) in enumerate(cells(path.read_text(encoding="utf-8"))):
        if not is_text:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(body, f"{path.name}, cell {number}", "exec"), space)
            if printed.getvalue():
                text.append(f"--- cell {number}\n{printed.getvalue()}")
    return "".join(text)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    print(run(lessons()[int(sys.argv[1]) - 1]), end="")
