"""A run directory, a checkpoint or data from someone else: nothing in it is executed, nothing outside is written."""

import json
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from levels import others_slow

from jaxdist.checkpoint.checksums import CHECKSUMS, check_files, seal
from jaxdist.cli.work.checkpoint import checkpoint_command
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.trainer.train import run_directory, train

pytestmark = pytest.mark.xdist_group("hostile")  # the run is shared

YAML = """
model: {{layers: 1, width: 8, heads: 1}}
data: {{path: {path}, seq_len: 8, global_batch: 4}}
train: {{steps: 2, eval_every: 0, sample_tokens: 0}}
checkpoint: {{every: 1}}
devices: {{platform: cpu}}
observe: {{console: plain, report: false}}
"""
PLAIN = {"vocab": None, "adapter": False, "merged": False, "ema": False}  # of an export


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin")
    (folder / "text.py").write_text("import x\n" * 500)
    (folder / "run.yaml").write_text(YAML.format(path=folder / "text.py"))
    assert train(load_config(folder / "run.yaml"), folder / "run") == 0
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the run's, that must stay as it is; `victim` looks like what is linked to it."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "victim").write_text("")
    (folder / "tree").mkdir()
    (folder / "tree" / "kept").write_text("kept")
    return folder


def link(name: str, to: str) -> Callable[[Path, Path], None]:
    def plant(run: Path, outside: Path) -> None:
        path = run / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.symlink_to(outside / to)

    return plant


def sealed(change: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    """Both steps changed, with checksums that fit: whoever can write files can write those, too."""

    def plant(run: Path, outside: Path) -> None:
        for step in (1, 2):
            folder = run / "checkpoints" / str(step)
            change(folder, outside)
            (folder / CHECKSUMS).unlink()
            seal(folder, step)
            assert check_files(folder, step).problem == ""

    return plant


def pickled(pattern: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, outside: Path) -> None:
        found = [path for path in folder.glob(pattern) if path.is_file()]
        assert found
        for path in found:
            path.write_bytes(pickle.dumps(Payload(outside / "executed")))

    return sealed(change)


def edited(name: str, edit: Callable[[dict[str, Any], Path], None]) -> Callable[[Path, Path], None]:
    def change(folder: Path, outside: Path) -> None:
        found = json.loads((folder / name).read_text())
        edit(found, outside)
        (folder / name).write_text(json.dumps(found))

    return sealed(change)


def other_handlers(found: dict[str, Any], outside: Path) -> None:
    found["item_handlers"] = dict.fromkeys([*found["item_handlers"], f"../../../{outside.name}/x"], "os.system")


def other_names(found: dict[str, Any], outside: Path) -> None:
    """Parameters called like a file outside."""
    found["use_ocdbt"] = False
    for each in found["tree_metadata"].values():
        each["key_metadata"][-1]["key"] = f"../../../../{outside.name}/victim"


def other_types(found: dict[str, Any], outside: Path) -> None:
    for each in found["tree_metadata"].values():
        each["value_metadata"]["value_type"] = "os.system"


def other_model(found: dict[str, Any], outside: Path) -> None:
    found["model"] |= {"name": "os.system", "__class__": "os.system"}
    found["config"] |= {"model.name": "os.system", "train.steps": "\x1b]0;title\x07"}


ATTACKS = {
    **{
        f"{name} is a link": link(name, "victim")
        for name in ("metrics.jsonl", "config.yaml", "env.json", "incidents.jsonl", "samples.jsonl", "report.html")
    },
    "metrics.jsonl is a link to nothing": link("metrics.jsonl", "new"),
    "checkpoints is a link": link("checkpoints", "tree"),
    "a step is a link": link("checkpoints/2", "tree"),
    "a temporary folder is a link": link("checkpoints/3.orbax-checkpoint-tmp", "tree"),
    "a damaged step is a link": link("checkpoints/2.damaged", "tree"),
    "pickles for arrays": pickled("state/**/d/*"),
    "pickles for orbax's tables": pickled("state/**/manifest.ocdbt"),
    "pickles for metadata": pickled("**/_*METADATA"),
    "a pickle for the record": pickled("meta/metadata"),
    "handlers of other names": edited("_CHECKPOINT_METADATA", other_handlers),
    "parameters that are paths": edited("state/_METADATA", other_names),
    "parameters of other types": edited("state/_METADATA", other_types),
    "a record of another model": edited("meta/metadata", other_model),
}


HARMLESS = ("handlers of other names",)  # nobody reads them


@pytest.mark.filterwarnings("ignore")  # of orbax, about what it finds
@pytest.mark.parametrize("attack", others_slow(ATTACKS, *(name for name in ATTACKS if name not in HARMLESS)))
def test_a_run_directory_from_elsewhere(
    attack: str, origin: Path, outside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(origin / "run", tmp_path / "run")
    ATTACKS[attack](tmp_path / "run", outside)
    before = content(outside)
    config = load_config(origin / "run.yaml", ["train.steps=3", "observe.samples=true"])
    if "link" in attack:
        with pytest.raises(UserError, match=r"^--run-dir: '.*' is a link to '.*outside/.*', and a run writes there"):
            train(config, tmp_path / "run")
    else:
        raised = None
        try:
            assert train(config, tmp_path / "run") == 0
        except UserError as error:
            raised = error
        assert (raised is None) == (attack in HARMLESS), raised
        assert str(raised).isprintable() and len(str(raised)) < 1000
    assert content(outside) == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "outside"}
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # of orbax, about what it finds
@pytest.mark.parametrize("attack", ["pickles for arrays", "pickles for orbax's tables", "a pickle for the record"])
def test_an_export_from_elsewhere(attack: str, origin: Path, outside: Path, tmp_path: Path) -> None:
    shutil.copytree(origin / "run", tmp_path / "run")
    ATTACKS[attack](tmp_path / "run", outside)
    before = content(outside)
    command = Namespace(command="export", run_dir=tmp_path / "run", step=None, output=tmp_path / "out", **PLAIN)
    with pytest.raises(UserError, match=r"^/.*/2 cannot be read: .+; use another one$") as error:
        checkpoint_command(command, None)
    assert str(error.value).isprintable()
    assert content(outside) == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["hostile_model.gpt", "not_installed.gpt", "gpt.\x1b]0;title\x07", ["gpt"], None])
def test_an_export_of_a_model_that_is_a_module(
    name: Any, origin: Path, outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options of a model are made from its module: one that a checkpoint names is not imported."""
    (tmp_path / "hostile_model.py").write_text(f"open({str(outside / 'executed')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(origin / "run", tmp_path / "run")
    edited("meta/metadata", lambda found, _: found["model"].update(name=name))(tmp_path / "run", outside)
    before = content(outside)
    command = Namespace(command="export", run_dir=tmp_path / "run", step=None, output=tmp_path / "out", **PLAIN)
    with pytest.raises(
        UserError, match=r"^model.name: .* has no Hugging Face format here; allowed: gpt, vit, bert$"
    ) as error:
        checkpoint_command(command, None)
    assert str(error.value).isprintable()
    assert content(outside) == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text",
    [
        "model: !!python/object/apply:os.system ['touch executed']",
        "model: !!python/name:os.system",
        "data: {path: !!python/object/new:pathlib.Path.touch [executed]}",
        "!!python/module:os",
        "a: &a [x]\nb: *a",
        "data: {path: '${oc.env:HOME}'}",
    ],
)
def test_yaml_tags(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        load_config(tmp_path / "run.yaml")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def data_config(origin: Path, *overrides: str) -> Config:
    return load_config(origin / "run.yaml", overrides)


@pytest.mark.parametrize("name", ["model.pt", "train.pkl", "train.bin"])
@pytest.mark.parametrize("source", ["text", "tokens"])
def test_a_pickle_for_data(source: str, name: str, origin: Path, outside: Path, tmp_path: Path) -> None:
    """It is bytes like any others, and no text."""
    from jaxdist.data import load_source

    planted = pickle.dumps([Payload(outside / "executed")] * 1000)
    (tmp_path / name).write_bytes(planted + b"." * (len(planted) % 2))  # a whole number of ids
    before = content(outside)
    config = data_config(origin, f"data.source={source}", f"data.path={tmp_path / name}").data
    if source == "text":
        with pytest.raises(UserError, match="^data.path: .* is binary; "):
            load_source(config)
    else:
        assert load_source(config).train.size
    assert content(outside) == before


def test_a_manifest_that_names_files_elsewhere(origin: Path, outside: Path, tmp_path: Path) -> None:
    from jaxdist.data import load_source

    folder = tmp_path / "ids"
    folder.mkdir()
    np.zeros(100, np.uint8).tofile(folder / "train.bin")
    files = {name: {"bytes": 100, "sha256": "0" * 64} for name in ("train.bin", "../outside/victim", "/etc/passwd")}
    (folder / "manifest.json").write_text(
        json.dumps({"format": 1, "dtype": "uint8", "vocab": 256, "tokenizer": "../outside/victim", "files": files})
    )
    before = content(outside)
    with pytest.raises(UserError, match=r"^data.path: '.*train.bin' is not the file that manifest.json"):
        load_source(data_config(origin, "data.source=tokens", f"data.path={folder}").data)
    assert content(outside) == before


@pytest.mark.parametrize("config", ["../evil.yaml", "..yaml", "a/../../b.yaml", "/etc/c.yaml", "...yaml"])
def test_a_run_is_called_by_the_last_part_of_its_configuration(config: str) -> None:
    folder = run_directory(None, config)
    assert folder.parent == Path("runs") and ".." not in folder.parts
