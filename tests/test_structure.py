"""The rules that hold the code together, read from its syntax trees: who imports whom, where a check may be off, sizes.

Each rule is a function from a path inside the repository and a source text to complaints: it runs on every file there
is, and is shown to fail on bad sources.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from syntax import EXAMPLES, PACKAGE, ROOT, SCRIPTS, assigned, docstrings, dotted, functions, imported, parse, walked

from jaxdist.mesh import AXES

pytestmark = pytest.mark.xdist_group("structure")  # what is parsed is shared

# A module imports lower floors and its own part. A part is a folder directly in jaxdist/, or a module there.
FLOORS = (
    {"errors", "registry", "mesh", "specs", "processes"},
    {"files"},
    {"config", "jaxpr"},
    {"precision"},
    {"collectives", "data", "model", "optim"},
    {"nn"},
    {"parallel", "state"},
    {"models"},
    {"step", "train_step", "init", "checkpoint", "generation"},
    {"pretrained"},
    {"distill", "local_sgd"},
    {"build"},
    {"runtime"},
    {"plan", "observe", "launcher"},
    {"trainer"},
    {"elastic"},
    {"cli", "lab"},
    {"__main__"},
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
FOLDERS = {path.name for path in (ROOT / "jaxdist").iterdir() if (path / "__init__.py").exists()}
WITHOUT_JAX = ("errors", "registry", "config")  # read before jax is started
UNCHECKED = {
    ("jaxdist/collectives/replicated.py", "claim_replicated"),
    ("jaxdist/parallel/user_loss.py", "unchecked_region"),
}
SOCKET_FOLDERS = ("jaxdist/runtime/", "jaxdist/launcher/")
KINDS = (
    "jaxdist/parallel/strategies",
    "jaxdist/parallel/schedules",
    "jaxdist/collectives/algorithms",
    "jaxdist/data/sources",
    "jaxdist/models",
    "scripts/bench/harness/contenders",
)
FUNCTION_LINES, FILE_LINES, STEP_LINES, SCRIPT_LINES = 60, 400, 150, 60

Rule = Callable[[str, str], Iterator[str]]


def import_floors(path: str, source: str) -> Iterator[str]:
    """A module of the package imports only what its floor allows."""
    if path == "jaxdist/__init__.py":  # the public names, imported when first used
        return
    parts = Path(path).with_suffix("").parts[1:]
    own = parts[0]
    if own not in FLOOR_OF or (len(parts) > 1) != (own in FOLDERS):
        yield f"{path}: is on no known floor; give {own!r} a place in FLOORS"
        return
    public = path == "jaxdist/runtime/__init__.py"  # `runtime.spawn` is a public name of a part above
    for line, name in imported(path, parse(source)):
        package, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if package in ("jax", "jaxlib", "flax", "optax", "orbax") and (own in WITHOUT_JAX or "options" in parts[:-1]):
            yield f"{path}:{line}: {own} is read before jax is started, and imports {name}"
        if package in ("tests", "scripts"):
            yield f"{path}:{line}: imports {name}"
        if package != "jaxdist":
            continue
        if public and name in ("jaxdist", "jaxdist.spawn", "jaxdist.SpawnError"):
            continue
        if "options" in parts[:-1] and target not in WITHOUT_JAX:
            yield f"{path}:{line}: options are read before jax is started, and import {name}"
        if target not in FLOOR_OF:
            yield f"{path}:{line}: imports {name}; import it from the module that defines it"
        elif FLOOR_OF[target] > FLOOR_OF[own]:
            yield f"{path}:{line}: imports {name}, from floor {FLOOR_OF[target]} into floor {FLOOR_OF[own]}"
        elif FLOOR_OF[target] == FLOOR_OF[own] and target != own and {target, own} & FOLDERS:
            yield f"{path}:{line}: imports {name}, from another folder of floor {FLOOR_OF[own]}"


def script_imports(path: str, source: str) -> Iterator[str]:
    """A script or an example imports public modules and names of jaxdist, no other script and no test."""
    beside = {Path(script).stem for script in SCRIPTS if "harness" not in script}
    for line, name in imported(path, parse(source)):
        parts = name.split(".")
        if parts[0] == "jaxdist" and any(part.startswith("_") and not part.endswith("__") for part in parts):
            yield f"{path}:{line}: imports {name}, which is private"
        if parts[0] in {"tests", "scripts", *beside}:
            yield f"{path}:{line}: imports {name}; a script stands alone"


def unchecked_places(path: str, source: str) -> Iterator[tuple[str, str]]:
    """(path, enclosing function) wherever `check_vma` or `check_rep` is given anything but True, or is in a string."""

    def visit(node: ast.AST, where: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            where = f"{where}.{node.name}".lstrip(".")
        if isinstance(node, ast.keyword) and node.arg in ("check_vma", "check_rep"):
            if not (isinstance(node.value, ast.Constant) and node.value.value is True):
                yield path, where
        if isinstance(node, ast.Constant) and node.value in ("check_vma", "check_rep"):
            yield path, where
        for child in ast.iter_child_nodes(node):
            yield from visit(child, where)

    yield from visit(parse(source), "")


def check_stays_on(path: str, source: str) -> Iterator[str]:
    """The check of varying axes is switched off in the two named places only, once in each."""
    places = list(unchecked_places(path, source))
    for place in places:
        if place not in UNCHECKED or places.count(place) > 1:
            yield f"{path}: {place[1] or 'the module'} switches check_vma off; only these may: {sorted(UNCHECKED)}"


def no_ragged_exchange(path: str, source: str) -> Iterator[str]:
    """`ragged_all_to_all` is used nowhere: its result has the type of its output operand, whatever varies, so that the
    check of `shard_map` accepts a value that differs between devices as one that all have (jax 0.10.2 to 0.12)."""
    for node in walked(source):
        names = [each.name for each in node.names] if isinstance(node, ast.ImportFrom) else []
        if getattr(node, "attr", "") == "ragged_all_to_all" or "ragged_all_to_all" in names:
            yield f"{path}:{node.lineno}: ragged_all_to_all defeats check_vma; use all_to_all or all_gather"  # type: ignore[attr-defined]


def models_name_no_axis(path: str, source: str) -> Iterator[str]:
    """Files in models/ leave the mesh to the layers: no axis names, collectives or PartitionSpecs."""
    if not path.startswith("jaxdist/models/") or "/options/" in path:  # checks name axes in messages
        return
    collective = (
        r"psum|psum_scatter|pmean|pmax|pmin|ppermute|pshuffle|all_gather|all_gather_invariant|all_to_all|axis_index"
        r"|axis_size|pcast|pvary|pbroadcast|ragged_all_to_all|shard_map|PartitionSpec|NamedSharding|with_sharding_constraint"
    )
    tree = parse(source)
    own = docstrings(tree)
    for node in walked(source):
        if isinstance(node, ast.Constant) and node.value in AXES and node not in own:
            yield f"{path}:{node.lineno}: names the mesh axis {node.value!r}; that is for a layer in nn/"
        if isinstance(node, ast.Attribute) and re.fullmatch(collective, node.attr):
            yield f"{path}:{node.lineno}: uses {node.attr}; that is for a layer in nn/"
    for line, name in imported(path, tree):
        if re.fullmatch(collective, name.rpartition(".")[2]) or re.match(r"jaxdist\.(mesh|specs|collectives)\b", name):
            yield f"{path}:{line}: imports {name}; that is for a layer in nn/"


def sizes(path: str, source: str) -> Iterator[str]:
    """Functions and files are short enough to read at one go."""
    lines = len(source.splitlines())
    if path.startswith("scripts/"):
        limit = FILE_LINES if path.startswith("scripts/bench/") else SCRIPT_LINES
    else:
        limit = STEP_LINES if path == "jaxdist/step.py" else FILE_LINES
    if lines > limit:
        yield f"{path}: {lines} lines, the limit is {limit}"
    for node in functions(parse(source)):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > FUNCTION_LINES:
            yield f"{path}:{node.lineno}: {node.name} has {length} lines, the limit is {FUNCTION_LINES}"


def banned(path: str, source: str) -> Iterator[str]:
    """No way to run what a file holds, and nothing left undone."""
    modules = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    yaml_calls = {f"yaml.{name}" for name in ("load", "load_all", "full_load", "unsafe_load", "unsafe_load_all")}
    tree = parse(source)
    for line, name in imported(path, tree):
        if name.partition(".")[0] in modules or name in yaml_calls:
            yield f"{path}:{line}: imports {name}"
    for node in walked(source):
        if isinstance(node, ast.Name) and node.id in ("eval", "exec", "NotImplementedError"):
            yield f"{path}:{node.lineno}: {node.id}"
        if isinstance(node, ast.Attribute) and (dotted(node) in yaml_calls or dotted(node).startswith("builtins.")):
            yield f"{path}:{node.lineno}: {dotted(node)}"
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield f"{path}:{node.value.lineno}: {node.arg}"
    for number, text in enumerate(source.splitlines(), start=1):
        if mark := re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text):
            yield f"{path}:{number}: {mark[0]}"


def docstrings_everywhere(path: str, source: str) -> Iterator[str]:
    """Modules, and public functions and classes at their top level, say what they are."""
    tree = parse(source)
    if not ast.get_docstring(tree):
        yield f"{path}: has no docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                yield f"{path}:{node.lineno}: {node.name} has no docstring"


def file_is_its_name(path: str, source: str) -> Iterator[str]:
    """A file in a folder that is a registry defines what it is called after."""
    folder, name = Path(path).parent.as_posix(), Path(path).stem
    if folder not in KINDS or name.startswith("_"):
        return
    tree = parse(source)
    defined = {name for node in tree.body for name, _ in assigned(node)}
    defined |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    if name not in defined:
        yield f"{path}: does not define {name!r}"


def no_global_state(path: str, source: str) -> Iterator[str]:
    """Nothing changes at module level: containers there are constants by name, and nothing writes to them."""
    kinds = {"list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque", "ChainMap"}
    changes = {
        "append",
        "extend",
        "insert",
        "add",
        "update",
        "setdefault",
        "pop",
        "popitem",
        "remove",
        "discard",
        "clear",
        "sort",
        "reverse",
        "appendleft",
        "popleft",
        "move_to_end",
    }
    tree = parse(source)
    bodies = [tree.body] + [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
    bodies += [block for node in tree.body if isinstance(node, ast.If | ast.Try) for block in (node.body, node.orelse)]
    containers = set()
    for name, value, line in [(*pair, node.lineno) for body in bodies for node in body for pair in assigned(node)]:
        literal = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
        made = isinstance(value, ast.Call) and dotted(value.func).rpartition(".")[2] in kinds
        if literal or made:
            containers.add(name)
            if not re.fullmatch(r"_?[A-Z][A-Z0-9_]*|__\w+__", name):
                yield f"{path}:{line}: {name} is a mutable value at module level; a constant is written in capitals"
    for node in walked(source):
        if isinstance(node, ast.Global):
            yield f"{path}:{node.lineno}: global {', '.join(node.names)}"
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and dotted(node.value) in containers:
            yield f"{path}:{node.lineno}: writes to {dotted(node.value)}"
        if isinstance(node, ast.AugAssign) and dotted(node.target) in containers:
            yield f"{path}:{node.lineno}: writes to {dotted(node.target)}"
        method = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        if method is not None and method.attr in changes and dotted(method.value) in containers:
            yield f"{path}:{method.lineno}: {dotted(method)} changes a constant"


def sockets_in_one_place(path: str, source: str) -> Iterator[str]:
    """Only `SOCKET_FOLDERS` import sockets: all connections are made, limited and ended in one way."""
    if not path.startswith(SOCKET_FOLDERS):
        for line, name in imported(path, parse(source)):
            if name.partition(".")[0] in ("socket", "_socket", "socketserver"):
                yield f"{path}:{line}: imports {name}; use jaxdist.runtime.network.connection"


def jaxprs_in_one_place(path: str, source: str) -> Iterator[str]:
    """Only the walker in jaxpr/ looks at equations of jaxprs; others call it."""
    if path.startswith("jaxdist/jaxpr/"):
        return
    for node in walked(source):
        if isinstance(node, ast.Attribute) and node.attr in ("eqns", "jaxprs_in_params", "subjaxprs"):
            yield f"{path}:{node.lineno}: .{node.attr}; call jaxdist.jaxpr.walk"
        if isinstance(node, ast.Constant) and node.value == "eqns":
            yield f"{path}:{node.lineno}: 'eqns'; call jaxdist.jaxpr.walk"
        if isinstance(node, ast.ImportFrom) and any(alias.name == "jaxprs_in_params" for alias in node.names):
            yield f"{path}:{node.lineno}: jaxprs_in_params; call jaxdist.jaxpr.walk"


def json_in_one_place(path: str, source: str) -> Iterator[str]:
    """Only these read JSON by themselves, and none of it is from elsewhere: messages, and what they wrote."""
    own = ("jaxdist/runtime/", "jaxdist/processes.py", "jaxdist/trainer/resume.py", "jaxdist/observe/metrics.py")
    if path.startswith((*own, "jaxdist/plan/report/draw_rounds.py", "jaxdist/config/json_reader.py")):
        return
    for node in walked(source):
        if isinstance(node, ast.Attribute) and dotted(node) in ("json.loads", "json.load", "json.JSONDecoder"):
            yield f"{path}:{node.lineno}: {dotted(node)}; call jaxdist.config.json_reader"


PACKAGE_RULES: tuple[Rule, ...] = (
    import_floors,
    sockets_in_one_place,
    check_stays_on,
    models_name_no_axis,
    no_ragged_exchange,
    sizes,
    banned,
    docstrings_everywhere,
    file_is_its_name,
    no_global_state,
    jaxprs_in_one_place,
    json_in_one_place,
)
SCRIPT_RULES: tuple[Rule, ...] = (script_imports, check_stays_on, sizes, banned, docstrings_everywhere, no_global_state)
EXAMPLE_RULES: tuple[Rule, ...] = (script_imports, check_stays_on, banned)


def complaints(rule: Rule, paths: list[str]) -> list[str]:
    return [text for path in paths for text in rule(path, (ROOT / path).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("rule", PACKAGE_RULES, ids=lambda rule: rule.__name__)
def test_package(rule: Rule) -> None:
    assert PACKAGE
    found = complaints(rule, PACKAGE)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", SCRIPT_RULES, ids=lambda rule: rule.__name__)
def test_scripts(rule: Rule) -> None:
    assert SCRIPTS
    found = complaints(rule, SCRIPTS)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", EXAMPLE_RULES, ids=lambda rule: rule.__name__)
def test_examples(rule: Rule) -> None:
    found = complaints(rule, EXAMPLES)
    assert not found, "\n".join(found)


def test_the_check_is_off_in_exactly_two_places() -> None:
    paths = PACKAGE + SCRIPTS + EXAMPLES
    found = [place for path in paths for place in unchecked_places(path, (ROOT / path).read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(UNCHECKED)


def test_every_kind_has_its_folder() -> None:
    for folder in KINDS:
        found = [path for path in PACKAGE + SCRIPTS if Path(path).parent.as_posix() == folder]
        assert any("__init__" not in path for path in found), folder


TWICE = "def claim_replicated():\n" + "    f(g, check_vma=False)\n" * 2
LONG = "def f():\n" + "    pass\n" * 60
GOOD = [
    (import_floors, "jaxdist/step.py", "from jaxdist.init import a\nfrom jaxdist import registry\nimport jax"),
    (import_floors, "jaxdist/parallel/strategies/ddp.py", "from jaxdist.parallel.strategy import Strategy"),
    (import_floors, "jaxdist/parallel/strategies/ddp.py", "from ..strategy import Strategy"),
    (import_floors, "jaxdist/trainer/run.py", "from jaxdist.observe import Console"),
    (import_floors, "jaxdist/config/schema.py", "if TYPE_CHECKING:\n    from jaxdist.errors import UserError"),
    (import_floors, "jaxdist/__init__.py", "from jaxdist.trainer.train import train"),
    (script_imports, "scripts/train.py", "from jaxdist.trainer.train import train\nfrom jaxdist import __version__"),
    (check_stays_on, "jaxdist/step.py", "shard_map(f, check_vma=True)"),
    (check_stays_on, "jaxdist/collectives/replicated.py", "def claim_replicated():\n    shard_map(f, check_vma=False)"),
    (models_name_no_axis, "jaxdist/models/a.py", '"""data"""\nx = "datum"\nfrom jax.lax import scan'),
    (models_name_no_axis, "jaxdist/nn/a.py", 'x = "tensor"'),
    (sockets_in_one_place, "jaxdist/runtime/watch/channel.py", "import socket\nfrom socket import create_server"),
    (sockets_in_one_place, "jaxdist/cli/doctor.py", "from jaxdist.runtime.network.connection import host_name"),
    (no_ragged_exchange, "jaxdist/nn/a.py", '"""No ragged_all_to_all."""\nx = all_to_all(y)'),
    (sizes, "jaxdist/a.py", LONG.removesuffix("    pass\n")),
    (sizes, "jaxdist/a.py", "x = 1\n" * 400),
    (sizes, "jaxdist/step.py", "x = 1\n" * 150),
    (sizes, "scripts/bench/a.py", "x = 1\n" * 400),
    (banned, "jaxdist/a.py", "model.eval()\nyaml.safe_load(t)\nyaml.parse(t)\nload(f, allow_pickle=False)"),
    (docstrings_everywhere, "jaxdist/a.py", '"""A."""\ndef _f(): pass\nclass A:\n    """A."""\n    def f(self): pass'),
    (file_is_its_name, "jaxdist/parallel/strategies/ddp.py", "def ddp(options): pass"),
    (file_is_its_name, "jaxdist/collectives/algorithms/ring.py", "ring: Algorithm = Algorithm()"),
    (file_is_its_name, "jaxdist/data/loader.py", "x = 1"),
    (no_global_state, "jaxdist/a.py", '_A = {1: 2}\nB = [1]\n__all__ = ["a"]\nc = (1, 2)'),
    (no_global_state, "jaxdist/a.py", "def f():\n    x = []\n    x.append(1)"),
    (jaxprs_in_one_place, "jaxdist/jaxpr/walk.py", "jaxpr.eqns"),
    (jaxprs_in_one_place, "jaxdist/a.py", "from jaxdist.jaxpr.walk import equations\nequations(jaxpr)"),
    (json_in_one_place, "jaxdist/data/a.py", "import json\njson.dumps({})\nparse_json(text)"),
    (json_in_one_place, "jaxdist/runtime/a.py", "json.loads(line)"),
]
BAD = [
    (import_floors, "jaxdist/config/schema.py", "from jaxdist.data import Loader"),
    (import_floors, "jaxdist/mesh.py", "def f():\n    import jaxdist.step"),
    (import_floors, "jaxdist/mesh.py", "from jaxdist import step"),
    (import_floors, "jaxdist/mesh.py", "if TYPE_CHECKING:\n    from jaxdist.nn import ModelDef"),
    (import_floors, "jaxdist/data/loader.py", "from jaxdist.collectives import all_reduce"),
    (import_floors, "jaxdist/optim/make.py", "from jaxdist.data import Loader"),
    (import_floors, "jaxdist/parallel/strategies/ddp.py", "from ...models.gpt import gpt"),
    (import_floors, "jaxdist/state.py", "from jaxdist.parallel.strategy import Strategy"),
    (import_floors, "jaxdist/nn/block.py", "from jaxdist import make_mesh"),
    (import_floors, "jaxdist/nn/block.py", "from jaxdist import *"),
    (import_floors, "jaxdist/observe/metrics.py", "from jaxdist.trainer.train import train"),
    (import_floors, "jaxdist/config/schema.py", "import jax.numpy as jnp"),
    (import_floors, "jaxdist/new.py", ""),
    (import_floors, "jaxdist/new/part.py", ""),
    (import_floors, "jaxdist/step/part.py", ""),
    (import_floors, "jaxdist/nn.py", ""),
    (import_floors, "jaxdist/nn/a.py", "from tests import oracle"),
    (import_floors, "jaxdist/data/source.py", 'registry.load("jaxdist.models", name, key="model.name")'),
    (import_floors, "jaxdist/specs.py", 'importlib.import_module("jaxdist.trainer.train")'),
    (script_imports, "scripts/a.py", "from jaxdist.config.reader import _document"),
    (script_imports, "scripts/a.py", "from jaxdist._private import a"),
    (script_imports, "scripts/a.py", "import train"),
    (check_stays_on, "jaxdist/step.py", "shard_map(f, check_vma=False)"),
    (check_stays_on, "jaxdist/step.py", "shard_map(f, check_vma=not checked)"),
    (check_stays_on, "jaxdist/step.py", "shard_map(f, **{'check_vma': False})"),
    (check_stays_on, "jaxdist/step.py", "partial(shard_map, check_rep=False)"),
    (check_stays_on, "jaxdist/collectives/replicated.py", "def other():\n    shard_map(f, check_vma=False)"),
    (check_stays_on, "jaxdist/collectives/replicated.py", TWICE),
    (sockets_in_one_place, "jaxdist/cli/doctor.py", "import socket"),
    (sockets_in_one_place, "jaxdist/observe/environment.py", "def f():\n    from socket import gethostname"),
    (models_name_no_axis, "jaxdist/models/a.py", 'x = f("tensor")'),
    (no_ragged_exchange, "jaxdist/nn/a.py", "x = jax.lax.ragged_all_to_all(y, *places)"),
    (no_ragged_exchange, "jaxdist/nn/a.py", "from jax.lax import ragged_all_to_all"),
    (models_name_no_axis, "jaxdist/models/a.py", "x = lax.psum(y, axes)"),
    (models_name_no_axis, "jaxdist/models/a.py", "from jax.lax import all_gather as g"),
    (models_name_no_axis, "jaxdist/models/a.py", "from jax.sharding import PartitionSpec as P"),
    (models_name_no_axis, "jaxdist/models/a.py", "from jaxdist.mesh import AXES"),
    (sizes, "jaxdist/a.py", LONG),
    (sizes, "jaxdist/a.py", "x = 1\n" * 401),
    (sizes, "jaxdist/step.py", "x = 1\n" * 151),
    (sizes, "scripts/a.py", "x = 1\n" * 61),
    (sizes, "scripts/bench/a.py", LONG),
    (banned, "jaxdist/a.py", "import pickle"),
    (banned, "jaxdist/a.py", "from dill import loads"),
    (banned, "jaxdist/a.py", "eval('1')"),
    (banned, "jaxdist/a.py", "run = exec"),
    (banned, "jaxdist/a.py", "yaml.load(text, Loader=yaml.SafeLoader)"),
    (banned, "jaxdist/a.py", "from yaml import unsafe_load"),
    (banned, "jaxdist/a.py", "raise NotImplementedError"),
    (banned, "jaxdist/a.py", "x = 1  # " + "TO" + "DO"),
    (banned, "jaxdist/a.py", '"""' + "FIX" + 'ME"""'),
    (banned, "jaxdist/a.py", "np.load(f, allow_pickle=True)"),
    (banned, "jaxdist/a.py", "load(name, trust_remote_code=True)"),
    (docstrings_everywhere, "jaxdist/a.py", '"""A."""\ndef f(): pass'),
    (docstrings_everywhere, "jaxdist/a.py", '"""A."""\nclass A: pass'),
    (docstrings_everywhere, "jaxdist/a.py", "x = 1"),
    (file_is_its_name, "jaxdist/parallel/strategies/ddp.py", "def DDP(options): pass"),
    (file_is_its_name, "jaxdist/parallel/schedules/gpipe.py", "def run(): pass"),
    (file_is_its_name, "jaxdist/collectives/algorithms/ring.py", "Ring = 1"),
    (file_is_its_name, "jaxdist/data/sources/text.py", ""),
    (file_is_its_name, "jaxdist/models/gpt.py", "from a import gpt"),
    (no_global_state, "jaxdist/a.py", "cache = {}"),
    (no_global_state, "jaxdist/a.py", "seen: set[str] = set()"),
    (no_global_state, "jaxdist/a.py", "a, b = [], 1\nc = d = collections.defaultdict(list)"),
    (no_global_state, "jaxdist/a.py", "class A:\n    seen = []"),
    (no_global_state, "jaxdist/a.py", "if True:\n    seen = []"),
    (no_global_state, "jaxdist/a.py", "def f():\n    global x"),
    (no_global_state, "jaxdist/a.py", "CACHE = {}\ndef f(k):\n    CACHE[k] = 1"),
    (no_global_state, "jaxdist/a.py", "CACHE = {}\ndef f(k):\n    del CACHE[k]"),
    (no_global_state, "jaxdist/a.py", "SEEN = []\ndef f(k):\n    SEEN.append(k)"),
    (no_global_state, "jaxdist/a.py", "SEEN = set()\nSEEN |= {1}"),
    (json_in_one_place, "jaxdist/data/a.py", "import json\njson.loads(text)"),
    (json_in_one_place, "jaxdist/cli/a.py", "found = map(json.loads, lines)"),
    (jaxprs_in_one_place, "jaxdist/plan/a.py", "for equation in jaxpr.eqns:\n    pass"),
    (jaxprs_in_one_place, "jaxdist/plan/a.py", 'hasattr(x, "eqns")'),
    (jaxprs_in_one_place, "jaxdist/plan/a.py", "from jax.extend.core import Literal, jaxprs_in_params"),
    (jaxprs_in_one_place, "jaxdist/plan/a.py", "jex.core.jaxprs_in_params(params)"),
]


@pytest.mark.parametrize(("rule", "path", "source"), GOOD)
def test_rule_allows(rule: Rule, path: str, source: str) -> None:
    assert not list(rule(path, source))


@pytest.mark.parametrize(("rule", "path", "source"), BAD)
def test_rule_refuses(rule: Rule, path: str, source: str) -> None:
    assert list(rule(path, source))


def test_every_rule_is_shown_to_fail() -> None:
    assert {rule for rule, _, _ in BAD} == {*PACKAGE_RULES, *SCRIPT_RULES} == {rule for rule, _, _ in GOOD}
