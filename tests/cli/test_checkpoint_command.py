"""scripts/checkpoint.py: lists, checks, exports, imports, averages; a run goes on from what it made."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import child
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from saved_runs import NEEDS, bits, config_of, random_params, restored, save_run

from jaxdist.build import assemble
from jaxdist.checkpoint import Checkpoints
from jaxdist.checkpoint.reader import Stored, open_steps
from jaxdist.cli.work.checkpoint import average, check_all, listing
from jaxdist.config.load import to_yaml
from jaxdist.config.schema import DevicesConfig, MeshConfig, ParallelConfig, TrainConfig
from jaxdist.data import Source
from jaxdist.errors import UserError
from jaxdist.init import init_state, state_target
from jaxdist.mesh import make_mesh
from jaxdist.optim.ema import CarryingEmaState, EmaState, with_ema
from jaxdist.pretrained import open_pretrained
from jaxdist.specs import leaves_by_name
from jaxdist.state import TrainState, shardings_of
from jaxdist.trainer.resume import record

pytestmark = pytest.mark.xdist_group("huggingface")
SCRIPT = child.ROOT / "scripts" / "checkpoint.py"
STEPS = (2, 4, 10)


def command(*words: Any, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    environ = child.environment() | child.QUICK
    return subprocess.run(
        [sys.executable, script, *map(str, words)], env=environ, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps with the real optimizer's state, metrics of two, and one that was being written."""
    folder, config = tmp_path_factory.mktemp("run"), config_of("gpt2-tied", model={"layers": 1})
    parts = assemble(config, make_mesh())
    rng = np.random.default_rng(0)
    with Checkpoints(folder / "checkpoints", keep=9) as checkpoints:
        for step in STEPS:
            state = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 3, leaf.dtype), parts.target)
            source = Source(np.zeros(1, np.uint8), np.zeros(1, np.uint8), 256, {"sha256": "ab" * 32})
            checkpoints.save(step, state._replace(step=jnp.int32(step)), record(config, source))
    shutil.copytree(folder / "checkpoints" / "10", folder / "checkpoints" / "12.orbax-checkpoint-tmp")
    (folder / "config.yaml").write_text(to_yaml(config))
    lines = [{"step": 2, "loss": 2.5}, {"step": 10, "loss": 1.25, "eval/loss": 1.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_list(run_dir: Path) -> None:
    rows = [line.split() for line in listing(run_dir)]
    assert rows[0] == ["step", "MiB", "written", "loss", "eval", "loss", "state"]
    assert [(row[0], row[4:]) for row in rows[1:]] == [
        ("2", ["2.5000", "-", "complete"]),
        ("4", ["-", "-", "complete"]),
        ("10", ["1.2500", "1.5000", "complete"]),
        ("12", ["-", "-", "not", "complete", "(12.orbax-checkpoint-tmp)"]),
    ]
    inner = [line.split() for line in listing(run_dir / "checkpoints")]
    assert [row[0] for row in inner] == [row[0] for row in rows] and inner[1][-1] == "complete"
    size = sum(path.stat().st_size for path in (run_dir / "checkpoints" / "2").rglob("*") if path.is_file())
    assert float(rows[1][1]) == pytest.approx(size / 2**20, abs=0.051) and size > 50_000


def test_verify(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def problems(folder: Path) -> list[str]:
        return ["state/d/a: is missing", "b"] if folder.name == "4" else []

    assert check_all(run_dir) == 1  # 12
    assert capsys.readouterr().out.splitlines() == ["2: ok", "4: ok", "10: ok", "12.orbax-checkpoint-tmp: not complete"]
    monkeypatch.setattr("jaxdist.cli.work.checkpoint.verify", problems)
    assert check_all(run_dir) == 1
    assert "4: state/d/a: is missing; b" in capsys.readouterr().out.splitlines()


def test_other_folders_beside_the_steps(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was moved aside is no step, and a copy under a name of one's own is nobody's business."""
    folder = tmp_path / "checkpoints"
    for name in ("2", "4.damaged", "4_backup"):
        shutil.copytree(run_dir / "checkpoints" / "2", folder / name)
    assert check_all(tmp_path) == 0
    assert capsys.readouterr().out.splitlines() == ["2: ok", "4.damaged: was damaged, and is no step any more"]
    assert [line.split("  ")[-1] for line in listing(tmp_path)[1:]] == ["complete", "damaged, moved aside (4.damaged)"]
    path = folder / "2" / "meta" / "metadata"
    path.write_bytes(path.read_bytes() + b" ")
    assert check_all(tmp_path) == 1 and "meta/metadata has" in capsys.readouterr().out
    with pytest.raises(UserError, match="checkpoints/2: is damaged: meta/metadata has"):
        average(tmp_path, tmp_path / "out", last=1)


def test_average(run_dir: Path, tmp_path: Path) -> None:
    """The mean in float64, rounded once; all else is the newest's, and restored as the trainer does."""
    config = config_of(
        "gpt2-tied",
        model={"layers": 1},
        mesh=MeshConfig(fsdp=2),
        parallel=ParallelConfig(strategy="zero3", min_shard_bytes=0),
    )
    said = average(run_dir, tmp_path / "mean", last=3)
    assert said == f"the mean of steps 2, 4, 10 to {tmp_path / 'mean'}, as step 10"
    assert (tmp_path / "mean" / "config.yaml").read_text() == (run_dir / "config.yaml").read_text()
    steps = [restored(run_dir, config, step) for step in STEPS]
    got = restored(tmp_path / "mean", config, 10)
    mean = lambda *leaves: np.mean([np.asarray(leaf, np.float64) for leaf in leaves], 0).astype(np.float32)  # noqa: E731
    assert bits(got.params) == bits(jax.tree.map(mean, *(state.params for state in steps)))
    assert bits(got._replace(params=())) == bits(steps[-1]._replace(params=()))
    with (
        Checkpoints(tmp_path / "mean" / "checkpoints", keep=1) as mine,
        Checkpoints(run_dir / "checkpoints", keep=9) as its,
    ):
        assert mine.meta(10) == its.meta(10)


@pytest.mark.slow
def test_the_moving_average_becomes_the_mean_too(tmp_path: Path) -> None:
    """Evaluations read it; that the run was over by an early stop is forgotten."""
    config = config_of("gpt2-tied", model={"layers": 1}, train=TrainConfig(ema=0.9))
    source = Source(np.zeros(1, np.uint8), np.zeros(1, np.uint8), 256, {"sha256": "ab" * 32})
    for step in (1, 2):
        params = random_params(config, step)
        state = TrainState(jnp.int32(step), params, EmaState({**params, "head": {}}, {"mu": params}))
        with Checkpoints(tmp_path / "run" / "checkpoints", keep=9) as checkpoints:
            checkpoints.save(step, state, record(config, source) | {"ending": {"best": 1.0, "since": 3}})
    average(tmp_path / "run", tmp_path / "mean", last=2)
    (mean,) = open_steps(tmp_path / "mean")
    ema = mean.rest()["opt_state"]["ema"]
    assert ema["blocks"] and "ending" not in mean.meta
    for path, leaf in jax.tree_util.tree_leaves_with_path(ema):
        assert np.array_equal(mean.param(".".join(key.key for key in path)), leaf)


def test_running_statistics_are_averaged_too(tmp_path: Path) -> None:
    """Those of one step do not fit the mean of parameters. Numbers that are no floats are the newest."""
    with Checkpoints(tmp_path / "own", keep=9) as checkpoints:
        for step in (1, 2):
            carried = {"norms": [{"mean": jnp.full(3, float(step), jnp.bfloat16)}], "count": jnp.int32(step)}
            params = {"w": jnp.full(3, float(step))}
            state = CarryingEmaState(params, (), jax.tree.map(lambda leaf: leaf + 0, carried))
            checkpoints.save(step, TrainState(jnp.int32(step), params, state, model_state=carried), {})
    said = average(tmp_path / "own", tmp_path / "mean", last=2)
    assert said.endswith("as step 2; its running statistics (model_state) are the mean of theirs")
    (mean,) = open_steps(tmp_path / "mean")
    rest = mean.rest()
    for found in (rest["model_state"], rest["opt_state"]["model_state"]):
        assert {name: float(leaf.max()) for name, leaf in leaves_by_name(found).items()} == {
            "count": 2,
            "norms.0.mean": 1.5,
        }


@pytest.mark.parametrize("meta", [{}, {"parallel": "mine", "model": "mine", "precision": "bf16", "ending": 3}])
def test_a_folder_of_a_loop_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], meta: dict[str, Any]
) -> None:
    with Checkpoints(tmp_path / "own", keep=9) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, TrainState(jnp.int32(step), {"w": jnp.full(3, float(step))}, ()), meta)
    assert [line.split()[0] for line in listing(tmp_path / "own")] == ["step", "1", "2"]
    assert check_all(tmp_path / "own") == 0 and capsys.readouterr().out == "1: ok\n2: ok\n"
    average(tmp_path / "own", tmp_path / "mean", last=2)
    (mean,) = open_steps(tmp_path / "mean")
    assert np.array_equal(mean.param("w"), np.full(3, 1.5))
    assert {name: value for name, value in mean.meta.items() if name != "jaxdist"} == meta


@pytest.mark.parametrize("tree", [{"layers": [1.0, (2.0, {"w": 3.0})]}, [1.0, 2.0], 1.0], ids=str)
def test_parameters_in_lists_or_alone(tmp_path: Path, tree: Any) -> None:
    """`average` keeps the tree, and `open_pretrained` reads it, and its moving average."""
    mesh, tx = make_mesh(fsdp=2), with_ema(optax.adam(0.1), 0.9)

    def times(factor: float) -> Any:
        return jax.tree.map(lambda value: jnp.full((4, 2), factor * value), tree)

    state, target = (make(times(1), tx, mesh, strategy="zero3") for make in (init_state, state_target))
    with Checkpoints(tmp_path / "own", keep=9) as checkpoints:
        for step in (1, 2):
            params = jax.device_put(times(step), shardings_of(target.params))
            checkpoints.save(step, state._replace(params=params), {})
    average(tmp_path / "own", tmp_path / "mean", last=2)
    with Checkpoints(tmp_path / "mean" / "checkpoints", keep=1) as checkpoints:
        assert bits(checkpoints.restore(2, target).params) == bits(times(1.5))
    for ema, folder, factor in ((False, "own", 2), (True, "own", 1), (True, "mean", 1.5)):
        with open_pretrained(tmp_path / folder, ema=ema) as found:
            loaded = found.load(target.params, say=lambda line: None)
        assert jax.tree.structure(loaded) == jax.tree.structure(tree) and bits(loaded) == bits(times(factor))


@pytest.mark.slow
def test_average_refuses(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--last: 4, but the complete steps in .* are: 2, 4, 10$"):
        average(run_dir, tmp_path / "mean", last=4)
    with pytest.raises(UserError, match=r"holds no checkpoints; give a run directory"):
        listing(tmp_path)
    with pytest.raises(UserError, match=r"--output: .* is there already"):
        average(run_dir, run_dir, last=1)
    for step, width in ((1, 32), (2, 64)):
        config = config_of("llama-tied", model={"layers": 1, "width": width})
        save_run(tmp_path / "run", config, random_params(config), step=step)
    with pytest.raises(
        UserError,
        match=r"^blocks.attention.out.kernel: is float32\[1, 64, 64\] in step 2 and"
        r" float32\[1, 32, 32\] in step 1; give --last a smaller",
    ):
        average(tmp_path / "run", tmp_path / "mean", last=2)
    assert not (tmp_path / "mean").exists()


@pytest.mark.slow
def test_steps_of_several_pipelines_are_averaged(tmp_path: Path) -> None:
    plain = config_of("llama-tied")
    piped = config_of(
        "llama-tied", mesh=MeshConfig(pipe=2), parallel=ParallelConfig(schedule="interleaved", chunks=2, microbatches=2)
    )
    for step, config in ((1, plain), (2, piped)):
        save_run(tmp_path / "run", config, random_params(config), step=step)
    average(tmp_path / "run", tmp_path / "mean", last=2)
    (mean,) = open_steps(tmp_path / "mean")
    for path, leaf in jax.tree_util.tree_leaves_with_path(random_params(plain)):
        assert np.array_equal(mean.param(".".join(key.key for key in path)), leaf)


@pytest.mark.slow
def test_the_command_line(run_dir: Path, tmp_path: Path) -> None:
    """Exit statuses, one line on stderr, nothing half made."""
    done = command("export", run_dir, "--output", tmp_path / "out", "--step", "4")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"step 4 to {tmp_path / 'out'}: 16 tensors, 85,760 bytes of float32 in 1 file\n"
    assert (
        Stored(run_dir / "checkpoints" / "4").param("head.norm.scale").tobytes()
        in (tmp_path / "out" / "model.safetensors").read_bytes()
    )
    bad = command("export", run_dir, "--output", tmp_path / "out")
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
    assert bad.stderr.startswith("error: --output: ")
    assert command("ls", run_dir, "model.width=3").returncode == 2


@NEEDS
@pytest.mark.slow
def test_a_run_goes_on_from_an_import(tmp_path: Path) -> None:
    """By the commands: export, import, and a training that must resume. That every bit arrives is tested elsewhere."""
    config = config_of("llama-untied", model={"layers": 1}, devices=DevicesConfig(platform="cpu", simulated=1))
    save_run(tmp_path / "run", config, random_params(config))
    assert command("export", tmp_path / "run", "--output", tmp_path / "hf").returncode == 0
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    keys = ("train.steps=1", "train.eval_every=0", "train.sample_tokens=0", "observe.report=false", "train.ema=0.9")
    done = command("import", tmp_path / "hf", "--config", tmp_path / "c.yaml", "--run-dir", tmp_path / "new", *keys)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(f"{tmp_path / 'hf'} to ")
    trained = command(
        "--config",
        tmp_path / "new" / "config.yaml",
        "--run-dir",
        tmp_path / "new",
        "checkpoint.resume=must",
        script=child.ROOT / "scripts" / "train.py",
    )
    assert trained.returncode == 0, trained.stderr
    assert json.loads((tmp_path / "new" / "metrics.jsonl").read_text())["step"] == 1
    again = command("import", tmp_path / "hf", "--config", tmp_path / "c.yaml", "--run-dir", tmp_path / "new")
    assert again.returncode == 2 and again.stderr.startswith("error: --run-dir: ")
