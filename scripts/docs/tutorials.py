"""Make notebooks of the tutorials: `python scripts/docs/tutorials.py FOLDER`.

A file that a page asks to write is a cell `%%writefile`, a command is a cell `%%bash` with the output that the page
shows. Nothing is run. Links lead to the pages beside the notebooks, as in docs/tutorials.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parents[2] / "docs" / "tutorials"
_BLOCK = re.compile(r"^```(yaml|console)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def _cell(kind: str, source: str, **more: Any) -> dict[str, Any]:
    return {"cell_type": kind, "metadata": {}, "source": source.rstrip("\n").splitlines(keepends=True), **more}


def _code(source: str, output: str = "") -> dict[str, Any]:
    shown = [{"output_type": "stream", "name": "stdout", "text": output.splitlines(keepends=True)}] if output else []
    return _cell("code", source, execution_count=None, outputs=shown)


def _commands(block: str) -> list[dict[str, Any]]:
    """A cell for each command of a console block. One that the page shows to fail does not stop the notebook."""
    cells = []
    for each in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = each.partition("\n")
        fails = re.search(r"^(error|over budget): ", output, re.MULTILINE)
        cells.append(_code(f"%%bash{' --no-raise-error' if fails else ''}\n{command}", output))
    return cells


def notebook(text: str) -> dict[str, Any]:
    """A page of Markdown as a notebook."""
    cells, at = [], 0
    for found in _BLOCK.finditer(text):
        before, (language, block) = text[at : found.start()].strip(), found.groups()
        name = re.match(r"# (\w+\.yaml)\n", block)
        if language == "yaml" and not name:
            continue  # a part of a file, to read
        cells += [_cell("markdown", before)] if before else []
        cells += [_code(f"%%writefile {name[1]}\n{block}")] if name else _commands(block)
        at = found.end()
    cells.append(_cell("markdown", text[at:].strip()))
    language = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    numbered = [{**cell, "id": f"cell-{number}"} for number, cell in enumerate(cells, start=1)]
    return {"cells": numbered, "metadata": language, "nbformat": 4, "nbformat_minor": 5}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the notebooks are written")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(PAGES.glob("*.md")):
        made = json.dumps(notebook(path.read_text(encoding="utf-8")), indent=1)
        (folder / f"{path.stem}.ipynb").write_text(made + "\n", encoding="utf-8")
