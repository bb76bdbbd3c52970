"""Each tutorial prints what it shows: its commands run, in order, in one empty folder."""

import importlib.metadata
import re
import runpy
import socket
import subprocess
from pathlib import Path

import child
import pytest
from tutorial_pages import commands, files, folder_of_jaxdist, same

KEPT_WITH = "0.10.2"  # the jax of the pages: another one traces a little differently
PAGES = sorted(path.name for path in (child.ROOT / "docs" / "tutorials").glob("*.md"))


def losses(lines: list[str]) -> list[float]:
    return [float(loss) for line in lines for loss in re.findall(r"^(?:\[0\] )?step .* loss ([\d.]+)", line)]


def exact(lines: list[str]) -> list[str]:
    """The lines of `jaxdist explain` as they are, but for the numbers of lines of source."""
    return [re.sub(r"(\.py):\d+", r"\1", line) for line in lines if line not in ("", "...")]


def failed(shown: list[str]) -> int:
    """The exit status of a command that prints this."""
    return (
        2
        if shown[:1] and shown[0].startswith("error: ")
        else int(any(line.startswith("over budget") for line in shown))
    )


def test_lines_are_compared() -> None:
    ranks = ["[1] joined", "[0] step 1  loss 5.50", "[0] run a"]
    assert same(["[0] step 1 loss 5.61", "[1] joined", "[0] run a"], ranks)
    assert not same(["[0] step 1 loss 5.61", "[0] run a"], ranks)
    assert not same(["[0] step 1 lost 5.61", "[1] joined", "[0] run a"], ranks)
    assert same(["step 1", "step 2", "end"], ["step 3", "...", "end"])
    assert not same(["step 1", "step 2"], ["step 3", "...", "end"])
    assert losses(ranks) == [5.5]
    assert exact(["psum  8 B  jaxdist/step.py:3", "", "..."]) == ["psum  8 B  jaxdist/step.py"]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_shows_what_it_prints(page: str) -> None:
    quiet = [command for command, lines in commands(page) if not lines and "sed -i" not in command]
    assert commands(page) and not quiet


@pytest.mark.parametrize("page", PAGES)
def test_the_notebook_of_a_tutorial_has_its_commands_and_files(page: str) -> None:
    text = (child.ROOT / "docs" / "tutorials" / page).read_text(encoding="utf-8")
    cells = runpy.run_path(str(child.ROOT / "scripts/docs/tutorials.py"))["notebook"](text)["cells"]
    code = [each for each in cells if each["cell_type"] == "code"]
    sources = ["".join(each["source"]).rstrip("\n") for each in code]
    shown = [[line.rstrip("\n") for output in each["outputs"] for line in output["text"]] for each in code]
    found = [
        (source.partition("\n")[2], lines)
        for source, lines in zip(sources, shown, strict=True)
        if source.startswith("%%bash")
    ]
    assert found == commands(page)
    for source, lines in zip(sources, shown, strict=True):
        assert ("--no-raise-error" in source.partition("\n")[0]) == (failed(lines) > 0)
    assert [each for each in sources if each.startswith("%%writefile")] == [
        f"%%writefile {name}\n{block}".rstrip("\n") for name, block in files(page).items()
    ]
    headings = re.findall(r"^#+ .*", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    written = "\n".join("".join(each["source"]) for each in cells if each["cell_type"] == "markdown")
    assert all(heading in written for heading in headings)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_prints_what_it_shows(page: str, tmp_path: Path) -> None:
    environment = child.environment() | child.QUICK
    environment["PATH"] = f"{folder_of_jaxdist(tmp_path)}:{environment['PATH']}"
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, block in files(page).items():
        (folder / name).write_text(block, encoding="utf-8")
    known = True  # whether all texts so far are those of the page; with other ones losses differ
    for command, shown in commands(page):
        run = subprocess.run(
            ["bash", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=environment,
            timeout=300,
            check=False,
        )
        printed = run.stdout.replace(f"on {socket.gethostname()})", "on host0)").splitlines()
        assert run.returncode == failed(shown), run.stdout
        assert same(printed, shown), f"{command}\n{run.stdout}"
        if re.search(r"^(echo|.*jaxdist explain) ", command) and importlib.metadata.version("jax") == KEPT_WITH:
            assert [line for line in exact(shown) if line not in exact(printed)] == [], command
        known &= all(line in printed for line in shown if "sha256" in line)
        assert losses(printed) == pytest.approx(losses(shown), rel=0.01 if known else 0.25)
