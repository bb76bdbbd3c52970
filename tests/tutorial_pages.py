"""The tutorials as data: their commands, what those print, and the files that a reader writes."""

import re
import sys
from pathlib import Path

import child


def commands(page: str) -> list[tuple[str, list[str]]]:
    """(command, the lines that it prints) of each command of a page."""
    text = (child.ROOT / "docs" / "tutorials" / page).read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for each in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = each.splitlines()
            found.append((command, lines))
    return found


def files(page: str) -> dict[str, str]:
    """The files that a page asks to write: blocks that begin with `# NAME.yaml`."""
    text = (child.ROOT / "docs" / "tutorials" / page).read_text(encoding="utf-8")
    found = re.findall(r"^```yaml\n(# (\w+\.yaml)\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    return {name: block for block, name in found}


def words(lines: list[str]) -> list[str]:
    """What is compared: words; a figure is a `#`. Ranks print when they like: the lines of each stand together."""
    found = sorted(filter(None, lines), key=lambda line: re.match(r"(\[\d\] )?", line)[0])
    return [" ".join(re.sub(r"[0-9a-f]{16}|\d[\d,.:]*\d|\d", "#", line).split()) for line in found]


def same(printed: list[str], shown: list[str]) -> bool:
    """Whether the lines are those shown, in which a line of `...` stands for any others."""
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in words(shown))
    return re.fullmatch(pattern, "".join(line + "\n" for line in words(printed))) is not None


def folder_of_jaxdist(folder: Path) -> Path:
    """A new folder for PATH, whose `jaxdist` is this Python's."""
    made = folder / "bin"
    made.mkdir()
    program = made / "jaxdist"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m jaxdist.cli.main "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return made
