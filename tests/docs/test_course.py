"""The course: its lessons are complete, run, print what is kept, and their exercises take the right answers only."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import child
import pytest
from lessons import COURSE, lesson, module, parts

PICTURES = child.ROOT / "docs" / "pictures" / "course"
NUMBERS = range(1, 11)
KEPT_WITH = "0.10.2"  # the jax of docs/course/output
# What a reader would type: calculated by hand, from the text of the exercise alone.
RIGHT = {
    1: "112",
    2: "1 3 5 7",
    3: "1,204",
    4: "322.5",
    5: "32768",
    6: "38.5",
    7: "768",
    8: "27",
    9: "0.607",
    10: "zero2",
}
WRONG = {1: "28", 2: "2 3", 3: "1376", 4: "344", 5: "65536", 6: "63", 7: "384", 8: "26", 9: "0.81", 10: "zero3"}


def test_ten_lessons() -> None:
    names = [path.name for path in module("_run").lessons()]
    assert [name[:2] for name in names] == [f"{number:02}" for number in NUMBERS]
    assert sorted(module("check").EXERCISES) == list(NUMBERS)
    listed = re.findall(
        r"^\| \[\d+\. .*\]\((\S+)\) \|", (COURSE / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert listed == names


@pytest.mark.parametrize("number", NUMBERS)
def test_a_lesson_has_all_its_parts(number: int) -> None:
    path = lesson(number)
    source = path.read_text(encoding="utf-8")
    assert f"python docs/course/{path.name}" in (ast.get_docstring(ast.parse(source)) or "")
    assert 80 <= len(source.splitlines()) <= 180
    cells = module("_run").cells(source)
    texts, codes = (["\n".join(body for text, body in cells if text is kind)][0] for kind in (True, False))
    assert f"# # {number}. " in texts and "# ## What you learned" in texts and "# ## Exercise" in texts
    assert f"check.py {number} " in texts
    learned = texts.split("# ## What you learned")[1].split("# ## Exercise")[0]
    assert learned.count("\n# - ") == 3
    assert codes.count("\nshow(") == 1 and "\nassert " in codes and "print(" in codes
    title = module("_run").TITLE.search(codes)[1]
    picture = (PICTURES / f"{path.stem}.svg").read_text(encoding="utf-8")
    assert picture.startswith("<svg") and f"<title>{title}</title>" in picture
    kept = module("_run").outputs((COURSE / "output" / f"{number:02}.txt").read_text(encoding="utf-8"))
    printing = {i for i, (text, body) in enumerate(cells) if not text and "print(" in body}
    assert kept and set(kept) <= printing


@pytest.mark.parametrize("number", NUMBERS)
def test_an_exercise_takes_the_right_answer_only(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    main = module("check").main
    assert main([str(number), *RIGHT[number].split()]) == 0
    assert capsys.readouterr().out == "right\n"
    for wrong in (WRONG[number], "0", "no idea"):
        assert main([str(number), *wrong.split()]) == 1
        assert capsys.readouterr().out.startswith("not yet: ")
    exercise = module("check").EXERCISES[number]
    assert RIGHT[number] not in exercise.hint and not any(RIGHT[number] in hint for hint in exercise.slips)


@pytest.mark.parametrize("number", NUMBERS)
def test_each_slip_has_its_own_hint(number: int) -> None:
    """No likely mistake counts as right, and each is told by its own hint."""
    check, rules = module("check"), module("check").rules_of(number)
    for hint, slip in check.EXERCISES[number].slips.items():
        value = slip(rules)
        given = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        assert check.verdict(number, given) == (False, f"not yet: {hint}")


def test_the_glossary_is_sorted_into_lessons_and_has_their_words() -> None:
    text = (COURSE / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| \[(\d+)\]\((\S+)\) \|$", text, re.MULTILINE)
    assert len(rows) == text.count("\n|") - 2 > 40
    for word, _, _, number, file in rows:
        assert lesson(int(number)).name == file
        read = lesson(int(number)).read_text(encoding="utf-8").lower().replace("-", " ").replace("_", " ")
        names = word.lower().replace("-", " ").replace("_", " ").split(", ")
        assert any(name in read for name in names), f"{word} is not in {file}"


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_a_lesson_prints_what_is_kept(number: int, tmp_path: Path) -> None:
    picture, environment = tmp_path / "picture.svg", child.environment() | child.QUICK
    command = [sys.executable, str(COURSE / "_run.py"), str(number), "--picture", str(picture)]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    kept = (COURSE / "output" / f"{number:02}.txt").read_text(encoding="utf-8")
    drawn = (PICTURES / f"{lesson(number).stem}.svg").read_text(encoding="utf-8")
    if importlib.metadata.version("jax") == KEPT_WITH:
        assert run.stdout == kept
        assert picture.read_text(encoding="utf-8") == drawn
    else:  # another jax traces and rounds a little differently
        words, numbers = parts(run.stdout)
        kept_words, kept_numbers = parts(kept)
        assert words == kept_words
        assert numbers == pytest.approx(kept_numbers, rel=0.25, abs=1e-3)
        assert picture.read_text(encoding="utf-8").count("<rect") == drawn.count("<rect")


@pytest.mark.slow
def test_pages_and_notebooks_have_output_and_pictures(tmp_path: Path) -> None:
    pytest.importorskip("jupytext", reason="the extra `docs` is not installed")
    command = [sys.executable, str(child.ROOT / "scripts/docs/course.py"), "--md", "pages", "--ipynb", "books"]
    found = {"PYTHONPATH": os.pathsep.join([str(child.ROOT), *filter(None, sys.path)])}  # jupytext may lie beside
    subprocess.run(command, check=True, cwd=tmp_path, env=child.environment() | found, timeout=120)
    for number in NUMBERS:
        name = lesson(number).stem
        page = (tmp_path / "pages" / f"{name}.md").read_text(encoding="utf-8")
        kept = (COURSE / "output" / f"{number:02}.txt").read_text(encoding="utf-8")
        for text in module("_run").outputs(kept).values():
            assert f"```text\n{text.rstrip()}\n```" in page
        assert page.count(f"](pictures/{name}.svg)") == 1 and (tmp_path / "pages" / "pictures" / f"{name}.svg").exists()
        assert '"nbformat"' in (tmp_path / "books" / f"{name}.ipynb").read_text(encoding="utf-8")
