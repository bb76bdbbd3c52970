"""Arrays in files: rows as numpy reads them, and files that change while they are in use."""

import faulthandler
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_files import config, ids_file, sharding

from jaxdist.config.load import load_config
from jaxdist.data import FileArray, FileChanged, make_loader
from jaxdist.data.sources.images import images
from jaxdist.data.sources.tokens import tokens
from jaxdist.errors import UserError
from jaxdist.processes import Place
from jaxdist.runtime.exit_status import DONE, STOPPED, status_of
from jaxdist.runtime.start import fail_alone
from jaxdist.trainer.train import train

BEFORE = 1_600_000_000  # seconds: the time of files that are written again later


def old(path: Path) -> Path:
    os.utime(path, (BEFORE, BEFORE))
    return path


@pytest.mark.parametrize("dtype", ["<u1", "<u2", ">i4", "<f8"])
@pytest.mark.parametrize("shape", [(50,), (50, 3), (50, 2, 3)])
def test_rows_are_those_of_the_file(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    whole = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    (tmp_path / "a").write_bytes(b"header" + whole.tobytes())
    array = FileArray(tmp_path / "a", np.dtype(dtype), shape=shape, offset=6)
    assert (array.shape, array.ndim, array.size, array.nbytes, len(array)) == (
        (shape, whole.ndim, whole.size, whole.nbytes, 50)
    )
    part = array.part(5, 45)
    for found, wanted in ((array, whole), (part, whole[5:45]), (part.part(1, 4), whole[6:9])):
        np.testing.assert_array_equal(found, wanted, strict=True)
        np.testing.assert_array_equal(found[1:3], wanted[1:3], strict=True)
        np.testing.assert_array_equal(found[-1:], wanted[-1:], strict=True)
        np.testing.assert_array_equal(found[9:9], wanted[9:9], strict=True)
        np.testing.assert_array_equal(found[1], wanted[1])
        np.testing.assert_array_equal(found[np.array([2, 0, 2])], wanted[[2, 0, 2]], strict=True)
        np.testing.assert_array_equal(np.concatenate(list(found.pieces(100))), wanted)
        windows = found.windows(np.array([1, 0]), 2)
        np.testing.assert_array_equal(windows, np.stack([wanted[1:3], wanted[:2]]))
        assert windows.dtype == whole.dtype
    with pytest.raises(AssertionError):
        part.windows(np.array([39]), 2)  # into rows that are not of this part


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 4)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"12345678")


CHANGES = {
    cut: r"100 bytes, 400 before",
    append: r"408 bytes, 400 before",
    overwrite: r"written at \d+-\d\d-\d\d \d\d:\d\d:\d\d",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_batch_of_data_that_was_changed_is_refused(change: Callable[[Path], None], tmp_path: Path) -> None:
    path = old(ids_file(tmp_path / "train.bin", np.arange(200)))
    loader = make_loader(tokens(config(path)), seq_len=4, global_batch=8, sharding=sharding(data=1), seed=0)
    loader.batch(0)
    change(path)
    with pytest.raises(FileChanged, match=rf"^data file '\S+train.bin' was changed .*: {CHANGES[change]}; .*") as error:
        for step in range(20):
            loader.batch(step)
    assert "\n" not in str(error.value)
    assert status_of(error.value) == STOPPED  # whether the content is another is for the hash at the next start to say


def test_images_that_were_changed(tmp_path: Path) -> None:
    np.save(tmp_path / "image.npy", np.arange(400, dtype=np.uint8).reshape(100, 2, 2))
    np.save(tmp_path / "label.npy", np.asfortranarray(np.arange(200).reshape(100, 2)))
    source = images(config(old(tmp_path / "image.npy").parent))
    rows = source.train.read(np.array([3, 0, 5]))
    assert rows["image"].shape == (3, 2, 2) and rows["label"].dtype == np.int32
    assert (rows["image"][:, 0, 0] // 4 == rows["label"][:, 0] // 2).all()
    cut(tmp_path / "image.npy")
    with pytest.raises(FileChanged, match=r"image.npy' was changed while it was in use: 132 bytes, 528 before"):
        source.train.read(np.array([3]))


def test_a_file_that_is_replaced_stays_what_it_was(tmp_path: Path) -> None:
    path = old(ids_file(tmp_path / "train.bin", range(200)))
    source = tokens(config(path))
    ids_file(tmp_path / "new", [7] * 200).replace(path)
    np.testing.assert_array_equal(source.train[:5], range(5))
    path.unlink()
    np.testing.assert_array_equal(source.train[:5], range(5))


def test_a_change_while_the_hash_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pieces = old(ids_file(tmp_path / "train.bin", range(200))), FileArray.pieces

    def late(self, nbytes):  # type: ignore[no-untyped-def]
        cut(path)
        return pieces(self, nbytes)

    monkeypatch.setattr(FileArray, "pieces", late)
    with pytest.raises(UserError, match=r"^data.path: data file '\S+train.bin' was changed .*: 100 bytes, 400 before"):
        tokens(config(path))


def test_a_shorter_file_ends_a_process_with_a_line_and_not_with_a_signal(tmp_path: Path) -> None:
    """As the loader reads: in a process of its own, for a map into memory would end it with SIGBUS."""
    path = old(ids_file(tmp_path / "train.bin", np.zeros(100_000)))
    code = f"""
import os
from data_files import config, sharding
from jaxdist.data import FileChanged, make_loader
from jaxdist.data.sources.tokens import tokens
loader = make_loader(tokens(config({str(path)!r})), seq_len=4, global_batch=8, sharding=sharding(data=1), seed=0)
os.truncate({str(path)!r}, 0)
try:
    loader.batch(0)
except FileChanged as error:
    print(error)
"""
    paths = os.pathsep.join(map(str, (Path(__file__).parents[2], Path(__file__).parents[1])))
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "was changed while it was in use: 0 bytes, 200000 before" in done.stdout


def test_a_rank_of_a_job_ends_with_75_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jaxdist.runtime.start.place", lambda: Place(0, 2))
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended, fail_alone():
        raise FileChanged(tmp_path, "another")
    assert ended.value.code == STOPPED
    assert capsys.readouterr().err.splitlines() == [f"error: {FileChanged(tmp_path, 'another')}"]


YAML = """
model: {{layers: 1, width: 8, heads: 1, vocab: 97}}
data: {{source: tokens, path: {path}, seq_len: 8, global_batch: 4, prefetch: 1}}
train: {{steps: 6, eval_every: 0, sample_tokens: 0}}
checkpoint: {{every: 2}}
devices: {{platform: cpu, compilation_cache: false}}
observe: {{console: plain, report: false}}
"""


@pytest.mark.slow
def test_a_run_stops_and_goes_on_with_the_same_data_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = np.arange(4000) % 97
    path = old(ids_file(tmp_path / "train.bin", ids))
    (tmp_path / "run.yaml").write_text(YAML.format(path=path))
    run, windows, calls = load_config(tmp_path / "run.yaml"), FileArray.windows, []

    def reading(self, starts, length):  # type: ignore[no-untyped-def]
        if length == 9:
            calls.append(starts)
            if len(calls) == 5:
                overwrite(path)
        return windows(self, starts, length)

    monkeypatch.setattr(FileArray, "windows", reading)
    enabled: list[int] = []  # pytest has a fault handler of its own
    monkeypatch.setattr(faulthandler, "is_enabled", lambda: False)
    monkeypatch.setattr(faulthandler, "enable", enabled.append)
    assert train(run, tmp_path / "run") == STOPPED
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "train.bin' was changed while it was in use: written at" in line
    assert '"action": "stopped"' in (tmp_path / "run" / "incidents.jsonl").read_text()
    assert enabled == [2]
    with pytest.raises(UserError, match=r"^data.path: other data .*; set it back"):
        train(run, tmp_path / "run")
    ids_file(path, ids)  # another time, the same content
    assert train(run, tmp_path / "run") == DONE
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 6
