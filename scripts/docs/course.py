"""Make pages or notebooks of the course, with jupytext: `python scripts/docs/course.py --md FOLDER --ipynb FOLDER`.

No lesson is run: output and pictures are those that `python docs/course/_run.py --keep` kept.
"""

import argparse
import runpy
import shutil
from pathlib import Path
from typing import Any

COURSE = Path(__file__).parents[2] / "docs" / "course"
RUN = runpy.run_path(str(COURSE / "_run.py"))


def notebook(path: Path) -> Any:
    """A lesson as a notebook with its output."""
    from jupytext import reads  # type: ignore[import-not-found, import-untyped, unused-ignore]

    source = path.read_text(encoding="utf-8")
    made = reads(source[source.index("# %%") :], fmt="py:percent")
    kept = (COURSE / "output" / f"{path.name[:2]}.txt").read_text(encoding="utf-8")
    for number, text in RUN["outputs"](kept).items():
        made.cells[number].outputs = [type(made)(output_type="stream", name="stdout", text=text)]
    return made


def page(made: Any, picture: str) -> str:
    """A notebook as Markdown: text, code, output, and the picture after the cell that draws it."""
    parts = []
    for cell in made.cells:
        parts.append(cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```")
        parts += [f"```text\n{output.text.rstrip()}\n```" for output in cell.get("outputs", ())]
        if cell.cell_type == "code" and (title := RUN["TITLE"].search(cell.source)):
            parts.append(f"![{title[1]}](pictures/{picture})")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--md", type=Path, metavar="FOLDER", help="write pages for Sphinx and MyST, with their pictures"
    )
    parser.add_argument(
        "--ipynb", type=Path, metavar="FOLDER", help="write notebooks, with the helper that they import"
    )
    arguments = parser.parse_args()
    for lesson in RUN["lessons"]():
        made = notebook(lesson)
        if arguments.md:
            shutil.copytree(RUN["PICTURES"], arguments.md / "pictures", dirs_exist_ok=True)
            (arguments.md / f"{lesson.stem}.md").write_text(page(made, f"{lesson.stem}.svg"), encoding="utf-8")
        if arguments.ipynb:
            arguments.ipynb.mkdir(parents=True, exist_ok=True)
            shutil.copy(COURSE / "_course.py", arguments.ipynb)
            from jupytext import write

            write(made, arguments.ipynb / f"{lesson.stem}.ipynb")
