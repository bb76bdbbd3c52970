"""The run directory of whole runs: two at once, copies of hard links, one that is moved, a full disk, a refusal."""

import errno
import json
import os
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxdist.checkpoint import Checkpoints
from jaxdist.cli.work.checkpoint import checkpoint_command, listing
from jaxdist.config.load import load_config
from jaxdist.errors import UserError
from jaxdist.observe import read_metrics
from jaxdist.runtime import run_claim
from jaxdist.runtime.watch.stop import StopSignal
from jaxdist.trainer.train import train

pytestmark = pytest.mark.xdist_group("run directories")  # the finished run is shared

YAML = """
model: {{layers: 1, width: 8, heads: 1}}
data: {{path: {path}, seq_len: 8, global_batch: 4}}
train: {{steps: 4, eval_every: 0, sample_tokens: 0}}
optimizer: {{schedule: constant}}
checkpoint: {{every: 2}}
devices: {{platform: cpu}}
observe: {{console: plain, report: false, samples: true}}
"""
Run = Callable[..., int]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.py").write_text("import x\n" * 500)
    (folder / "b.py").write_text("import y\n" * 500)
    (folder / "c.yaml").write_text(YAML.format(path=folder))
    return lambda into, *overrides: train(load_config(folder / "c.yaml", overrides), into)


@pytest.fixture(scope="module")
def finished(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert run(folder) == 0
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def content(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    }


def before_step(patch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Act once, after this step and before the next one."""
    real = StopSignal.requested

    def requested(self: StopSignal, at: int) -> bool:
        if at == step:
            act()
        return real(self, at)

    patch.setattr(StopSignal, "requested", requested)


def losses(folder: Path) -> list[float]:
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


@pytest.mark.slow
def test_two_runs_in_one_directory(run: Run, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused in one line and changes nothing, not even what the first one's save has begun."""
    monkeypatch.setattr(run_claim, "OWNER_LEAVES_S", 0.1)

    def second() -> None:
        monkeypatch.undo()
        monkeypatch.setattr(run_claim, "OWNER_LEAVES_S", 0.1)
        (copy / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()
        before = content(copy)
        with pytest.raises(UserError, match=r"^--run-dir: '.*' belongs to a run under way, process \d+ on host "):
            run(copy, "train.steps=5")
        assert content(copy) == before
        (copy / "checkpoints" / "9.orbax-checkpoint-tmp").rmdir()

    before_step(monkeypatch, 5, second)
    assert run(copy, "train.steps=6") == 0
    assert len(losses(copy)) == 6 and not (copy / run_claim.LOCK).exists()


@pytest.mark.slow
def test_a_copy_of_hard_links(run: Run, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the copy's run writes, appends and cuts stays out of the original; so do its checkpoints. Its metrics have
    a bad line, which makes it write an incident, too."""
    origin, fork = Path(shutil.copytree(finished, tmp_path / "origin")), tmp_path / "fork"
    lines = (origin / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (origin / "metrics.jsonl").write_bytes(b"".join([*lines[:2], b"{bad}\n", *lines[2:]]))
    (origin / "incidents.jsonl").write_text("{}\n")
    before = content(origin)
    subprocess.run(["cp", "-al", str(origin), str(fork)], check=True)
    assert run(fork, "train.steps=6", "checkpoint.keep=2") == 0
    assert content(origin) == before
    assert len(losses(fork)) == 6 and sorted(path.name for path in (fork / "checkpoints").iterdir()) == ["4", "6"]
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("warning"))
    assert line.startswith("warning: metrics.jsonl is damaged, line 3: not a line of metrics (")
    assert line.endswith("); moved to metrics.jsonl.damaged, its good lines are kept")
    assert (fork / "metrics.jsonl.damaged").read_bytes() == (origin / "metrics.jsonl").read_bytes()
    assert json.loads((fork / "incidents.jsonl").read_text().splitlines()[1])["what"] in line


# Writes still under way when orbax gives up report to an event loop that is closed.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("every", [0, pytest.param(2, id="saving", marks=pytest.mark.slow)])
def test_a_directory_that_is_moved_while_it_runs(
    run: Run,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    every: int,
) -> None:
    """It stops with a checkpoint where the directory now is, and makes no other one; there it goes on. A save that was
    under way may be lost."""
    old, new = tmp_path / "old", tmp_path / "new"
    with monkeypatch.context() as patch:
        before_step(patch, 3, lambda: old.rename(new) if old.exists() else None)
        assert run(old, "train.steps=9", f"checkpoint.every={every}") == 75
    out = capsys.readouterr().out
    assert f"warning: the run directory was moved from {old} to {new}\n" in out
    assert f"; the same command with --run-dir {new} goes on\n" in out and f"run directory: {new}\n" in out
    steps, saved = len(losses(new)), {path.name for path in (new / "checkpoints").iterdir()}
    assert steps in (3, 4) and {str(steps)} <= saved <= {"2", str(steps)}
    assert not old.exists() if every == 0 else not list(old.glob("*.*"))
    assert run(new, "train.steps=4") == 0
    assert losses(new) == losses(finished)


@pytest.mark.slow
@pytest.mark.parametrize("another", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_directory_that_is_removed_while_it_runs(
    run: Run, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    """The state is saved under the old path, unless another directory is there."""
    folder, acted = tmp_path / "run", list[int]()

    def remove() -> None:
        if not acted:
            acted.append(1)
            shutil.rmtree(folder)
            if another:
                folder.mkdir()

    with monkeypatch.context() as patch:
        before_step(patch, 3, remove)
        options = ("train.steps=9", "checkpoint.every=0")
        if another:
            with pytest.raises(UserError, match="is another directory than this run began in, which is gone"):
                run(folder, *options)
            assert list(folder.iterdir()) == []
            return
        assert run(folder, *options) == 75
    steps = {path.name for path in (folder / "checkpoints").iterdir()}
    assert steps in ({"3"}, {"4"})
    assert run(folder, "train.steps=4") == 0
    assert [record["loss"] for record in read_metrics(folder / "metrics.jsonl")] == losses(finished)[int(min(steps)) :]


PIPES = ["config.yaml", "metrics.jsonl", "env.json", "stacks/rank0.txt", "checkpoints/9"]


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_in_a_run_directory(run: Run, copy: Path, name: str) -> None:
    path = copy / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    before = {each: each.lstat().st_mtime_ns for each in copy.iterdir()}
    with pytest.raises(UserError, match=rf"^--run-dir: '.*{name}' is a pipe, a socket or a device, and a run writes"):
        run(copy)
    assert before == {each: each.lstat().st_mtime_ns for each in copy.iterdir()}


def test_a_link_among_the_stacks(run: Run, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("kept")
    (copy / "stacks").mkdir()
    (copy / "stacks" / "rank0.txt").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match=r"^--run-dir: '.*stacks/rank0.txt' is a link to '.*outside', and a run writes"):
        run(copy)
    assert (tmp_path / "outside").read_text() == "kept"


@pytest.mark.parametrize("when", ["checkpoints", "files"])
def test_no_room_to_go_on(run: Run, copy: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Metrics of later steps are cut last, when it is known that the run can go on."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(copy / "x"))
    shutil.rmtree(copy / "checkpoints" / "4")
    before = (copy / "metrics.jsonl").read_bytes()
    if when == "checkpoints":
        monkeypatch.setattr(Checkpoints, "no_room", lambda self: full)
    else:
        monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(full))
    with pytest.raises(UserError, match=r"^--run-dir: '.*/x' cannot be written: No space left on device; mend it, or"):
        run(copy)
    assert (copy / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_a_disk_that_is_full_or_read_only(run: Run, copy: Path, tmp_path: Path, kind: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no right to mount a file system: a full disk and a read-only one are NOT tested here")
    try:
        folder = Path(shutil.copytree(copy, disk / "run"))
        shutil.rmtree(folder / "checkpoints" / "4")
        if kind == "full":
            with (disk / "other").open("wb", buffering=0) as other, pytest.raises(OSError, match="No space"):
                while True:
                    other.write(bytes(4096))
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        before = content(folder)
        text = {"full": "No space left on device", "read-only": "Read-only file system"}[kind]
        with pytest.raises(UserError, match=rf"^--run-dir: '.*' cannot be written: {text}; mend it, or give another"):
            run(folder)
        assert {name: found[1] for name, found in content(folder).items()} == {
            name: found[1] for name, found in before.items()
        }
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_run_that_is_refused_leaves_no_folder(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^checkpoint.resume: 'must', but .* holds no checkpoint"):
        run(tmp_path / "runs" / "new", "checkpoint.resume=must")
    with pytest.raises(UserError, match=r"^model.vocab: "):
        run(tmp_path / "runs" / "new", "model.vocab=3")
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_of_a_newer_format(run: Run, copy: Path) -> None:
    """Of another version of jaxdist: nothing is moved, nothing trained, and the tools say the same."""
    checksums = copy / "checkpoints" / "4" / "checksums.json"
    checksums.write_text(checksums.read_text().replace('"version": 1', '"version": 2'))
    before = content(copy)
    text = r"^checkpoint of step 4 is of format 2, and this version of jaxdist reads 1 and older; use the version that"
    with pytest.raises(UserError, match=text):
        run(copy, "train.steps=6")
    assert content(copy) == before
    for command in ("verify", "export"):
        arguments = Namespace(command=command, run_dir=copy, step=None, output=copy.parent / "out", vocab=None)
        with pytest.raises(UserError, match=text):
            checkpoint_command(arguments, None)
    assert [line.split(maxsplit=6)[-1] for line in listing(copy)[1:]] == ["complete", "of format 2, a later version's"]


@pytest.mark.slow
def test_a_report_that_cannot_be_written(run: Run, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder is in its place: a line says so, and the run is complete all the same."""
    (copy / "report.html").unlink(missing_ok=True)
    (copy / "report.html").mkdir()
    assert run(copy, "train.steps=5", "observe.report=true") == 0
    assert "report.html cannot be written: Is a directory; the run and its checkpoints are" in capsys.readouterr().out
    assert len(losses(copy)) == 5
