"""A folder is a registry: `jaxdist/parallel/strategies/zero3.py` defines the strategy called `zero3`, and nothing else
does."""

import difflib
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from jaxdist.errors import UserError


def names(package: str) -> list[str]:
    """Names of the instances in a folder such as "jaxdist.parallel.strategies", sorted. Imports none of them."""
    top, *inner = package.split(".")
    spec = importlib.util.find_spec(top)
    assert spec is not None and spec.origin is not None, package
    root = Path(spec.origin).parent.joinpath(*inner)
    return sorted(file.stem for file in root.glob("*.py") if not file.stem.startswith("_"))


def check(package: str, name: str, *, key: str) -> None:
    """Raise `UserError` unless `name` is in the folder, or is a dotted path to an attribute of an installed module.

    Imports nothing but the parents of a dotted path. `key` is what the message calls the setting.
    """
    if "." in name:
        module = name.rpartition(".")[0]
        try:
            found = importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):  # a parent is missing, or the path has empty parts: not found either way
            found = False
        if not found:
            raise UserError(f"{key}: no module {module!r} for the dotted path {name!r}; install it or check PYTHONPATH")
        return
    known = names(package)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"{key}: {name!r} is not known; allowed: {', '.join(known)}, or a dotted path{hint}")


def load(package: str, name: str, *, key: str) -> Any:
    """The instance called `name`: the attribute of the same name in the file of that name, or a dotted path's
    attribute."""
    check(package, name, key=key)
    module_name, _, attribute = name.rpartition(".") if "." in name else (f"{package}.{name}", "", name)
    module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise UserError(f"{key}: module {module_name!r} has no attribute {attribute!r}")
    return getattr(module, attribute)
