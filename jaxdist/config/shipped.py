"""The configurations that come with jaxdist, by name, and the arguments of commands that take one. Imports no jax."""

import re
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdist.errors import CommandParser, UserError, nearest


def shipped_folder() -> Path:
    """The folder of the shipped configurations: in an installed package, or at the top of a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def shipped() -> dict[str, Path]:
    """The files of the shipped configurations, by name."""
    return {path.stem: path for path in sorted(shipped_folder().glob("*.yaml"))}


def about(path: Path) -> str:
    """A line about a shipped configuration: the first of its comments that is no command."""
    comments = re.findall(r"^# ?(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    line = next((each for each in comments if not each.startswith("python ")), "")
    return re.sub(r"(: python .*|\. On each host:|, anywhere:)$", "", line)


def list_shipped() -> str:
    """The names of the shipped configurations, each with a line about it."""
    found = shipped()
    width = max(map(len, found), default=0)
    return "\n".join(f"{name:<{width}}  {about(path)}" for name, path in found.items())


def find_config(given: str) -> str:
    """The path of a configuration, given as a file or by the name of a shipped one. Raises `UserError`."""
    return _find(given, shipped(), key="config", what="a configuration of jaxdist", file="a YAML file")


def find_budget(given: str) -> str:
    """The path of a budget, given as a file or by the name of a shipped configuration that has one. Raises
    `UserError`."""
    found = {path.stem: path for path in sorted((shipped_folder() / "budgets").glob("*.json"))}
    return _find(given, found, key="--budget", what="a budget of jaxdist", file="a file of --write-budget")


def _find(given: str, found: dict[str, Path], *, key: str, what: str, file: str) -> str:
    if Path(given).is_file() or Path(given).name != given or Path(given).suffix:
        return given  # the reader says what is wrong with a path
    if given in found:
        return str(found[given])
    near = nearest(given, found)
    hint = f"; did you mean {near}?" if near else ""
    raise UserError(f"{key}: {given!r} is neither a file nor {what}; allowed: {file}, or {', '.join(found)}{hint}")


def with_examples(lines: Sequence[str]) -> dict[str, Any]:
    """The options of a parser whose help ends with these command lines."""
    epilog = "\n  ".join(["examples:", *lines])
    return {"epilog": epilog, "formatter_class": RawDescriptionHelpFormatter}


def add_config(parser: CommandParser) -> None:
    """Add the arguments CONFIG, --config and section.key=value to a parser."""
    parser.add_argument("--config", metavar="FILE", help="the same as CONFIG")
    text = "a YAML file, or the name of a shipped one; then settings on top of it"
    parser.add_argument("words", nargs="*", metavar="CONFIG [section.key=value ...]", help=text)


def take_config(parser: CommandParser, arguments: Namespace) -> tuple[str, list[str]]:
    """The path of the configuration that a command line names, and the settings on top of it."""
    words = list(arguments.words)
    if arguments.config is None and (not words or "=" in words[0]):
        parser.error("the following arguments are required: CONFIG")
    return find_config(words.pop(0) if arguments.config is None else arguments.config), words
