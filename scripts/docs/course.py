"""Make pages or notebooks of the course: `python scripts/docs/course.py --md FOLDER` or `--ipynb FOLDER`; needs jupytext.

Both show the output that the lessons had when `--output` last ran them (it also draws their pictures); nothing is run.
"""

import argparse
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
COURSE, PICTURES = DOCS / "course", DOCS / "pictures" / "course"
RUN = runpy.run_path(str(COURSE / "_run.py"))


def keep_output() -> None:
    """Run every lesson; keep what it prints and draws."""
    for number, path in enumerate(RUN["lessons"](), start=1):
        picture = ["--picture", str(PICTURES / f"{path.stem}.svg")]
        command = [sys.executable, str(COURSE / "_run.py"), str(number), *picture]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        (COURSE / "output" / f"{number:02}.txt").write_text(printed, encoding="utf-8")


def notebook(path: Path) -> Any:
    """A lesson as a notebook with its output."""
    import jupytext
    from nbformat.v4 import new_output

    source = path.read_text(encoding="utf-8")
    made = jupytext.reads(source[source.index("# %%") :], fmt="py:percent")
    kept = (COURSE / "output" / f"{path.name[:2]}.txt").read_text(encoding="utf-8")
    for number, text in RUN["outputs"](kept).items():
        made.cells[number].outputs = [new_output("stream", name="stdout", text=text)]
    return made


def page(made: Any, picture: str) -> str:
    """A notebook as Markdown: text, code, output, and the picture after the cell that draws it."""
    parts = []
    for cell in made.cells:
        parts.append(cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```")
        parts += [f"```text\n{output.text.rstrip()}\n```" for output in cell.get("outputs", ())]
        if cell.cell_type == "code" and "\nshow(" in f"\n{cell.source}":
            title = (PICTURES / picture).read_text(encoding="utf-8").partition("<title>")[2].partition("</title>")[0]
            parts.append(f"![{title}](pictures/{picture})")
    return "\n\n".join(parts) + "\n"


def main(md: Path | None, ipynb: Path | None) -> None:
    """Write the pages with their pictures, and the notebooks beside the helper that they import."""
    for folder in filter(None, (md, ipynb)):
        folder.mkdir(parents=True, exist_ok=True)
    for path in RUN["lessons"]():
        made = notebook(path)
        if md:
            (md / f"{path.stem}.md").write_text(page(made, f"{path.stem}.svg"), encoding="utf-8")
            shutil.copytree(PICTURES, md / "pictures", dirs_exist_ok=True)
        if ipynb:
            import jupytext

            jupytext.write(made, ipynb / f"{path.stem}.ipynb")
            shutil.copy(COURSE / "_course.py", ipynb)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", action="store_true", help="run the lessons and keep their output and pictures")
    parser.add_argument("--md", type=Path, metavar="FOLDER", help="write pages for Sphinx and MyST")
    parser.add_argument("--ipynb", type=Path, metavar="FOLDER", help="write notebooks")
    arguments = parser.parse_args()
    if arguments.output:
        keep_output()
    if arguments.md or arguments.ipynb:
        main(arguments.md, arguments.ipynb)
