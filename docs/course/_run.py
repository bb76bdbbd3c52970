"""Runs a lesson and says which cell printed what: python docs/course/_run.py 4 [--picture FILE]

`python docs/course/_run.py --keep` runs all lessons and keeps output/NN.txt and their pictures for pages and notebooks.
"""

import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PICTURES = HERE.parent / "pictures" / "course"
HEAD = re.compile(r"^# %%.*$", re.MULTILINE)
TITLE = re.compile(r'^show\((?:bars|grid)\(\s*"([^"]+)"', re.MULTILINE)  # of a picture
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
    found = {int(number): text for number, text in zip(parts[::2], parts[1::2], strict=True)}
    return {number: text for number, text in found.items() if text}


def run(path: Path) -> None:
    """Run a lesson; before each cell of code print a line with its number."""
    code = [(number, body) for number, (text, body) in enumerate(cells(path.read_text(encoding="utf-8"))) if not text]
    marked = "\n".join(f'print("--- cell {number}")\n{body}\n' for number, body in code)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_text(marked, encoding="utf-8")
        runpy.run_path(str(copy), run_name="__main__")


def keep() -> None:
    """Run every lesson in a process of its own; keep what it prints and draws."""
    for number, path in enumerate(lessons(), start=1):
        command = [sys.executable, __file__, str(number), "--picture", str(PICTURES / f"{path.stem}.svg")]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        (HERE / "output" / f"{number:02}.txt").write_text(printed, encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    if sys.argv[1:] == ["--keep"]:
        keep()
    else:
        run(lessons()[int(sys.argv[1]) - 1])
