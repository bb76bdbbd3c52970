"""Registries, which are folders: `jaxdist/parallel/strategies/zero3.py` defines the strategy called `zero3`, and is its
only registration. An entry of somebody else's is named by a dotted path.

Beside itself, an entry may have facts and options, which a configuration reads before jax is started:
- facts: `FACTS = ScheduleFacts(one_stage=True)` at the top level of the entry's file, with plain values;
- options: a dataclass `Options` in the file `options/<name>.py` of the folder, which imports no jax.
Somebody else's module has both at its top level, and is imported for them.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from jaxdist.errors import UserError, nearest

Made = TypeVar("Made")


@functools.cache
def folder_of(package: str) -> Path:
    """Where a package such as "jaxdist.parallel.strategies" lies. Imports nothing."""
    top, *inner = package.split(".")
    spec = importlib.util.find_spec(top)
    assert spec is not None and spec.origin is not None, package
    return Path(spec.origin).parent.joinpath(*inner)


def names(package: str) -> list[str]:
    """Names of the entries in a folder such as "jaxdist.parallel.strategies", sorted. Imports none of them."""
    return [*_names(package)]


@functools.cache
def _names(package: str) -> tuple[str, ...]:
    """As `names`; each folder is read once."""
    return tuple(sorted(file.stem for file in folder_of(package).glob("*.py") if not file.stem.startswith("_")))


@contextlib.contextmanager
def _beside() -> Iterator[None]:
    """A context in which modules are also searched for in the folder that the process stands in.

    It is searched last, so that a file `json.py` there hides nothing; and not at all if Python was told so
    (`python -P`, PYTHONSAFEPATH).
    """
    here = str(Path.cwd())
    if sys.flags.safe_path or here in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        if here in sys.path:  # a module may change the path itself
            sys.path.reverse()
            sys.path.remove(here)  # the last one
            sys.path.reverse()


def check(package: str, name: str, *, key: str) -> None:
    """Raise `UserError` unless `name` is in the folder, or is a dotted path to an attribute of a module that can be
    imported, from where it is installed or from the folder that the process stands in.

    Imports the module of a dotted path, and no entry of the folder. `key` is what the message calls the setting.
    """
    if "." in name:
        _module(name, key=key)
        return
    known = names(package)
    if name not in known:
        near = nearest(name, known)
        hint = f"; did you mean {near!r}?" if near else ""
        raise UserError(f"{key}: {name!r} is not known; allowed: {', '.join(known)}, or a dotted path{hint}")


def load(package: str, name: Any, *, key: str) -> Any:
    """The entry called `name`: the attribute of the same name in the file of that name, or a dotted path's attribute.

    name: may be an entry itself, such as one with its options bound; it is returned as it is.
    """
    if not isinstance(name, str):
        return name
    check(package, name, key=key)
    module_name, _, attribute = name.rpartition(".") if "." in name else (f"{package}.{name}", "", name)
    module = sys.modules[module_name] if "." in name else importlib.import_module(module_name)
    if not hasattr(module, attribute):
        where = getattr(module, "__file__", None) or "of the interpreter"
        raise UserError(f"{key}: module {module_name!r} ({where}) has no attribute {attribute!r}")
    return getattr(module, attribute)


def _module(path: str, *, key: str) -> ModuleType:
    """The module of a dotted path. Raises `UserError` where there is none, or it cannot be imported."""
    name = path.rpartition(".")[0]
    try:
        if not all(name.split(".")):
            raise ModuleNotFoundError(name=name)
        with _beside():
            return importlib.import_module(name)
    except UserError:
        raise
    except Exception as error:
        # It, or a parent, is not there, or the parent is no package. Anything else is a fault within.
        if not isinstance(error, ModuleNotFoundError) or not f"{name}.".startswith(f"{error.name}."):
            raise _broken(name, error, key=key) from error
    mend = f"run this in the folder that holds it (now {Path.cwd()})"
    if sys.flags.safe_path:
        mend = "run this without -P, -I and PYTHONSAFEPATH, by which Python searches no folder one stands in"
    raise UserError(f"{key}: no module {name!r} for the dotted path {path!r}; install it, or {mend}")


def _broken(module: str, error: Exception, *, key: str) -> UserError:
    """What is to be said of a module of somebody else's whose import failed: the error, with its file and line."""
    what, place = f"{type(error).__name__}: {error}", ""
    ours = (__file__, importlib.__file__, "<frozen ")
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(ours)]
    if isinstance(error, SyntaxError):
        what, place = f"{type(error).__name__}: {error.msg}", f"{error.filename}, line {error.lineno}"
    elif frames:  # the last one of the module and what lies beside it, not of a library that it calls
        folder = Path(frames[0].filename).parent
        last = [each for each in frames if Path(each.filename).is_relative_to(folder)][-1]
        place = f"{last.filename}, line {last.lineno}"
    mend = "mend it there"
    if isinstance(error, ModuleNotFoundError):
        mend = f"install {error.name!r}, or mend the import"
    return UserError(f"{key}: module {module!r} cannot be imported: {what} ({place}); {mend}")


def function(package: str, name: Any, *given: Any, key: str, **options: Any) -> Callable[..., Any]:
    """The entry called `name`, a function that takes these arguments. Raises `UserError` for anything else, which a
    dotted path may lead to; it is not called."""
    entry = load(package, name, key=key)
    why = "" if callable(entry) else f"it is a {type(entry).__name__}"
    home = str(getattr(getattr(entry, "func", entry), "__module__", "")).partition(".")[0]
    if callable(entry) and (inspect.isbuiltin(entry) or home in sys.stdlib_module_names):
        why = "it is a function of the interpreter"
    elif not why:
        try:
            inspect.signature(entry).bind(*given, **options)
        except (TypeError, ValueError) as error:  # ValueError: it has no signature
            why = f"as a function, it does not take what an entry is given ({error})"
    if why:
        shown = repr(name) if isinstance(name, str) else getattr(entry, "__name__", "a function")
        raise UserError(f"{key}: {shown} is no entry of {package}: {why}; {_allowed(package)}")
    return entry


def make(package: str, name: Any, kind: type[Made], *given: Any, key: str, **options: Any) -> Made:
    """What the entry called `name` makes of these arguments. Raises `UserError` if that is no `kind`.

    The folder that the process stands in is searched meanwhile: an entry may import there what lies beside it.
    """
    entry = function(package, name, *given, key=key, **options)
    with _beside() if isinstance(name, str) and "." in name else contextlib.nullcontext():
        made = entry(*given, **options)
    if not isinstance(made, kind):
        shown, wanted = repr(name) if isinstance(name, str) else "the entry", getattr(kind, "__name__", kind)
        raise UserError(f"{key}: {shown} gives a {type(made).__name__}, not a {wanted}; {_allowed(package)}")
    return made


def _allowed(package: str) -> str:
    known = [", ".join(found)] if (found := names(package)) else []
    own = "a dotted path to an entry of your own, as docs/extending.md describes"
    return f"allowed: {', or '.join([*known, own])}"


@functools.cache
def facts(package: str, name: Any) -> dict[str, Any]:
    """The facts of an entry; {} if it has none. An entry of the folder is parsed, not imported: it may import jax."""
    if not isinstance(name, str):  # a function, or a `functools.partial` of one
        name = f"{getattr(name, 'func', name).__module__}."
    if "." in name:
        found = getattr(_module(name, key=package), "FACTS", None)
        if not dataclasses.is_dataclass(found):
            return {}  # there is none, or it is something else that has this name
        return vars(found)
    file = folder_of(package) / f"{name}.py"
    for node in ast.parse(file.read_text("utf-8")).body if file.exists() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FACTS":
            assert isinstance(node.value, ast.Call), f"{package}.{name}: FACTS is no call"
            return {each.arg or "": ast.literal_eval(each.value) for each in node.value.keywords}
    return {}


@functools.cache
def _options_file(package: str, name: str) -> Path | None:
    """The file with the options of an entry of the folder, or None."""
    file = folder_of(package) / "options" / f"{name}.py"
    return file if file.exists() else None


def options(package: str, name: str) -> ModuleType | None:
    """The module with the options of an entry, or None.

    For an entry of the folder it is imported without its parent packages, which may import jax.
    """
    if "." in name:
        return _module(name, key=package)
    module = f"{package}.options.{name}"
    if module in sys.modules:
        return sys.modules[module]
    file = _options_file(package, name)
    if file is None:
        return None
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None and spec.loader is not None, file
    sys.modules[module] = found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
