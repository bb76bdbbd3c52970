"""What every entry of a registry passes: facts and options are read without jax and say what the entry does. And that
somebody else's entry, named by a dotted path, has keys of its own."""

import ast
import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import child
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist import load_config, registry
from jaxdist.build import assemble
from jaxdist.config import entries
from jaxdist.config.entries import (
    AlgorithmFacts,
    EntryFacts,
    ModelFacts,
    ScheduleFacts,
    SourceFacts,
    StrategyFacts,
    options_of,
)
from jaxdist.config.load import to_yaml
from jaxdist.config.rules.fields import keys, setting
from jaxdist.config.schema import Config, DataConfig, ModelConfig
from jaxdist.data import load_source
from jaxdist.errors import UserError
from jaxdist.mesh import make_mesh
from jaxdist.parallel.schedules.accumulate import accumulate

ROOT = Path(__file__).parents[2]
KINDS: tuple[type[EntryFacts], ...] = (ModelFacts, SourceFacts, StrategyFacts, ScheduleFacts, AlgorithmFacts)
FOLDERS = [kind.folder for kind in KINDS]
KIND_OF = dict(zip(FOLDERS, KINDS, strict=True))
ALL = [(folder, name) for folder in FOLDERS for name in registry.names(folder)]
OPTIONAL = ("pyarrow", "array_record")

OUTSIDER = """
model: {name: outsider.model.tower, depth: 2}
data: {source: outsider.source.ramp, path: %s, factor: 3, seq_len: 8, global_batch: 8, packing: none}
mesh: {data: 2, fsdp: 2}
parallel:
  strategy: outsider.strategy.choose
  shards: true
  min_shard_bytes: 0
  schedule: outsider.schedule.in_turn
  backwards: true
  microbatches: 2
  grad_sync: {algorithm: outsider.algorithm.borrowed, like: ring}
train: {steps: 1, eval_every: 0, sample_tokens: 0}
checkpoint: {every: 0}
devices: {platform: cpu, simulated: 4, compilation_cache: false}
observe: {console: plain, report: false}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(OUTSIDER % __file__)
    return tmp_path / "config.yaml"


NO_ENTRIES = [
    "model.name=json.loads",
    "model.name=copy.deepcopy",
    *(f"{key}=os.{name}" for key in ("model.name", "data.source") for name in ("system", "environ", "PathLike")),
    *(f"parallel.{key}=os.{name}" for key in ("strategy", "schedule") for name in ("system", "environ", "PathLike")),
    "parallel.grad_sync.algorithm=os.system",
    "parallel.strategy=dataclasses.asdict",
    "data.source=pprint.pformat",
]


@pytest.mark.parametrize("override", NO_ENTRIES)
def test_a_dotted_path_to_something_that_is_no_entry(override: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {layers: 1, width: 8, heads: 1}\ndevices: {platform: cpu}\n")
    config = load_config(tmp_path / "config.yaml", [override])
    key = override.partition("=")[0].replace("parallel.grad_sync.algorithm", "algorithm")
    with pytest.raises(UserError, match=rf"^{key}: '\S+' (is|gives) .*; allowed: .*, or a dotted path") as error:
        load_source(config.data)
        assemble(config, make_mesh(data=1))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def train(file: Path, *overrides: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", str(file), "--run-dir"]
    return subprocess.run(
        [*command, str(file.parent / "run"), *overrides],
        env=child.environment() | child.QUICK | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("folder", "name"), ALL)
def test_facts_that_are_read_are_those_of_the_module(folder: str, name: str) -> None:
    module = importlib.import_module(f"{folder}.{name}")
    kind = KIND_OF[folder]
    assert kind.of(name) == getattr(module, "FACTS", kind())


@pytest.mark.parametrize(("folder", "name"), ALL)
def test_options_are_settings_that_keep_their_own_rules(folder: str, name: str) -> None:
    for options in options_of(folder, name):
        assert options is importlib.import_module(f"{folder}.options.{name}").Options
        assert options.__doc__ and keys(options)


def test_options_and_facts_belong_to_entries() -> None:
    for folder in FOLDERS:
        place = registry.folder_of(folder) / "options"
        found = {path.stem for path in place.glob("*.py")} - {"__init__"}
        assert found <= set(registry.names(folder)), place


def test_facts_and_options_are_read_without_jax() -> None:
    code = f"""
import sys
from jaxdist import registry
for folder, name in {ALL}:
    registry.facts(folder, name), registry.options(folder, name)
found = {{"jax", "flax", "numpy"}} & set(sys.modules)
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, check=True)


def test_a_schedule_of_stages_says_so() -> None:
    """A table of ticks is what a pipeline has; facts are read where the table is not."""
    for name in registry.names(ScheduleFacts.folder):
        module = importlib.import_module(f"{ScheduleFacts.folder}.{name}")
        assert ScheduleFacts.of(name).one_stage is not hasattr(module, "table"), name


def test_the_strategies_that_save_more_are_a_chain() -> None:
    for name in registry.names(StrategyFacts.folder):
        after = StrategyFacts.of(name).next
        assert not after or (after in registry.names(StrategyFacts.folder) and StrategyFacts.of(after).sharded)


def test_no_file_of_the_core_compares_names_of_entries() -> None:
    """Neither `schedule == "gpipe"` nor `"." in name`: facts say what such a condition means."""
    allowed = {
        ("jaxdist/registry.py", "."),
        ("jaxdist/config/entries.py", "."),
        ("jaxdist/config/rules/fields.py", "."),
    }
    known = {name for folder, name in ALL if folder in (ScheduleFacts.folder, StrategyFacts.folder)} | {"."}
    found = set()
    for folder in ("config", "plan", "trainer"):
        for path in (ROOT / "jaxdist" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
                values = [each.value for each in compared if isinstance(each, ast.Constant)]
                found |= {(path.relative_to(ROOT).as_posix(), value) for value in values if value in known}
    assert found <= allowed


@pytest.mark.slow
def test_outsiders_train_a_step_and_get_their_options(file: Path) -> None:
    done = train(file)
    assert done.returncode == 0, done.stderr
    for said in ("model: depth 2", "source: factor 3", "schedule: backwards True", "strategy: shards True"):
        assert said in done.stdout
    assert "algorithm: like ring" in done.stdout


@pytest.mark.slow
def test_outsiders_resume_what_they_have_trained(file: Path) -> None:
    assert train(file).returncode == 0
    again = train(file, "checkpoint.resume=must", "train.steps=2")
    assert again.returncode == 0, again.stderr
    other = train(file, "train.steps=3", "model.depth=1")
    assert other.returncode == 2 and "error: model.depth: 1, but the run in" in other.stderr


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.dept=3",
            "model.dept: unknown key (value '3'); did you mean model.depth?; keys of model (name=outsider.",
        ),
        ("model.kv_heads=3", "model.kv_heads: unknown key (value '3'); it is a key of model.name=gpt; keys of model"),
        ("model.depth=0", "model.depth: 0 is out of range; allowed: an integer >= 1"),
        ("data.factors=3", "did you mean data.factor?; keys of data (source=outsider.source.ramp): source"),
        ("data.column=a", "data.column: unknown key (value 'a'); it is a key of data.source=parquet; keys of data"),
        ("data.factor=x", "data.factor: 'x' is text; allowed: an integer >= 1"),
        ("parallel.backward=true", "did you mean parallel.backwards?; keys of parallel (strategy=outsider.strategy"),
        ("parallel.shards=3", "parallel.shards: 3 is an integer; allowed: true or false"),
        ("parallel.grad_sync.likes=ring", "did you mean parallel.grad_sync.like?; keys of parallel.grad_sync ("),
        ("data.path=/nowhere", "allowed: an existing file or folder for data.source outsider.source.ramp"),
        ("mesh.pipe=2", "parallel.schedule outsider.schedule.in_turn has one stage; allowed: 1; or"),
        ("parallel.chunks=2", "parallel.schedule outsider.schedule.in_turn; allowed: 1; or"),
    ],
)
def test_a_wrong_key_of_an_outsiders_is_one_line(override: str, message: str, file: Path) -> None:
    with pytest.raises(UserError) as error:
        load_config(file, [override, *(["mesh.data=1"] if override.startswith("mesh") else [])])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_wrong_key_ends_with_status_2(file: Path) -> None:
    done = train(file, "model.dept=3")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: model.dept: unknown key (value '3'); did you mean model.depth?;"
        " keys of model (name=outsider.model.tower): name, from, depth"
    ]


@pytest.mark.parametrize("overrides", [[], ["data.column=body"], ["data.buffer=7"], ["data.buffer=1024"]])
def test_a_key_of_another_shipped_entry_works_for_one_release(overrides: list[str], tmp_path: Path) -> None:
    """As before it changes nothing; a line says where it belongs, unless it has the value that it has by default."""
    (tmp_path / "config.yaml").write_text("data: {source: text}" if overrides else "data: {source: text, column: body}")
    code = """
import sys
from jaxdist import load_config
from jaxdist.config.schema import DataConfig
assert load_config(sys.argv[1], sys.argv[2:]).data == DataConfig()
assert not {"jax", "flax", "numpy"} & set(sys.modules)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "config.yaml"), *overrides]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    key, value, owner = ("buffer", "7", "iterable") if "data.buffer=7" in overrides else ("column", "'body'", "parquet")
    line = (
        f"data.{key}: {value} has no effect with data.source=text; write it with data.source={owner}, or leave it out:"
        " the next release refuses it"
    )
    assert done.stderr.splitlines() == ([] if "data.buffer=1024" in overrides else [line])


def test_a_mixture_has_the_keys_of_its_sources(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("data: {mixture: [a 1 text /, b 1 parquet /, c 1 iterable x.y], column: body, buffer: 3}")
    data = load_config(path, planned=True).data
    assert (data.column, data.buffer) == ("body", 3)
    text, parquet, iterable = data.parts()
    assert text == DataConfig(path="/") and parquet == DataConfig(source="parquet", path="/", column="body")
    assert iterable == DataConfig(source="iterable", path="x.y", buffer=3)
    path.write_text("data: {mixture: [a 1 text /, b 1 parquet /], buffer: 3}")
    assert not hasattr(load_config(path, planned=True).data, "buffer")


def test_files_of_older_versions_have_all_keys_at_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("data: {source: text, column: null, buffer: 1024}\nmodel: {style: llama, kv_heads: null}")
    config = load_config(path)
    assert config.data == DataConfig() and config.model == ModelConfig(style="llama")
    path.write_text(to_yaml(config))
    assert load_config(path) == config


def test_an_outsider_without_options_has_the_keys_of_the_shipped_entries() -> None:
    model = ModelConfig(name="picture_model.classifier", width=32)
    assert model.width == 32 and model.heads == ModelConfig().heads
    assert DataConfig(source="picture_model.none", column="a").buffer == 1024
    assert ModelFacts.of("picture_model.classifier") == ModelFacts()
    assert ScheduleFacts.of("picture_model.none").one_stage is None


def test_facts_of_a_schedule_are_those_of_its_function() -> None:
    """A step that is given the function itself reduces in the backward pass, too."""
    assert "accumulate" in ScheduleFacts.with_fact(one_backward_pass=True)
    assert ScheduleFacts.of(accumulate) == ScheduleFacts.of("accumulate")


def test_an_entry_that_is_not_installed_is_one_line() -> None:
    """As a checkpoint may name one."""
    with pytest.raises(UserError, match="no module 'not_here' for the dotted path 'not_here.model'"):
        ModelConfig(name="not_here.model")


def test_equal_configurations_are_equal(file: Path) -> None:
    first, second = load_config(file), load_config(file)
    assert first == second and hash(type(first.parallel)) == hash(type(second.parallel))
    file.write_text(to_yaml(first))
    assert load_config(file) == first


def test_assembled_by_hand(file: Path) -> None:
    """Facts and options are for configurations; the Python API takes an entry itself."""
    config = load_config(file)
    mesh = make_mesh(data=2, fsdp=2)
    sharded = assemble(config, mesh).target.params
    whole = assemble(load_config(file, ["parallel.shards=false"]), mesh).target.params
    for tree, wanted in ((sharded, True), (whole, False)):
        assert ("fsdp" in str(tree["blocks"]["mlp"]["up"]["kernel"].sharding.spec)) is wanted


@dataclasses.dataclass(frozen=True)
class Both:
    source: str = setting("text", "a key that `data` has already")


class NoSection:
    """No dataclass."""


@pytest.mark.parametrize(
    ("options", "message"),
    [(Both, "source: is a key of DataConfig and of Options of"), (NoSection, "is no section of settings; allowed")],
)
def test_options_that_cannot_be(options: type, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("outsider.source"), "Options", options)
    with pytest.raises(UserError, match=message):
        DataConfig(source="outsider.source.ramp")


@settings(deadline=None)  # a busy machine is no fault
@given(st.sampled_from(ALL), st.text(min_size=1, max_size=8))
def test_a_key_that_nobody_has(entry: tuple[str, str], key: str) -> None:
    folder, name = entry
    named = entries.named(type(Config().data), {"source": name}) if folder == SourceFacts.folder else ()
    assert not entries.owners(named, f"{key} of nobody")


@pytest.fixture
def stood_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the process stands in, with a module of a model, and one named like the library's `colorsys`."""
    folder = tmp_path / "stood_in"
    folder.mkdir()
    text = "import colorsys, module_beside\nmy_gpt = module_beside.found, colorsys.__file__\n"
    for name, content in {"mymodel": text, "module_beside": "found = True", "colorsys": "my_gpt = 1 / 0"}.items():
        (folder / f"{name}.py").write_text(content)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(folder)
    return folder


def test_the_folder_one_stands_in_is_searched_last(stood_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.path)
    found, colours = registry.load("jaxdist.models", "mymodel.my_gpt", key="model.name")
    assert found and colours == str(Path(os.__file__).with_name("colorsys.py")) and sys.path == before
    with pytest.raises(
        UserError, match=r"model\.name: module 'colorsys' \(.*/colorsys\.py\) has no attribute 'my_gpt'"
    ):
        registry.load("jaxdist.models", "colorsys.my_gpt", key="model.name")
    monkeypatch.chdir(stood_in.parent)
    with pytest.raises(UserError, match=f"run this in the folder that holds it \\(now {stood_in.parent}\\)"):
        registry.check("jaxdist.models", "not_here.model", key="model.name")


def test_the_folder_one_stands_in_is_searched_for_dotted_names_only(
    stood_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched, load = {}, importlib.import_module

    def spy(name: str) -> ModuleType:
        searched[name] = str(stood_in) in sys.path
        return load(name)

    monkeypatch.setattr(importlib, "import_module", spy)
    registry.load("jaxdist.models", "gpt", key="model.name")
    registry.load("jaxdist.models", "mymodel.my_gpt", key="model.name")
    assert searched == {"jaxdist.models.gpt": False, "mymodel": True}


BROKEN = {
    "needs/__init__.py": ("import not_here", r"'needs\.model' .*'not_here' \(.*/needs/__init__\.py, line 1\); install"),
    "wants.py": ("\nfrom not_here import model", r"'wants' .*'not_here' \(.*/wants\.py, line 2\); install "),
    "typo.py": ("\n\nmodel =", r"'typo' cannot be imported: SyntaxError: .* \(.*/typo\.py, line 3\); mend it there$"),
    "raises.py": ("import json\njson.loads('')", r"'raises' .*: JSONDecodeError: .* \(.*/raises\.py, line 2\); mend"),
    "value/__init__.py": ("raise ValueError('of its own')", r"ValueError: of its own \(.*/value/__init__\.py, line"),
    "mends.py": ("from jaxdist import UserError\nraise UserError('said: by itself')", r"^said: by itself$"),
}  # fmt: skip


@pytest.mark.parametrize(("path", "text", "said"), [(path, *each) for path, each in BROKEN.items()], ids=BROKEN)
def test_a_module_that_cannot_be_imported_is_one_line(path: str, text: str, said: str, stood_in: Path) -> None:
    (stood_in / path).parent.mkdir(exist_ok=True)
    (stood_in / path).write_text(text)
    package = path.removesuffix("/__init__.py")
    name = f"{package}.model.my_gpt" if package != path else f"{path.removesuffix('.py')}.model"
    importlib.invalidate_caches()
    with pytest.raises(UserError, match=said) as error:
        registry.load("jaxdist.models", name, key="model.name")
    assert "\n" not in str(error.value)


def test_an_entry_imports_what_lies_beside_it_when_it_is_called(
    stood_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stood_in / "lazy.py").write_text("def my_gpt(config):\n    import module_beside\n    return module_beside.found\n")
    importlib.invalidate_caches()
    for name in ("lazy", "module_beside"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = list(sys.path)
    assert registry.make("jaxdist.models", "lazy.my_gpt", bool, None, key="model.name") and sys.path == before


@pytest.mark.parametrize(("option", "found"), [("-B", "True"), ("-P", "False")])
def test_python_that_trusts_no_folder_finds_nothing_there(stood_in: Path, option: str, found: str) -> None:
    """-P is said when a folder may be somebody else's. The script is elsewhere: Python adds its folder by itself."""
    script = stood_in.parent / "script.py"
    script.write_text(
        "from jaxdist import UserError, registry\n"
        "try:\n    print(registry.load('jaxdist.models', 'mymodel.my_gpt', key='model.name')[0])\n"
        "except UserError as error:\n    print('or run this without -P, -I and PYTHONSAFEPATH' not in str(error))\n"
    )
    command = [sys.executable, option, str(script)]
    done = subprocess.run(command, env=child.environment(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == [found]


def test_ranks_search_the_folder_of_their_launcher(stood_in: Path) -> None:
    script = stood_in.parent / "script.py"
    script.write_text("from jaxdist import registry\nprint(registry.load('jaxdist.models', 'mymodel.my_gpt', key='k'))")
    command = [sys.executable, str(ROOT / "scripts" / "launch.py"), "-n", "2", "--", sys.executable, str(script)]
    done = subprocess.run(command, env=child.environment(), capture_output=True, text=True, check=True)
    assert done.stdout.count("(True, ") == 2, done.stdout
