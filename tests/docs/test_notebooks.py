"""Lessons and tutorials as notebooks, run by Jupyter's own kernel: they print what the pages show.

Two lessons and a tutorial: the contents of all are compared without a kernel in `test_course.py` and
`test_tutorials.py`.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import child
import pytest
from lessons import COURSE, lesson, module, parts
from tutorial_pages import commands, folder_of_jaxdist, same

pytestmark = pytest.mark.slow
EXTRA = "the extra `docs` is not installed"


def executed(path: Path) -> list[Any]:
    """The cells of a notebook after all were run, in a kernel of this Python."""
    nbformat, nbclient = (pytest.importorskip(name, reason=EXTRA) for name in ("nbformat", "nbclient"))
    pytest.importorskip("ipykernel", reason=EXTRA)
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    return list(notebook.cells)


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.get("outputs", ()))


def made(script: str, *arguments: str, folder: Path) -> None:
    command = [sys.executable, str(child.ROOT / "scripts" / "docs" / script), *arguments]
    subprocess.run(command, check=True, cwd=folder, timeout=120)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a kernel inherits: no settings of these tests, and `jaxdist` on PATH."""
    for key in [key for key in os.environ if key.startswith(child.SETTINGS)]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PATH", f"{folder_of_jaxdist(tmp_path)}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(child.ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.mark.parametrize("number", [1, 4])
def test_a_lesson_runs_as_notebooks_do(number: int, tmp_path: Path, kernel: None) -> None:
    pytest.importorskip("jupytext", reason=EXTRA)
    made("course.py", "--ipynb", str(tmp_path / "books"), folder=tmp_path)
    cells = executed(tmp_path / "books" / f"{lesson(number).stem}.ipynb")
    kept = module("_run").outputs((COURSE / "output" / f"{number:02}.txt").read_text(encoding="utf-8"))
    assert kept and {i for i, cell in enumerate(cells) if printed(cell)} == set(kept)
    for i, text in kept.items():
        (words, numbers), (kept_words, kept_numbers) = parts(printed(cells[i])), parts(text)
        assert words == kept_words
        assert numbers == pytest.approx(kept_numbers, rel=0.25, abs=1e-3)
    pictures = [
        output for cell in cells for output in cell.get("outputs", ()) if "image/svg+xml" in output.get("data", {})
    ]
    assert len(pictures) == 1


def test_a_tutorial_runs_as_notebooks_do(tmp_path: Path, kernel: None) -> None:
    made("tutorials.py", str(tmp_path / "books"), folder=tmp_path)
    cells = executed(tmp_path / "books" / "read_the_ledger.ipynb")
    found = [printed(cell).splitlines() for cell in cells if cell.source.startswith("%%bash")]
    shown = [lines for _, lines in commands("read_the_ledger.md")]
    assert len(found) == len(shown) > 3
    assert all(same(lines, wanted) for lines, wanted in zip(found, shown, strict=True))
