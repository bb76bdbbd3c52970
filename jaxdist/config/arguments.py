"""Types of the options of commands, for `add_argument(type=...)`: what they refuse is one line, before any work."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxdist.config.rules.fields import Rule, show
from jaxdist.errors import UserError
from jaxdist.files.user_path import user_path

# The endings of names by which matplotlib knows a picture's format.
_PICTURES = (".png", ".svg", ".svgz", ".pdf", ".ps", ".eps", ".jpg", ".jpeg", ".tif", ".tiff", ".webp")


def numeric(kind: type, **limits: Any) -> Callable[[str], Any]:
    """The type of an option that is a number. kind: int or float. limits: of a `Rule`, as at_least=1."""
    rule, limit = Rule("", **limits), 2**32 - 1 if kind is int else 1e300
    allowed = rule.allowed(kind, False)

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{show(text)}; allowed: {allowed}") from None
        if not rule.holds(value) or not abs(value) <= limit:  # no NaN either
            most = f", at most {limit}" if rule.holds(value) else ""
            raise argparse.ArgumentTypeError(f"{text[:80]}; allowed: {allowed}{most}")
        return value

    return read


COUNT = numeric(int, at_least=1)
BEST = "best"


def step_of_run(text: str) -> int | str:
    """The type of an option that names a checkpoint: its step, or `BEST`."""
    if text == BEST:
        return text
    try:
        return int(numeric(int, at_least=0)(text))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or {BEST}") from None


def output_file(text: str) -> Path:
    """The type of an option that is a file to write, at the end of the work. Nothing is made yet."""
    path = _path(text)
    if path.is_dir():
        raise _refused(path, "is a folder", f"a file, as {path / 'out'}")
    if not path.exists() and not path.absolute().parent.is_dir():
        raise _refused(path, "its folder does not exist", "a file in a folder that is there; make it first")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise _refused(path, "it cannot be written", "a file that you may write")
    return path


def picture_file(text: str) -> Path:
    """As `output_file`, of a picture, whose format is the ending of its name."""
    path = output_file(text)
    if path.suffix.lower() not in ("", *_PICTURES):  # without one, matplotlib adds .png
        raise _refused(path, "no picture is called so", f"names that end in {', '.join(_PICTURES)}")
    return path


def output_folder(text: str) -> Path:
    """The type of an option that is a folder to write, there or to be made with those above it."""
    path = _path(text)
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise _refused(path, f"{there} is a file", "a folder")
    if not os.access(there, os.W_OK):
        raise _refused(path, f"{there} cannot be written", "a folder that you may write")
    return path


def _path(text: str) -> Path:
    try:
        return user_path(text, key="")
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(": ").replace("; give", "; allowed:")) from None


def _refused(path: Path, what: str, allowed: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{str(path)!r}: {what}; allowed: {allowed}")
