"""The lessons of the course as modules, and what they print as words and numbers."""

import functools
import re
from pathlib import Path
from types import ModuleType

import child
from script_modules import load_module

COURSE = child.ROOT / "docs" / "course"


def parts(text: str) -> tuple[list[str], list[float]]:
    """The words and the numbers of a text."""
    number = r"-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?"
    return re.sub(number, "#", text).split(), [float(each.replace(",", "") or 0) for each in re.findall(number, text)]


@functools.cache
def module(name: str) -> ModuleType:
    """A file of the course as a module."""
    return load_module(COURSE / f"{name}.py")


def lesson(number: int) -> Path:
    return module("check").lesson_file(number)
