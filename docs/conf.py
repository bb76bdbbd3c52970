"""The documentation site, by Sphinx: `sphinx-build -W --keep-going -b html docs build/site`."""

import io
import os
import re
import runpy
import sys
from contextlib import redirect_stdout, suppress
from importlib import import_module
from inspect import isclass, ismodule
from pathlib import Path
from typing import Any

from sphinx.util.inspect import signature as inspect_signature
from sphinx.util.inspect import stringify_signature

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))
os.environ |= {"JAX_PLATFORMS": "cpu", "COLUMNS": "92"}  # autodoc imports jax; argparse fits its help to the columns

project = author = "jaxdist"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown", ".py": "markdown"}  # the lessons of the course are pages, too
exclude_patterns = ["conf.py", "examples", "course/_*.py", "course/check.py"]
html_theme = "furo"
html_title = "jaxdist"
html_copy_source = html_show_copyright = False
smartquotes = False
highlight_language = "text"  # of blocks that name no language: they are output
myst_heading_anchors = 4
autodoc_typehints_format = "short"
maximum_signature_line_length = 90

COURSE = runpy.run_path(str(DOCS.parent / "scripts" / "docs" / "course.py"))


def lesson(path: Path) -> str:
    """A lesson of the course as a page, with what it printed and its picture."""
    page: str = COURSE["page"](COURSE["notebook"](path), f"{path.stem}.svg")
    heading, text = page.replace("](pictures/", "](../pictures/course/").split("\n", 1)
    return f"{heading}\n\nThis page is a program: `python docs/course/{path.name}`.\n{text}"


def public(module: str) -> str:
    """Every public name of a module, with its signature and docstring, as directives of autodoc."""
    import jaxdist

    loaded, lines = import_module(module), []
    for name in loaded.__all__:
        value = getattr(loaded, name)
        if ismodule(value):  # a folder, which has a page of its own
            continue
        options = [f"   :value: {value}"]
        kind = "data"
        if callable(value):
            kind = "autoclass" if isclass(value) else "autofunction"
            again = loaded is not jaxdist and name in jaxdist.__all__
            options = ["   :members:"] * isclass(value) + ["   :no-index:"] * again
        lines += [f".. {kind}:: {module}.{name}", *options, ""]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def commands(_: str) -> str:
    """What `--help` prints, of every command."""
    from jaxdist.cli.main import COMMANDS, main

    lines = []
    for name in COMMANDS:
        with redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
            main([name, "--help"])
        lines += [f"## jaxdist {name}", "```text", printed.getvalue().rstrip(), "```", ""]
    return "\n".join(lines)


def inside(page: Path, link: re.Match[str]) -> str:
    """A link of a page as the site needs it; on a code host all work. README is the index here, a program is a
    download, and what lies outside of docs/ is named by its path."""
    text, target = link.groups()
    path = (page.parent / target.partition("#")[0]).resolve()
    if path == DOCS.parent / "README.md":
        return f"[{text}](/index.md)"
    if path.is_relative_to(DOCS / "examples"):
        return f"{{download}}`{text.strip('`')} <{target}>`"  # a program, not a page
    if path.is_relative_to(DOCS) and not path.is_dir():
        return link[0]
    name = path.relative_to(DOCS.parent).as_posix()
    return f"`{name}`" if text.strip("`") in name else f"{text} (`{name}`)"


def read(app: Any, docname: str, source: list[str]) -> None:
    """Make a page of a lesson; fill `<!-- public MODULE -->` and `<!-- commands -->`; change links by `inside`."""
    page = Path(app.env.doc2path(docname))
    text = lesson(page) if page.suffix == ".py" else source[0]
    text = re.sub(r"\[([^\]\[]*)\]\((?![a-z]+:|#)([^)\s]+)\)", lambda link: inside(page, link), text)
    made = {"public": public, "commands": commands}
    source[0] = re.sub(r"<!-- (public|commands) ?(\S*) -->", lambda mark: made[mark[1]](mark[2]), text)


def plain(text: str) -> str:
    """Text as reST, in which code between backticks is the only markup."""
    parts = re.split(r"`([^`]+)`", text)
    return "".join(
        f"\\ ``{part}``\\ " if i % 2 else re.sub(r"([\\*_|<>`])", r"\\\1", part) for i, part in enumerate(parts)
    )


def docstring(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """A docstring of this package as reST: paragraphs, lists of arguments (`name: text`), examples."""
    made: list[str] = []
    kind = ""  # of the line before: text, list, arguments, example, or "" for an empty one
    for line in lines:
        text = line.lstrip()
        indent = len(line) - len(text)
        argument = re.fullmatch(r"(\w+(?:, \w+)*): (.*)", text)
        if not text:
            kind = ""
            made.append("")
        elif kind == "example" or (not kind and (line.startswith(">>>") or indent >= 4)):
            made += (
                [f"   {line}"] if kind else ["", f".. code-block:: {'text' if indent else 'pycon'}", "", f"   {line}"]
            )
            kind = "example"
        elif text.startswith("- "):
            made += ["", " " * indent + plain(text)]
            kind = "list"
        elif argument and kind != "text" and made:
            made += ["", f"{' ' * (indent // 2)}- **{argument[1]}**: {plain(argument[2])}"]
            kind = "arguments"
        elif kind in ("list", "arguments") and indent:  # an argument's text is four columns in, an item's two
            made.append(" " * (indent if kind == "list" else indent // 2) + plain(text))
        else:
            made += ["", plain(text)] if kind in ("list", "arguments") else [plain(text)]
            kind = "text"
    lines[:] = [*made, ""]


def is_field(_app: Any, _what: str, _name: str, value: Any, *_: Any) -> bool | None:
    """True, "leave it out", for a field of a NamedTuple: its docstring is of Python's making. None: as usual."""
    return (value.__doc__ or "").startswith("Alias for field number") or None


def arguments(_app: Any, what: str, _name: str, value: Any, _options: Any, signature: str, back: str) -> Any:
    """The signature of a module of Flax: Sphinx finds `*args, **kwargs`, those of its metaclass."""
    if what == "class" and signature == "(*args: Any, **kwargs: Any)":
        own = inspect_signature(value.__init__, bound_method=True)
        return stringify_signature(own, show_return_annotation=False, unqualified_typehints=True), back
    return None


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", arguments)
    app.connect("autodoc-skip-member", is_field)
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", docstring)
