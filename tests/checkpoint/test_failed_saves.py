"""Saves that fail: told in one line, tried again, never taken for saved; which checkpoints stay."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import child
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import on_page

from jaxdist.checkpoint import Checkpoints, SaveFailed, barrier, checksums
from jaxdist.checkpoint.reader import open_steps
from jaxdist.checkpoint.retention import Retention
from jaxdist.config.load import load_config
from jaxdist.errors import UserError
from jaxdist.observe import MetricsWriter, read_metrics
from jaxdist.state import TrainState
from jaxdist.trainer.train import train

pytestmark = [
    pytest.mark.xdist_group("failed saves"),
    # Writes still under way when orbax gives up report to an event loop that is closed.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
YAML = """
model: {{layers: 1, width: 8, heads: 1}}
data: {{path: {path}, seq_len: 8, global_batch: 4}}
train: {{steps: 6, eval_every: 0, sample_tokens: 0}}
checkpoint: {{every: 2}}
devices: {{platform: cpu}}
observe: {{console: plain, report: false}}
"""


def state_of(step: int, size: int = 200) -> TrainState:
    return TrainState(jnp.int32(step), {"w": jax.random.normal(jax.random.key(step), (size, size))}, ())


def assert_restores(folder: Path, step: int) -> None:
    like = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)  # noqa: E731
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.newest_intact(lambda line: pytest.fail(line)) == step
        restored = checkpoints.restore(step, jax.tree.map(like, state_of(step)))
    np.testing.assert_array_equal(np.asarray(restored.params["w"]), np.asarray(state_of(step).params["w"]))


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, where the tests may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)):
        pytest.skip("no right to mount a file system: a full disk and a read-only one are NOT tested here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_phases_of_saves(tmp_path: Path) -> None:
    """As the watch hears of them; progress goes up, but where process 0 makes the folder."""
    seen: list[tuple[int, str]] = []
    with Checkpoints(tmp_path, keep=2, entered=lambda order, phase: seen.append((order, phase))) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), {})
            checkpoints.wait()
    assert list(dict.fromkeys(phase for _, phase in seen)) == ["copying", "making its folder", "writing", "done"]
    orders = [order for order, phase in seen if phase != "making its folder"]
    assert orders == sorted(orders) and len(set(orders)) == 6


def test_a_full_disk(disk: Path) -> None:
    folder = disk / "checkpoints"
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(1, state_of(1), {})
        checkpoints.wait()
        (disk / "other").write_bytes(bytes(800_000))
        checkpoints.save(2, state_of(2), {})
        with pytest.raises(SaveFailed, match=r"^checkpoint of step 2 was not saved: No space left on device$") as error:
            checkpoints.wait()
        assert checkpoints.failed is error.value and checkpoints.latest() == 1
        with pytest.raises(SaveFailed, match="step 3"):  # still full
            checkpoints.save(3, state_of(3), {})
            checkpoints.wait()
        assert checkpoints.latest() == 1
        (disk / "other").unlink()
        checkpoints.save(4, state_of(4), {})
        checkpoints.wait()
        assert checkpoints.failed is None and checkpoints.latest() == 4
    assert steps_in(folder) == ["1", "4"], "what the failed ones left takes no room"
    assert_restores(folder, 4)


FULL = """
import logging, pathlib, sys
import jax.numpy as jnp
from jaxdist.checkpoint import Checkpoints, SaveFailed
from jaxdist.state import TrainState

class Other:
    def __del__(self):
        raise RuntimeError("Event loop is closed")

state = TrainState(jnp.int32(1), {str(number): jnp.ones(1000) for number in range(60)}, ())
with Checkpoints(pathlib.Path(sys.argv[1]), keep=2) as checkpoints:
    for step in (1, 2, 3):
        try:
            checkpoints.save(step, state, {})
            checkpoints.wait()
        except SaveFailed as error:
            print(error)
Other()
logging.getLogger("absl").error("of others")
"""


def test_a_full_disk_is_told_without_tracebacks(disk: Path) -> None:
    """Of orbax and of its writes there were hundreds. A line of each of its threads stays, and what others say."""
    (disk / "other").write_bytes(bytes(900_000))
    command = [sys.executable, "-c", FULL, str(disk / "checkpoints")]
    done = subprocess.run(command, env=child.environment(), capture_output=True, text=True, timeout=120)
    said = "checkpoint of step {} was not saved: No space left on device\n"
    assert (done.returncode, done.stdout) == (0, "".join(said.format(step) for step in (1, 2, 3)))
    assert "Other.__del__" in done.stderr and "of others" in done.stderr
    assert done.stderr.count("call_soon_threadsafe") == 0, "of writes, whose event loop is closed"
    # How many of orbax's threads fail is not always the same, and some report in another way: a dozen was seen.
    assert done.stderr.count("Traceback") < 40, done.stderr


def test_a_disk_that_becomes_read_only(disk: Path) -> None:
    folder = disk / "checkpoints"
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(1, state_of(1), {})
        checkpoints.wait()
        assert mount("-o", "remount,ro", str(disk))
        with pytest.raises(SaveFailed, match=r"^checkpoint of step 2 was not saved: Read-only file system$"):
            checkpoints.save(2, state_of(2), {})
            checkpoints.wait()
        assert checkpoints.latest() == 1
        assert mount("-o", "remount,rw", str(disk))
        checkpoints.save(3, state_of(3), {})
    assert steps_in(folder) == ["1", "3"]
    assert mount("-o", "remount,ro", str(disk))
    with pytest.raises(UserError, match=r"cannot hold checkpoints: Read-only file system; use another --run-dir"):
        Checkpoints(disk / "new", keep=2)


def test_metrics_wait_for_room(disk: Path) -> None:
    with MetricsWriter(disk / "metrics.jsonl", resume_step=None) as writer:
        writer.write(1, {"loss": 1.0})
        with (disk / "other").open("wb", buffering=0) as other, pytest.raises(OSError, match="No space"):
            while True:
                other.write(bytes(4096))
        with pytest.raises(OSError, match="No space"):
            for step in range(2, 200):
                writer.write(step, {"loss": 1.0})
        with pytest.raises(OSError, match="No space"):
            writer.write(step + 1, {"loss": 1.0})
        (disk / "other").unlink()
        writer.write(step + 2, {"loss": 1.0})
    assert [record["step"] for record in read_metrics(disk / "metrics.jsonl")] == list(range(1, step + 3))


def test_an_old_step_that_cannot_be_removed_is_no_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, state_of(1), {})
        checkpoints._manager.wait_until_finished()
        real = checkpoints._manager.wait_until_finished

        def wait() -> None:
            real()
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

        monkeypatch.setattr(checkpoints._manager, "wait_until_finished", wait)
        with pytest.warns(UserWarning, match="step 1 is saved, but an old one is not removed: Directory not empty"):
            checkpoints.wait()
        assert checkpoints.failed is None and checkpoints.latest() == 1
        monkeypatch.undo()
    assert_restores(tmp_path, 1)


def test_another_folder_of_that_name_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of another run, or of a copy: this save has failed."""

    def seal(folder: Path, step: int) -> None:
        (tmp_path / str(step)).mkdir()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Checkpoints(tmp_path, keep=2) as checkpoints, monkeypatch.context() as patch:
        patch.setattr(checksums, "seal", seal)
        checkpoints.save(1, state_of(1), {})
        with pytest.raises(SaveFailed, match=r"^checkpoint of step 1 was not saved: No space left on device$"):
            checkpoints.wait()


def test_an_old_step_is_renamed_before_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends the removal, half a checkpoint has no valid name; the next start removes it. Folders of others
    stay."""
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), {})
        checkpoints.wait()
        real = shutil.rmtree

        def rmtree(path: Path, *arguments: object, **options: object) -> None:
            if any((Path(path) / "state").glob("*")):
                real(Path(path) / "state")
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(path, *arguments, **options)

        monkeypatch.setattr(shutil, "rmtree", rmtree)
        checkpoints.save(3, state_of(3), {})
        with pytest.warns(UserWarning, match="step 3 is saved, but an old one is not removed: Input/output error"):
            checkpoints.wait()
        monkeypatch.undo()
        assert checkpoints.latest() == 3
    assert steps_in(tmp_path) == ["1.orbax-checkpoint-tmp-removed", "2", "3"]
    (tmp_path / "notes.orbax-checkpoint-tmp").mkdir()
    assert_restores(tmp_path, 3)
    assert steps_in(tmp_path) == ["2", "3", "notes.orbax-checkpoint-tmp"]


def test_the_clock_is_set_while_a_save_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour forward or back: limits and durations go by a clock that nobody sets."""
    real, result, off = time.time, barrier._SharedFuture.result, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + off[0])
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step, hours in ((1, 1.0), (2, -1.0)):

            def late(self: Any, timeout: float | None = None, hours: float = hours) -> Any:
                off[0] += hours * 3600
                return result(self, timeout)

            monkeypatch.setattr(barrier._SharedFuture, "result", late)
            checkpoints.save(step, state_of(step), {})
            checkpoints.wait()
            assert 0 < checkpoints.longest_save < 600
        assert checkpoints.latest() == 2


def test_metrics_go_back_without_room(tmp_path: Path) -> None:
    """What was never written is sorted, too; lines are dropped where they are."""
    with MetricsWriter(tmp_path / "metrics.jsonl", resume_step=None) as metrics:
        for step in (1, 2, 3):
            metrics.write(step, {"loss": step})
        lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        os.truncate(tmp_path / "metrics.jsonl", len(lines[0]))
        metrics._unwritten = lines[1] + lines[2]
        metrics.close = lambda: None  # type: ignore[method-assign]  # the disk is full
        metrics.rewind(2)
        del metrics.close
        metrics.write(3, {"loss": 4})
    assert [record["loss"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 4]


@pytest.mark.slow
def test_a_directory_that_vanishes(tmp_path: Path) -> None:
    """Between saves it is made again; a file in its place is a failure until it goes."""
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), {})
        checkpoints.wait()
        shutil.rmtree(folder)
        checkpoints.save(3, state_of(3), {})
        checkpoints.wait()
        assert steps_in(folder) == ["3"]
        shutil.rmtree(folder)
        folder.write_text("")
        with pytest.raises(SaveFailed, match=r"^checkpoint of step 4 was not saved: (Not a directory|File exists)$"):
            checkpoints.save(4, state_of(4), {})
            checkpoints.wait()
        assert checkpoints.latest() is None
        folder.unlink()
        checkpoints.save(5, state_of(5), {})
    assert_restores(folder, 5)


@pytest.mark.slow
def test_the_process_ends_soon_after_a_failed_save(tmp_path: Path) -> None:
    """Orbax can leave threads that wait ten minutes for a folder, and the interpreter waits for threads."""
    (tmp_path / "checkpoints").mkdir()
    script = f"""
import pathlib, sys
sys.path.append("..")
import test_failed_saves as module
folder = pathlib.Path({str(tmp_path / "checkpoints")!r})
with module.Checkpoints(folder, keep=2) as checkpoints:
    folder.rmdir()
    folder.write_text("in the way")
    try:
        checkpoints.save(1, module.state_of(1), {{}})
    except module.SaveFailed as error:
        print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120
    )
    assert run.stdout == "checkpoint of step 1 was not saved: Not a directory\n", run.stderr


def test_a_step_that_vanishes_while_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checksums.seal
    with Checkpoints(tmp_path, keep=2) as checkpoints, monkeypatch.context() as patch:
        patch.setattr(checksums, "seal", lambda folder, step: (real(folder, step), shutil.rmtree(folder)))
        checkpoints.save(1, state_of(1), {})
        with pytest.raises(SaveFailed, match=r"^checkpoint of step 1 was not saved: No such file or directory$"):
            checkpoints.wait()


def fail_to_save(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """No room for these steps' checksums."""
    real = checksums.seal

    def seal(folder: Path, step: int) -> None:
        if step in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(folder, step)

    monkeypatch.setattr(checksums, "seal", seal)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.py").write_text("import x\n" * 500)
    (folder / "b.py").write_text("import y\n" * 500)
    (folder / "c.yaml").write_text(YAML.format(path=folder))
    return lambda into, *overrides: train(load_config(folder / "c.yaml", overrides), into)


def test_a_run_goes_on_after_a_failed_save(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And fails, in one line, when the last save does."""
    fail_to_save(monkeypatch, {2, 6})
    assert run(tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    [told] = [line for line in lines if line.startswith("warning: checkpoint of step 2 was not saved: No space left")]
    on_page("docs/checkpoints.md", told, {"step 2": "step 200"})
    last = "failed: checkpoint of step 6 was not saved: No space left on device; the newest checkpoint is of step 4"
    on_page("docs/checkpoints.md", last, {"step 6": "step 600", "step 4": "step 400"})
    assert lines[-1] == last and sum("step 6 was not" in line for line in lines) == 1
    assert "4" in steps_in(tmp_path / "checkpoints") and "6" not in steps_in(tmp_path / "checkpoints")
    records = [json.loads(line) for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    assert [(record["step"], record["action"]) for record in records] == [(2, "went on"), (6, "ended")]


@pytest.mark.slow
def test_a_run_resumes_before_the_damage(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a failed last save, and after damage: the step is trained and saved again, to the same bits."""
    with monkeypatch.context() as patch:
        fail_to_save(patch, {6})
        assert run(tmp_path) == 1
    assert run(tmp_path) == 0
    assert steps_in(tmp_path / "checkpoints") == ["2", "4", "6"]
    before = read_metrics(tmp_path / "metrics.jsonl")
    data = max((tmp_path / "checkpoints" / "6" / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    data.write_bytes(bytes(data.stat().st_size))
    capsys.readouterr()
    assert run(tmp_path) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "is damaged" in line]
    assert line.startswith("warning: ")
    assert f"checkpoint of step 6 is damaged: {data.relative_to(tmp_path / 'checkpoints' / '6')} changed" in line
    assert steps_in(tmp_path / "checkpoints") == ["2", "4", "6", "6.damaged"]
    after = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["loss"] for record in after] == [record["loss"] for record in before]
    incidents = [json.loads(line) for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    assert incidents[-1]["what"] in line
    for step in (2, 4, 6):
        (tmp_path / "checkpoints" / str(step) / "meta" / "metadata").unlink()
    with pytest.raises(UserError, match=r"is damaged \(step 6: meta/metadata is missing; step 4: .*; step 2: .*\)"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (Retention(3), {7, 8, 9}),
        (Retention(1), {8, 9}),
        (Retention(2, keep_every=4), {4, 8, 9}),
        (Retention(2, keep_best=2, losses={1: 0.5, 2: 0.2, 3: float("nan"), 4: 0.2, 9: 0.9}), {2, 4, 8, 9}),
        (Retention(2, keep_every=5, keep_best=1, losses={9: 0.1, 1: 0.3}), {5, 8, 9}),
    ],
)
def test_what_is_kept(policy: Retention, kept: set[int]) -> None:
    assert policy.kept(range(1, 10)) == kept


@pytest.mark.parametrize("value", ["3", None, -1, 1.5, True])
@pytest.mark.parametrize(("name", "least"), [("keep", 1), ("keep_every", 0), ("keep_best", 0)])
def test_numbers_of_what_is_kept(tmp_path: Path, name: str, least: int, value: Any) -> None:
    """Checked before the folder is made, not by the thread of the second save."""
    line = re.escape(f"{name}: {value!r}; allowed: an integer >= {least}")
    with pytest.raises(UserError, match=f"^{line}$"):
        Checkpoints(tmp_path / "new", **{"keep": 1, name: value})
    assert not (tmp_path / "new").exists()


def test_kept_on_the_disk_and_after_a_restart(tmp_path: Path) -> None:
    state = TrainState(jnp.int32(0), {"w": jnp.ones(8)}, ())
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: 1.5, 6: 1.7, 7: 1.8}
    for part in ((1, 2, 3, 4), (5, 6, 7)):
        with Checkpoints(tmp_path, keep=1, keep_every=4, keep_best=1) as checkpoints:
            for step in part:
                checkpoints.save(step, state, {}, loss=losses[step])
    assert steps_in(tmp_path) == ["2", "4", "6", "7"]
    assert [stored.step for stored in open_steps(tmp_path, step="best")] == [2]
    for name in ("2", "4", "6"):
        shutil.rmtree(tmp_path / name)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(8, state, {}, loss=1.8)
        checkpoints.save(9, state, {})
    assert [stored.step for stored in open_steps(tmp_path, step="best")] == [8], "of equal ones the later"
    shutil.rmtree(tmp_path / "8")
    with pytest.raises(
        UserError, match="^--step: best, but no complete step in .* was saved with .*; give a number: 9"
    ):
        open_steps(tmp_path, step="best")


def test_a_damaged_step_is_not_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is passed over and named, as the newest one is. So is one of which nobody can say how good it was."""
    with Checkpoints(tmp_path, keep=4) as checkpoints:
        for step, loss in {1: 3.0, 2: 1.0, 3: 2.0, 4: None}.items():
            checkpoints.save(step, state_of(step), {}, loss=loss)
    passed = "checkpoint of step {} is damaged, and passed over: "
    (tmp_path / "2" / "state" / "_METADATA").unlink()
    assert [stored.step for stored in open_steps(tmp_path, step="best")] == [3]
    assert capsys.readouterr().err == passed.format(2) + "state/_METADATA is missing\n"
    (tmp_path / "3" / "meta" / "metadata").write_text("{")
    lines: list[str] = []
    assert [stored.step for stored in open_steps(tmp_path, step="best", say=lines.append)] == [1]
    assert [line.partition(" is ")[0] for line in lines] == ["checkpoint of step 3", "checkpoint of step 2"]
    assert lines[0] == passed.format(3) + "its evaluation loss cannot be read"
    (tmp_path / "1" / "state" / "_METADATA").unlink()
    refused = "^--step: best, but all steps in .* with an evaluation's loss are damaged; give a number: 4$"
    with pytest.raises(UserError, match=refused):
        open_steps(tmp_path, step="best")
    assert steps_in(tmp_path) == ["1", "2", "3", "4"], "they stay"


@pytest.mark.slow
def test_the_loss_of_a_run_s_evaluation_decides(run: Callable[..., int], tmp_path: Path) -> None:
    overrides = ("train.eval_every=2", "train.eval_batches=1", "checkpoint.every=1", "checkpoint.keep_best=1")
    assert run(tmp_path, *overrides, "checkpoint.keep=1", "optimizer.lr=3.0", "optimizer.clip_norm=0") == 0
    records = read_metrics(tmp_path / "metrics.jsonl")
    losses = {record["step"]: record["eval/loss"] for record in records if "eval/loss" in record}
    best = min(losses, key=lambda step: losses[step])
    assert checksums.record_of(tmp_path / "checkpoints" / str(best))["loss"] == losses[best]
    assert set(steps_in(tmp_path / "checkpoints")) == {"5", "6", str(best)}


def test_the_best_need_evaluations(run: Callable[..., int], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^checkpoint.keep_best: 2 goes by evaluations, and train.eval_every is 0"):
        run(tmp_path, "checkpoint.keep_best=2")
