"""`jaxdist eval`: the numbers of evaluations in training, on any mesh. It writes nothing; what cannot be is told."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from levels import others_slow

from jaxdist.checkpoint.reader import Stored, open_steps
from jaxdist.cli.main import main
from jaxdist.config.load import load_config
from jaxdist.observe import read_metrics
from jaxdist.trainer.train import train

YAML = """
model: {{layers: 2, width: 16, heads: 2}}
data: {{path: {path}, seq_len: 16, global_batch: 8}}
mesh: {{fsdp: 4}}
parallel: {{strategy: zero3, min_shard_bytes: 0}}
train: {{steps: 4, eval_every: 2, eval_batches: 2, sample_tokens: 0, ema: 0.5}}
checkpoint: {{every: 2}}
optimizer: {{schedule: constant}}
devices: {{platform: cpu}}
observe: {{console: plain, report: false}}
"""
RESNET = ["depth=18", "blocks=[1,1]", "width=4", "classes=10", "channels=1", "image_size=8", "stem=small"]
VIT = ["layers=2", "width=16", "heads=2", "classes=10", "channels=1", "image_size=8", "patch_size=4"]
BERT = ["layers=2", "width=16", "heads=2"]
CLASSIFIES, SHARDED = ["data.source=digits", "data.path=stdlib"], ["mesh.data=2", "mesh.fsdp=2"]
# {kind of run: (settings of the run, another layout)}
RUNS: dict[str, tuple[list[str], list[str]]] = {
    "gpt": ([], ["mesh.fsdp=2", "mesh.tensor=2", "mesh.pipe=2", "parallel.schedule=gpipe", "parallel.microbatches=2"]),
    "plain": (["train.ema=null"], SHARDED),
    "resnet": (["model.name=resnet", *(f"model.{each}" for each in RESNET), *CLASSIFIES], SHARDED),
    "vit": (["model.name=vit", *(f"model.{each}" for each in VIT), *CLASSIFIES], SHARDED),
    "bert": (["model.name=bert", *(f"model.{each}" for each in BERT), "data.source=masked"], SHARDED),
    "local": (["train.ema=null", "parallel.local.every=2", *SHARDED], ["parallel.local.every=0", "mesh.fsdp=4"]),
    "lora": (["optimizer.lora.rank=2"], SHARDED),
    "pipe": (["mesh.pipe=2", "mesh.fsdp=2", "parallel.schedule=gpipe", "parallel.microbatches=2"], SHARDED),
}
Said = tuple[int, str, str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.py").write_text("def f(x): return x + 1\n" * 400)
    (folder / "run.yaml").write_text(YAML.format(path=folder / "text.py"))
    return folder


def run_of(made: Path, name: str) -> Path:
    """The directory of a run, which is trained if it is not there."""
    if not (made / name).exists():
        assert train(load_config(made / "run.yaml", RUNS[name][0]), made / name) == 0
    return made / name


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: Any) -> Said:
        capsys.readouterr()
        try:
            status = main(["eval", *map(str, words)])
        except SystemExit as ended:
            status = int(ended.code or 0)
        return (status, *capsys.readouterr())

    return run


def recorded(run: Path, step: int) -> dict[str, float]:
    (record,) = (each for each in read_metrics(run / "metrics.jsonl") if each["step"] == step)
    return {name: value for name, value in record.items() if name.startswith("eval/")}


def files_of(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", others_slow(RUNS, "gpt"))
def test_the_numbers_are_those_of_training(name: str, made: Path, tmp_path: Path, say: Any) -> None:
    """On its mesh and another, of the newest step and an older one. The run directory stays as it is."""
    run = run_of(made, name)
    before = files_of(run)
    for step, more in ((4, []), (4, RUNS[name][1]), (2, ["--step", "2"])):
        status, out, err = say(run, *more, "--json", tmp_path / "found.json")
        found = json.loads((tmp_path / "found.json").read_text())
        assert (status, err, found["step"]) == (0, "", step)
        assert found["metrics"] == pytest.approx(recorded(run, step), rel=1e-5)
        assert found["moving_average"] == ("the moving average" in out) == (RUNS[name][0][:1] != ["train.ema=null"])
        first, *lines = out.splitlines()
        assert first.startswith(f"step {step} of {run}") and f"{found['batches']} held-out batches of 8, of " in first
        assert [line.split()[0] for line in lines] == list(found["metrics"])
        assert float(lines[0].split()[1]) == pytest.approx(found["metrics"]["eval/loss"], abs=1e-6)
    assert files_of(run) == before


@pytest.mark.slow
def test_raw_parameters(made: Path, tmp_path: Path, say: Any) -> None:
    """An average does not change the training: these are evaluated by a run without one."""
    assert say(run_of(made, "gpt"), "--raw", "--json", tmp_path / "found.json")[0] == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["metrics"] == pytest.approx(recorded(run_of(made, "plain"), 4), rel=1e-5)
    status, out, err = say(made / "plain", "--raw")
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("error: --raw: the run keeps no moving")


def test_other_data_and_all_of_it(made: Path, tmp_path: Path, say: Any) -> None:
    (tmp_path / "other.txt").write_text("none of the words of training\n" * 400)
    found = []
    for more in (["--all"], [f"data.path={tmp_path / 'other.txt'}"]):
        assert say(run_of(made, "gpt"), *more, "--json", tmp_path / "found.json")[0] == 0
        found.append(json.loads((tmp_path / "found.json").read_text()))
    assert [each["batches"] for each in found] == [4, 2] and found[1]["settings"] == more
    assert found[1]["metrics"]["eval/loss"] > found[0]["metrics"]["eval/loss"] + 0.05


@pytest.mark.slow
def test_other_data_are_held_out_of_themselves(tmp_path: Path, say: Any) -> None:
    """Not in the held-out file of the run. What is read is named."""
    for seed, name in enumerate("abc"):
        np.random.default_rng(seed).integers(0, 256, 4000).astype(np.uint8).tofile(tmp_path / f"{name}.bin")
    of, held = ([f"data.{key}={tmp_path / name}.bin" for name in "abc"] for key in ("path", "val_path"))
    sizes = ["model.width=32", "data.seq_len=32", "data.global_batch=8", "train.steps=1", "train.sample_tokens=0"]
    tokens = ["data.source=tokens", "data.token_dtype=uint8", "model.layers=1", "train.eval_every=1", of[0], held[1]]
    assert train(load_config("configs/quickstart.yaml", sizes + tokens), tmp_path / "run") == 0
    found = [say(tmp_path / "run", *more)[1] for more in ([], [of[2]], [of[2], "data.val_path=null"], [held[2]])]
    names = [Path(text.splitlines()[0].rpartition(" ")[2]).stem for text in found]
    losses = [text.splitlines()[1] for text in found]
    assert names == ["b", "c", "c", "c"] and losses[1] == losses[2] and len(set(losses)) == 3


def test_an_average_is_exported(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What evaluations take; without --ema the export says that it is not."""
    run, found = run_of(made, "gpt"), {}
    for name, more in (("raw", []), ("ema", ["--ema"])):
        assert main(["checkpoint", "export", str(run), "--output", str(tmp_path / name), *more]) == 0
        assert ("--ema exports their moving average" in capsys.readouterr().out) == (name == "raw")
        stored = Stored(open_steps(run)[0].folder, ema=name == "ema")
        found[name] = stored.param("embed.tokens.table")
        [written] = (file for file in (tmp_path / name).glob("*.safetensors"))
        assert found[name].tobytes() in written.read_bytes()
    assert not np.array_equal(found["raw"], found["ema"])
    assert main(["checkpoint", "export", str(run_of(made, "plain")), "--output", str(tmp_path / "no"), "--ema"]) == 2
    assert (
        "--ema: " in (said := capsys.readouterr().err)
        and "keeps no moving average; allowed: a run with train.ema" in said
    )


def test_a_run_of_fit_is_told_as_such(tmp_path: Path, say: Any) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert (
        "has no config.yaml; allowed: the directory of a run of jaxdist train; a run of jaxdist.fit" in say(tmp_path)[2]
    )


def test_a_damaged_checkpoint_is_passed_over(made: Path, tmp_path: Path, say: Any) -> None:
    """And stays where it is."""
    run = Path(shutil.copytree(run_of(made, "gpt"), tmp_path / "run"))
    for step, newest in ((4, "step 2 of "), (2, "")):
        with next(path for path in (run / f"checkpoints/{step}/state").rglob("*") if path.is_file()).open("ab") as file:
            file.write(b"x")
        status, out, err = say(run)
        assert out.startswith(newest) and "checkpoint of step 4 is damaged, and passed over: " in err
        assert status == (0 if newest else 2)
    assert err.splitlines()[-1].startswith(f"error: {run}: holds no intact checkpoint; ")
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"2", "4"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: RUN_DIR"),
        (["train.steps=3"], "the following arguments are required: RUN_DIR"),
        (["no/such/run"], "RUN_DIR: 'no/such/run' is no folder; allowed: the directory of a run of jaxdist train"),
        (["RUN", "--step", "3"], "--step: 3, but the complete steps in RUN are: 2, 4"),
        (["RUN", "--step", "last"], "--step: 'last'; allowed: an integer >= 0, or best"),
        (["RUN", "model.width=32"], "model.width: 32, but the model in RUN was trained with 16; leave the key out"),
        (["RUN", "optimizer.lora.rank=2"], "optimizer.lora.rank: 2, but the model in RUN was trained with 0; leave"),
        (["RUN", "data.seq_len=32"], "RUN_DIR: the average of step 4 of RUN does not fit this model: embed.positions"),
        (["RUN", "data.seqlen=32"], "data.seqlen"),
        (["RUN", "mesh.fsdp=3"], "data.global_batch: 8 does not divide by 3"),
    ],
    ids=lambda each: " ".join(each[:2]) if isinstance(each, list) else "",
)
def test_what_cannot_be_is_one_line(words: list[str], message: str, made: Path, say: Any) -> None:
    run = str(run_of(made, "gpt"))
    status, out, err = say(*(run if word == "RUN" else word for word in words))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.replace(run, "RUN").startswith(f"error: {message}")


def test_a_run_without_checkpoints_or_held_out_data(
    made: Path, tmp_path: Path, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    told = say(str(tmp_path))[2]
    assert told.endswith(
        "the directory of a run of jaxdist train; jaxdist checkpoint import makes one of this folder\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "nothing_held_out.py").write_text(
        "class Rows:\n    vocab = 256\n    __iter__ = lambda self: iter([list(range(17))] * 64)\n"
    )
    more = ("data.source=iterable", "data.path=nothing_held_out.Rows")
    status, out, err = say(run_of(made, "gpt"), *more)
    assert (status, out) == (2, "") and "source iterable holds nothing out; give one, or train without" in err
    shutil.copy(run_of(made, "gpt") / "config.yaml", tmp_path)
    status, out, err = say(tmp_path)
    assert (status, out) == (2, "") and err.startswith(f"error: {tmp_path}: holds no checkpoints; ")
