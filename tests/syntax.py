"""The Python files of the repository, and what their syntax trees say."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "jaxdist").rglob("*.py"))
SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "scripts").rglob("*.py"))
EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.py"))
TESTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py"))


@functools.cache
def parse(source: str) -> ast.Module:
    """The tree of a source, made once for all rules: they only read it."""
    return ast.parse(source)


@functools.cache
def walked(source: str) -> tuple[ast.AST, ...]:
    """All nodes of it, found once for all rules."""
    return tuple(ast.walk(parse(source)))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def dotted(node: ast.AST) -> str:
    """ "jax.lax.psum" for such an expression, "" for any other."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def docstrings(tree: ast.Module) -> set[ast.Constant]:
    """Strings that are statements of their own: they name nothing."""
    return {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def imported(path: str, tree: ast.Module, *, by_name: bool = True) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import at any depth. by_name: those by a literal name through the registry as well.

    `from a import b` gives a.b; relative names are made absolute.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = Path(path).parent.parts
            base = ".".join(folder[: len(folder) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif by_name and isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            loads = dotted(node.func).rpartition(".")[2] in ("import_module", "load", "__import__")
            if loads and isinstance(name := node.args[0].value, str):
                yield node.lineno, name


def assigned(node: ast.stmt) -> list[tuple[str, ast.expr | None]]:
    """(name, value) for each plain name that the statement assigns."""
    if isinstance(node, ast.Assign):
        found = [(target, node.value) for target in node.targets]
        pairs: list[tuple[str, ast.expr | None]] = []
        for target, value in found:
            targets, values = [target], [value]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
                targets, values = target.elts, value.elts
            pairs += [(each.id, one) for each, one in zip(targets, values, strict=True) if isinstance(each, ast.Name)]
        return pairs
    if isinstance(node, ast.AnnAssign | ast.AugAssign) and isinstance(node.target, ast.Name):
        return [(node.target.id, node.value)]
    return []
