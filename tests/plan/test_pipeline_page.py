"""docs/pipeline.md says and shows what the code does: pictures, figures, programs."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from jaxdist import registry
from jaxdist.parallel.pipeline.table import SCHEDULES, table_of
from jaxdist.plan.report.draw_rounds import data_of
from jaxdist.plan.report.draw_timeline import table_data
from jaxdist.plan.report.timeline import simulate

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
PICTURES = ROOT / "docs" / "pictures"
ROWS = (("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1))  # with chunks
NAMES = [name for name in registry.names(SCHEDULES) if table_of(name) is not None]
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S)
AROUND = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def run_for(status: int, *command: Any) -> Any:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120, env=AROUND)
    assert done.returncode == status, done.stderr
    return done


def run(*command: Any) -> str:
    return run_for(0, *command).stdout


@pytest.mark.slow
def test_the_pictures_are_those_of_the_code(tmp_path: Path) -> None:
    """Their tables and titles, not their pixels: matplotlib may draw differently."""
    run(ROOT / "scripts" / "docs" / "draw_pipelines.py", tmp_path)
    drawn, kept = ({path.name: path for path in folder.glob("pipeline_*.svg")} for folder in (tmp_path, PICTURES))
    assert drawn.keys() == kept.keys() == {f"pipeline_{name}.svg" for name in NAMES}
    for name, path in kept.items():
        text, again = (each.read_text(encoding="utf-8") for each in (path, drawn[name]))
        assert data_of(text) == data_of(again), f"{name}: run scripts/docs/draw_pipelines.py"
        title, title_again = (ElementTree.fromstring(each).findtext("{*}title") for each in (text, again))
        assert title == title_again and title
        assert len(text) < 110_000
        assert f"(pictures/{name})" in PAGE


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_holds_the_table(name: str) -> None:
    ticks = table_of(name)(4, 8, 2 if name == "interleaved" else 1)
    found = data_of((PICTURES / f"pipeline_{name}.svg").read_text(encoding="utf-8"))
    assert found == table_data(ticks, name) and found["forward"] == ticks.forward.tolist()
    assert f"\n### {name}\n" in PAGE


def test_the_page_has_the_figures_of_the_tables() -> None:
    want = []
    for stages, microbatches in ((4, 8), (8, 32)):
        for name, chunks in ROWS:
            ticks = table_of(name)(stages, microbatches, chunks)
            line = simulate(ticks)
            kept, sends = line.most_live[0] / chunks, 2 * ticks.length
            want.append(
                f"| {stages} | {microbatches} | `{name}` | {chunks} | {ticks.length} | {line.total:g} |"
                f" {100 * line.bubble:.1f} % | {kept:g} | {sends} |"
            )
            assert line.most_live[0] == line.most_live.max()
    shown = PAGE[PAGE.index("| S | M | schedule |") :].split("\n\n")[0].splitlines()
    assert shown[2:] == want, "\n".join(want)


@pytest.mark.slow
def test_the_page_shows_what_is_printed(tmp_path: Path) -> None:
    [shown] = [text for _, text in FENCES if text.startswith("$ python scripts/explain.py")]
    command, *lines = shown.splitlines()
    arguments = command.removeprefix("$ python ").split()
    assert arguments[-2] == "--timeline"
    printed = run(*arguments[:-1], tmp_path / arguments[-1]).splitlines()
    number = re.compile(r":\d+$")  # of a line, which moves with every edit
    assert [number.sub("", line) for line in printed] == [number.sub("", line) for line in lines]
    assert (tmp_path / arguments[-1]).read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize("at", [i for i, (language, _) in enumerate(FENCES) if language == "python"])
def test_the_programs_on_the_page_run(at: int) -> None:
    assert run("-c", FENCES[at][1]) == FENCES[at + 1][1]


def test_the_page_shows_what_is_refused() -> None:
    [shown] = [text for _, text in FENCES if text.startswith("$ python scripts/train.py")]
    command, error = shown.splitlines()
    arguments = command.removeprefix("$ python ").split()
    done = run_for(2, *arguments)
    assert done.stderr == error + "\n" and not done.stdout
