"""The documentation site: every page is in a toctree, every public name on a page, and it builds without a warning."""

import fnmatch
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import child
import pytest

import jaxdist
from jaxdist.config.load import load_config
from jaxdist.config.shipped import find_config

DOCS = child.ROOT / "docs"


@cache
def public_modules() -> set[str]:
    """The package, and its folders that say what is public."""
    folders = [f"jaxdist.{each.name}" for each in pkgutil.iter_modules(jaxdist.__path__) if each.ispkg]
    return {"jaxdist", *(name for name in folders if hasattr(importlib.import_module(name), "__all__"))}


def test_every_page_is_in_a_toctree() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = [
        re.sub(r".*<(.*)>", r"\1", line)
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", index, re.MULTILINE | re.DOTALL)
        for line in tree.splitlines()
        if line and not line.startswith(":")
    ]
    pages = [*DOCS.rglob("*.md"), *DOCS.glob("course/[0-9]*.py")]
    names = {path.relative_to(DOCS).with_suffix("").as_posix() for path in pages} - {"index"}
    assert {name for name in names if not any(fnmatch.fnmatch(name, each) for each in listed)} == set()
    assert [each for each in listed if not fnmatch.filter(names, each)] == []


def test_every_public_name_is_in_the_reference() -> None:
    shown = {
        name
        for path in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^<!-- public (\S+) -->$", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert shown == public_modules()


def test_the_commands_of_the_index_hold() -> None:
    rows = re.findall(r"`jaxdist train (\S+) ([^`]*)`", (DOCS / "index.md").read_text(encoding="utf-8"))
    assert len(rows) > 6
    for name, settings in rows:
        load_config(find_config(name), settings.split())


@pytest.mark.slow
def test_the_site_builds_and_needs_no_network(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo", "jupytext")):
        pytest.skip("the extra `docs` is not installed")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    text = (tmp_path / "course" / "04_ring.html").read_text(encoding="utf-8")
    assert "all 8 copies are equal: True" in text and "04_ring.svg" in text
    for module in public_modules():
        text = (tmp_path / "reference" / f"{module.removeprefix('jaxdist.')}.html").read_text(encoding="utf-8")
        names = [name for name in importlib.import_module(module).__all__ if f"jaxdist.{name}" not in public_modules()]
        shown = set(re.findall(r'<span class="sig-name descname"><span class="pre">(\w+)<', text))
        assert {*names} - shown - {"precision"} == set(), module
    assert "usage: jaxdist launch" in (tmp_path / "reference" / "commands.html").read_text(encoding="utf-8")
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"https?:[^>]*>", page.read_text(encoding="utf-8"))
        assert not loaded, page
    assert not [path for path in tmp_path.rglob("*.css") if re.search(r"url\([\"']?https?:|@import", path.read_text())]
