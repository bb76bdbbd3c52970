"""Names that tests reach through a module of jaxdist, `jaxdist.step.norm_without` say: each is there.

A slow test that replaces a function runs in one of twelve runs of CI: without this, a function that has moved is missed
there weeks later.
"""

import ast
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from types import ModuleType

import pytest
from syntax import ROOT, TESTS, dotted, parse


@functools.cache
def module(name: str) -> ModuleType | None:
    """The module of a dotted name, None where there is none."""
    try:
        return importlib.import_module(name) if importlib.util.find_spec(name) else None
    except ModuleNotFoundError:  # its parent is no package
        return None


def modules_of(tree: ast.Module) -> dict[str, str]:
    """{name in the file: dotted name} of the modules of jaxdist which a file imports. A name which is anything else
    somewhere in the file is left out."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                root = each.name.partition(".")[0]
                if root == "jaxdist":
                    found[each.asname or root] = each.name if each.asname else root
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "jaxdist":
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return {name: source for name, source in found.items() if name not in bound and module(source)}


def named(tree: ast.Module, modules: dict[str, str]) -> Iterator[tuple[int, str, str]]:
    """(line, module, name) of what a file imports from a module of jaxdist, or replaces there by `setattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "jaxdist":
            yield from ((node.lineno, str(node.module), each.name) for each in node.names)
        if not isinstance(node, ast.Call) or dotted(node.func).rpartition(".")[2] != "setattr" or len(node.args) < 2:
            continue
        place, name = node.args[:2]
        root, _, rest = dotted(place).partition(".")
        if root in modules and isinstance(name, ast.Constant):
            yield node.lineno, ".".join(filter(None, (modules[root], rest))), str(name.value)
        elif isinstance(place, ast.Constant) and str(place.value).startswith("jaxdist."):
            path, _, last = str(place.value).rpartition(".")
            yield node.lineno, path, last


def missing(source: str) -> Iterator[str]:
    """Complaints about names that are not there."""
    tree = parse(source)
    modules = modules_of(tree)
    for line, place, name in named(tree, modules):
        there = module(place)
        if there is not None and not hasattr(there, name) and not module(f"{place}.{name}"):
            yield f"{line}: {place} has no {name}"
    for node in ast.walk(tree):
        root, _, rest = dotted(node).partition(".") if isinstance(node, ast.Attribute) else ("", "", "")
        if root not in modules:
            continue
        name, there = modules[root], module(modules[root])
        for part in rest.split("."):
            if not isinstance(there, ModuleType):
                break  # an attribute of an object
            if not hasattr(there, part) and not module(f"{name}.{part}"):
                yield f"{node.lineno}: {name} has no {part}"
                break
            name, there = f"{name}.{part}", getattr(there, part, None)


def test_the_names_are_there() -> None:
    found = [f"{path}:{each}" for path in TESTS for each in missing((ROOT / path).read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import jaxdist.step\njaxdist.step.nowhere = 1\n",
        "import jaxdist.step as s\ns.nowhere = 1\n",
        "from jaxdist import step\ndef test():\n    step.nowhere()\n",
        "from jaxdist.runtime.watch import watchdog\nwatchdog.NOWHERE\n",
        "import jaxdist\njaxdist.nowhere\n",
        "import jaxdist.step\ndef test(monkeypatch):\n    monkeypatch.setattr(jaxdist.step, 'nowhere', 1)\n",
        "def test(monkeypatch):\n    monkeypatch.setattr('jaxdist.step.nowhere', 1)\n",
        "def test():\n    from jaxdist.step import nowhere\n",
    ],
)
def test_a_missing_name_is_found(source: str) -> None:
    assert len([*missing(source)]) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import jaxdist.step\njaxdist.step.norm_without.anything\n",
        "from jaxdist import step\ndef test(step):\n    step.nowhere()\n",
        "import os\nos.nowhere\n",
    ],
)
def test_what_is_there_or_is_no_module_passes(source: str) -> None:
    assert not [*missing(source)]
