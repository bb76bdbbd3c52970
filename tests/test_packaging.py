"""What is promised outside the code: dependencies, version, public names, the two commands in the README, CI."""

import ast
import importlib.metadata
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxdist

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DISTRIBUTION_OF = {
    "yaml": "pyyaml",
    "orbax": "orbax-checkpoint",
    "sklearn": "scikit-learn",
}  # where the name one imports is another
COMMANDS = (
    "python3 -m venv .venv && .venv/bin/pip install -q -e . "
    "&& .venv/bin/python scripts/train.py --config configs/quickstart.yaml",
    "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/pytest",
)


def third_party(folder: str) -> set[str]:
    """Distributions imported by the files of a folder, at any depth of the syntax tree."""
    found = set()
    own = {"jaxdist", "harness", *(path.stem for each in (folder, "scripts") for path in (ROOT / each).rglob("*.py"))}
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").partition(".")[0])
    return {DISTRIBUTION_OF.get(name, name) for name in found - own - sys.stdlib_module_names}


def required(requirements: list[str]) -> set[str]:
    """Names of distributions in a list of requirements."""
    return {re.split(r"[\s\[<>=!~;]", line, maxsplit=1)[0].lower() for line in requirements}


def extra(name: str) -> set[str]:
    return required(PROJECT["project"]["optional-dependencies"][name])


def test_dependencies_are_what_the_package_imports() -> None:
    extras = set().union(*map(extra, ("hf", "bench", "arrayrecord", "parquet", "examples", "elastic")))
    imports = {name.lower() for name in third_party("jaxdist")}
    assert imports - extras == required(PROJECT["project"]["dependencies"])
    assert {name.lower() for name in third_party("scripts")} <= imports | extra("hf") | extra("bench") | extra("docs")


def test_the_test_extra_covers_the_tests() -> None:
    assert third_party("tests") <= extra("test") | extra("elastic") | required(PROJECT["project"]["dependencies"])


def test_every_requirement_has_a_lower_bound_that_holds_here() -> None:
    for line in PROJECT["project"]["dependencies"]:
        requirement, _, marker = line.partition(";")
        if marker:
            assert marker.split()[0] == "python_version"
            if ("<" in marker) != (sys.version_info < (3, 12)):
                continue
        name, bound = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement).groups()  # type: ignore[union-attr]
        versions = (importlib.metadata.version(name), bound)
        installed, needed = ([int(part) for part in re.findall(r"\d+", version)] for version in versions)
        assert installed >= needed, line


def test_the_version_has_one_source() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "jaxdist/__init__.py"
    assert f"## [{jaxdist.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    try:
        installed = importlib.metadata.version("jaxdist")
    except importlib.metadata.PackageNotFoundError:  # run from the source tree
        return
    assert installed == jaxdist.__version__, "install again: pip install -e ."


def test_the_package_is_typed() -> None:
    assert (ROOT / "jaxdist" / "py.typed").exists()


@pytest.mark.parametrize("module", ["jaxdist", "jaxdist.config.schema", "jaxdist.errors", "jaxdist.registry"])
def test_importing_it_starts_neither_jax_nor_flax(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'jax', 'jaxlib', 'flax', 'optax', 'orbax'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_public_names_resolve_and_are_documented() -> None:
    assert len(set(jaxdist.__all__)) == len(jaxdist.__all__)
    for name in jaxdist.__all__:
        value = getattr(jaxdist, name)
        if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
            made = f"{name}("  # the docstring that NamedTuple and dataclass write themselves
            assert value.__doc__ and not value.__doc__.startswith(made), f"jaxdist.{name} has no docstring"
        else:
            assert name.isupper(), f"jaxdist.{name}: a constant is written in capitals"
    assert set(jaxdist.__all__) <= set(dir(jaxdist))
    unknown = "no_such_name"
    with pytest.raises(AttributeError, match=unknown):
        getattr(jaxdist, unknown)


def test_type_checkers_see_the_same_names() -> None:
    """The lazy table and the imports under TYPE_CHECKING say the same."""
    source = ast.parse(Path(jaxdist.__file__).read_text(encoding="utf-8"))
    block = next(node for node in source.body if isinstance(node, ast.If))
    seen = {
        (alias.name, node.module) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == set(jaxdist._HOME.items()) | {(name, "jaxdist") for name in jaxdist._FOLDERS}


def test_readme_holds_the_two_commands_that_ci_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^```[^\n]*\n([^`]*python3 -m venv \.venv.*?)^```", text, re.M | re.S)
    assert block is not None
    assert tuple(block[1].splitlines()) == COMMANDS


def test_ci_is_a_program_and_names_no_registry() -> None:
    script = ROOT / ".ci" / "run"
    text = script.read_text(encoding="utf-8")
    assert os.access(script, os.X_OK)
    assert not re.search(r"https?://|--(extra-)?index-url|--find-links|PIP_\w*INDEX", text)
    bash = shutil.which("bash")
    if bash is not None:
        subprocess.run([bash, "-n", script], check=True)


@pytest.mark.xdist_group("groups")
def test_groups_reach_the_workers(request: pytest.FixtureRequest) -> None:
    """pytest and pytest-xdist must agree on how: else nothing fails, and the suite takes twice the time."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith("@groups")


TOP_LEVEL = {
    *(
        "jaxdist",
        "configs",
        "docs",
        "scripts",
        "tests",
        ".ci",
        ".gitignore",
        ".pre-commit-config.yaml",
        "pyproject.toml",
    ),
    *("README.md", "README.ko.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout of git")
def test_nothing_else_stands_at_the_top() -> None:
    """What a command has written there is easily committed with the rest."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {path.split("/")[0] for path in done.stdout.split("\0") if path} <= TOP_LEVEL
