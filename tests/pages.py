"""The pages of docs and README: their blocks, and the commands in them."""

import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile

from syntax import ROOT

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES += ["README.md", "README.ko.md", "CONTRIBUTING.md"]


def blocks(page: str) -> list[str]:
    """The blocks between fences of a page, with lines that end in a backslash joined."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", "")
    return re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)


def command_of(line: str) -> list[str]:
    """The words of a line that is a command of ours, without variables before it; [] for any other line."""
    with suppress(ValueError):
        words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
        if words and (words[0] in ("python", "jaxdist") or words[:2] in (["sudo", "python"], ["srun", "python"])):
            return [*takewhile(lambda word: word not in ("&", "...", "|"), words)]
    return []


def on_page(page: str, message: str, values: Mapping[str, str] | None = None) -> None:
    """Check that a message stands in a block of the page.

    values: {a pattern of a value in the message: what the page shows in its place}.
    """
    for pattern, shown in (values or {}).items():
        message, found = re.subn(pattern, lambda _, shown=shown: shown, message)
        assert found, f"{pattern} is not in: {message}"
    assert any(message in block for block in blocks(page)), f"{page} does not show: {message}"


def lines_of(block: str) -> list[str]:
    """The lines of a block that are not empty and no comments."""
    return [line for line in block.splitlines() if line.strip() and not line.lstrip().startswith("#")]
