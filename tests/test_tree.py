"""The rules of the tree as a whole: its size, circles of imports, names that are defined twice, names of files.

Each rule is a function from the sources of a tree, {path: text}, to complaints: it runs on the repository, and is shown
to fail on small trees.
"""

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePosixPath

import pytest
from syntax import EXAMPLES, PACKAGE, ROOT, SCRIPTS, TESTS, assigned, imported, parse

Sources = Mapping[str, str]
Rule = Callable[[Sources], Iterator[str]]

MODULES_AT_THE_TOP, FILES_IN_A_FOLDER, FORMAT_SKIPS = 12, 12, 30
REGISTRIES = (  # of these a folder has as many files as there are entries, and entries' names may be alike
    "jaxdist/parallel/strategies/",
    "jaxdist/parallel/schedules/",
    "jaxdist/collectives/algorithms/",
    "jaxdist/data/sources/",
    "jaxdist/models/",
    "jaxdist/cli/",  # a command each, whose function is main
)
ADVERBS = {
    *("about", "above", "after", "again", "ahead", "almost", "alone", "already", "always", "apart", "around", "aside"),
    *("away", "back", "before", "behind", "below", "beneath", "beside", "besides", "between", "beyond", "ends", "ever"),
    *("forth", "here", "held", "hence", "later", "meanwhile", "never", "next", "now", "off", "often", "once", "onward"),
    *("rather", "soon", "still", "taken", "then", "there", "thus", "together", "twice", "within", "yet"),
}
NOT_ADVERBS = {"assembly", "copy", "early", "family", "multiply", "only", "reply", "supply", "apply"}
ARCHITECTURE = "docs/architecture.md"
HOLDING_CASES = ("tests/test_structure.py", "tests/test_tree.py")  # sources that are wrong on purpose


def package(sources: Sources) -> dict[str, str]:
    """{path: text} of jaxdist's modules, without the public names of `jaxdist/__init__.py`."""
    return {
        path: text
        for path, text in sources.items()
        if path.startswith("jaxdist/") and path.endswith(".py") and path != "jaxdist/__init__.py"
    }


def folder_sizes(sources: Sources) -> Iterator[str]:
    """A folder can be seen at one look. A registry grows by an entry, and has no limit."""
    count = Counter(PurePosixPath(path).parent.as_posix() for path in package(sources))
    for folder, files in count.items():
        limit = MODULES_AT_THE_TOP if folder == "jaxdist" else FILES_IN_A_FOLDER
        if files > limit and f"{folder}/" not in REGISTRIES:
            yield f"{folder}: {files} files, the limit is {limit}"


def dotted_name(path: str) -> str:
    """ "jaxdist.nn.block" for jaxdist/nn/block.py, "jaxdist.nn" for jaxdist/nn/__init__.py."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def arrows(sources: Sources) -> Iterator[tuple[str, str, str]]:
    """(path, imported path, place) of the imports inside the package, those for types included; what a registry loads
    by a user's name is no import."""
    modules = package(sources)
    path_of = {dotted_name(path): path for path in modules}
    for path, text in modules.items():
        for line, name in imported(path, parse(text), by_name=False):
            target = path_of.get(name) or path_of.get(name.rpartition(".")[0])
            if target and target != path:
                yield path, target, f"{path}:{line}"


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The nodes that reach each other, by Tarjan's algorithm."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in number:
                visit(other)
            if other in stack:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == number[node]:
            part = stack[stack.index(node) :]
            del stack[-len(part) :]
            if len(part) > 1:
                found.append(sorted(part))

    for node in edges:
        if node not in number:
            visit(node)
    return found


def no_circles(sources: Sources, node_of: Callable[[str], str], what: str) -> Iterator[str]:
    places: dict[tuple[str, str], str] = {}
    for path, target, place in arrows(sources):
        if node_of(path) != node_of(target):
            places.setdefault((node_of(path), node_of(target)), place)
    edges = defaultdict(set)
    for source, target in places:
        edges[source].add(target)
    for part in circles(edges):
        inside = [f"{place} imports {t}" for (s, t), place in sorted(places.items()) if s in part and t in part]
        yield f"{part[0]} is in a circle of {what}, {', '.join(part)}:\n  " + "\n  ".join(inside)


def no_circle_of_modules(sources: Sources) -> Iterator[str]:
    """No module imports itself by way of others."""
    yield from no_circles(sources, lambda path: path, "modules")


def no_circle_of_folders(sources: Sources) -> Iterator[str]:
    """A folder without subfolders is one node; a module beside folders is a node of its own."""
    folders = {PurePosixPath(path).parent for path in package(sources)}
    with_folders = {parent for folder in folders for parent in folder.parents}

    def node_of(path: str) -> str:
        folder = PurePosixPath(path).parent
        return path if folder in with_folders else folder.as_posix()

    yield from no_circles(sources, node_of, "folders")


def names_defined_once(sources: Sources) -> Iterator[str]:
    """Who looks for a public function, class or constant finds one."""
    homes = defaultdict(list)
    for path, text in package(sources).items():
        if path.startswith(REGISTRIES):
            continue
        body = parse(text).body
        names = {name for node in body for name, _ in assigned(node) if not isinstance(node, ast.AugAssign)}
        names |= {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for name in names:
            if not name.startswith("_"):
                homes[name].append(path)
    for name, paths in sorted(homes.items()):
        if len(paths) > 1:
            yield f"{name} is defined in {', '.join(sorted(paths))}"


def files_are_nouns(sources: Sources) -> Iterator[str]:
    """No module and no folder is named by an adverb, a preposition or a participle."""
    for path in package(sources):
        for part in PurePosixPath(path).with_suffix("").parts:
            word = part.rpartition("_")[2]
            if word in ADVERBS or (word.endswith("ly") and word not in NOT_ADVERBS):
                yield f"{path}: {part!r} says how or where; a noun says what"


def few_format_skips(sources: Sources) -> Iterator[str]:
    """Only tables are laid out by hand."""
    places = []
    for path, text in sources.items():
        if path.endswith(".py") and "fmt:" in text:
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                if token.type == tokenize.COMMENT and re.match(r"#\s*fmt:\s*(skip|off)", token.string):
                    places.append(f"{path}:{token.start[0]}")
    if len(places) > FORMAT_SKIPS:
        yield f"{len(places)} times `fmt: skip`, the limit is {FORMAT_SKIPS}: {', '.join(places)}"


def tree_on_a_page(sources: Sources, page: str, wanted: set[str]) -> Iterator[str]:
    """The tree on this page names what is wanted, and nothing that is not in jaxdist/."""
    block = re.search(r"^```\njaxdist/\n(.*?)^```", sources.get(page, ""), re.MULTILINE | re.DOTALL)
    if block is None:
        yield f"{page}: no block that begins with jaxdist/"
        return
    tree = block[1].partition("\nscripts/")[0]
    shown = set(re.findall(r"(?<![\w/.])\w+(?:\.py\b|/)", tree))
    paths = [PurePosixPath(path).relative_to("jaxdist") for path in package(sources)]
    inside = {f"{part}/" for path in paths for part in path.parts[:-1]} | {path.name for path in paths}
    yield from (f"{page}: the tree does not name {name}" for name in sorted(wanted - shown))
    yield from (f"{page}: the tree names {name}, which is not there" for name in sorted(shown - inside))


def architecture_names_the_tree(sources: Sources) -> Iterator[str]:
    """The tree in docs/architecture.md names every folder, those in folders too, and every module directly in
    jaxdist/."""
    paths = [PurePosixPath(path).relative_to("jaxdist") for path in package(sources)]
    folders = {f"{part}/" for path in paths for part in path.parts[:-1]}
    yield from tree_on_a_page(sources, ARCHITECTURE, folders | {path.name for path in paths if len(path.parts) == 1})


def modules_of_tests_stand_alone(sources: Sources) -> Iterator[str]:
    """What tests share is in modules beside them: no module of tests imports another."""
    tests = {PurePosixPath(path).stem for path in sources if PurePosixPath(path).name.startswith("test_")}
    for path, text in sources.items():
        if path.startswith("tests/") and path.endswith(".py"):
            for line, name in imported(path, parse(text)):
                if tests & set(name.split(".")):
                    yield f"{path}:{line}: imports {name}, a module of tests"


def programs_in_tests_import_what_is_there(sources: Sources) -> Iterator[str]:
    """A text in a test that is a program imports modules of jaxdist that exist, also where only slow tests run it."""
    path_of = {dotted_name(path): path for path in package(sources)} | {"jaxdist": "jaxdist/__init__.py"}
    for path, text in sources.items():
        if not path.startswith("tests/") or path in HOLDING_CASES:
            continue
        for node in ast.walk(parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
                try:
                    program = parse(node.value)
                except SyntaxError:  # prose, or a part of a program
                    continue
                for line, name in imported("program.py", program, by_name=False):
                    if name.startswith("jaxdist.") and not {name, name.rpartition(".")[0]} & path_of.keys():
                        yield f"{path}:{node.lineno + line - 1}: a program imports {name}, which is not there"


RULES: tuple[Rule, ...] = (
    folder_sizes,
    no_circle_of_modules,
    no_circle_of_folders,
    names_defined_once,
    files_are_nouns,
    few_format_skips,
    architecture_names_the_tree,
    modules_of_tests_stand_alone,
    programs_in_tests_import_what_is_there,
)


@pytest.fixture(scope="module")
def repository() -> Sources:
    paths = [*PACKAGE, *SCRIPTS, *EXAMPLES, *TESTS, ARCHITECTURE]
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_repository(rule: Rule, repository: Sources) -> None:
    found = list(rule(repository))
    assert not found, "\n".join(found)


TREE = "```\njaxdist/\n  mesh.py  axes\n  nn/  layers\nscripts/  train\n```\n"
SOME = {"jaxdist/mesh.py": "", "jaxdist/nn/__init__.py": "", "jaxdist/nn/mlp.py": ""}

NESTED = SOME | {"jaxdist/nn/matmul/c.py": ""}


def files(folder: str, count: int) -> dict[str, str]:
    return {f"{folder}/part{i}.py": "" for i in range(count)}


def circle(one: str, other: str, imports: str = "import {}") -> dict[str, str]:
    """Two modules that import each other."""
    return {one: imports.format(dotted_name(other)), other: imports.format(dotted_name(one))}


A, B = "jaxdist/nn/a.py", "jaxdist/nn/b.py"
INNER = {"jaxdist/nn/matmul/c.py": "from jaxdist.nn.b import x", A: "from jaxdist.nn.matmul.c import y"}
GOOD = [
    (folder_sizes, files("jaxdist", 12) | files("jaxdist/nn", 12) | {"jaxdist/__init__.py": ""}),
    (folder_sizes, files("jaxdist/collectives/algorithms", 13)),
    (no_circle_of_modules, {A: "from jaxdist.nn import b", B: "import jax"}),
    (no_circle_of_modules, {A: 'registry.load("jaxdist.nn", n)', "jaxdist/nn/__init__.py": "import jaxdist.nn.a"}),
    (no_circle_of_modules, circle("jaxdist/__init__.py", "jaxdist/a.py")),
    (no_circle_of_folders, circle(A, B)),
    (no_circle_of_folders, INNER | {B: "import jax"}),
    (names_defined_once, {A: "def f(): pass\n_B = 1", B: "from jaxdist.nn.a import f\n_B = 1"}),
    (names_defined_once, {f"jaxdist/parallel/strategies/zero{i}.py": "NAMES = ()" for i in (1, 2)}),
    (
        files_are_nouns,
        {"jaxdist/plan/ahead_of_time.py": "", "jaxdist/nn/assembly.py": "", "jaxdist/nn/split_backward.py": ""},
    ),
    (few_format_skips, {A: "x = 1  # fmt: skip\n" * 30 + 'y = "# fmt: skip"\n'}),
    (architecture_names_the_tree, SOME | {ARCHITECTURE: TREE.replace("layers", "layers: mlp.py")}),
    (architecture_names_the_tree, SOME | {ARCHITECTURE: TREE}),
    (architecture_names_the_tree, NESTED | {ARCHITECTURE: TREE.replace("layers", "layers\n    matmul/  products")}),
    (modules_of_tests_stand_alone, {"tests/nn/test_a.py": "import layouts", "tests/layouts.py": "import jax"}),
    (programs_in_tests_import_what_is_there, {A: "", "tests/test_b.py": "P = 'from jaxdist.nn.a import f; import x'"}),
]
BAD = [
    (folder_sizes, files("jaxdist", 13)),
    (folder_sizes, files("jaxdist/nn", 13)),
    (no_circle_of_modules, circle(A, B)),
    (no_circle_of_modules, circle(A, B, "if TYPE_CHECKING:\n    from {} import T")),
    (no_circle_of_modules, circle(A, "jaxdist/nn/__init__.py", "def f():\n    import {}")),
    (no_circle_of_modules, {A: "from . import b", B: "import jaxdist.c", "jaxdist/c.py": "from jaxdist.nn.a import x"}),
    (no_circle_of_folders, {A: "import jaxdist.data.c", "jaxdist/data/c.py": "import jaxdist.nn.b", B: ""}),
    (no_circle_of_folders, INNER | {B: "import jaxdist.nn.matmul.d", "jaxdist/nn/matmul/d.py": ""}),
    (names_defined_once, {A: "def f(): pass", B: "class f: pass"}),
    (names_defined_once, {A: "X, Y = 1, 2", B: "X: int = 3"}),
    (files_are_nouns, {"jaxdist/nn/beside.py": ""}),
    (files_are_nouns, {"jaxdist/together/a.py": ""}),
    (files_are_nouns, {"jaxdist/nn/known_after.py": ""}),
    (files_are_nouns, {"jaxdist/nn/lately.py": ""}),
    (few_format_skips, {A: "x = 1  # fmt: skip\n" * 20, "tests/a.py": "# fmt: off\n" * 11}),
    (architecture_names_the_tree, SOME | {ARCHITECTURE: "jaxdist/"}),
    (architecture_names_the_tree, SOME | {ARCHITECTURE: TREE, "jaxdist/specs.py": ""}),
    (architecture_names_the_tree, SOME | {ARCHITECTURE: TREE, "jaxdist/plan/a.py": ""}),
    (architecture_names_the_tree, SOME | {ARCHITECTURE: TREE.replace("axes", "guard.py")}),
    (architecture_names_the_tree, SOME),
    (architecture_names_the_tree, NESTED | {ARCHITECTURE: TREE}),
    (architecture_names_the_tree, SOME | {ARCHITECTURE: TREE, "jaxdist/specs.py": ""}),
    (architecture_names_the_tree, SOME | {ARCHITECTURE: TREE.replace("axes", "guard.py")}),
    (modules_of_tests_stand_alone, {"tests/nn/test_a.py": "from test_b import f", "tests/nn/test_b.py": ""}),
    (modules_of_tests_stand_alone, {"tests/a.py": "from tests.nn import test_b", "tests/nn/test_b.py": ""}),
    (programs_in_tests_import_what_is_there, {A: "", "tests/test_b.py": "P = 'from jaxdist.b import f'"}),
]


@pytest.mark.parametrize(("rule", "sources"), GOOD)
def test_rule_allows(rule: Rule, sources: Sources) -> None:
    assert not list(rule(sources))


@pytest.mark.parametrize(("rule", "sources"), BAD)
def test_rule_refuses(rule: Rule, sources: Sources) -> None:
    assert list(rule(sources))


def test_every_rule_is_shown_to_fail() -> None:
    assert {rule for rule, _ in BAD} == set(RULES) == {rule for rule, _ in GOOD}
