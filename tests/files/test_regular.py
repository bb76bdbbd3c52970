"""Files of a run directory: links, pipes and second names."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxdist.errors import UserError
from jaxdist.files.regular import (
    LINK,
    OTHER,
    name_aside,
    open_new,
    open_regular,
    open_to_append,
    read_regular,
    replace_file,
)
from jaxdist.observe import MetricsWriter, read_metrics
from jaxdist.runtime.run_folder import open_log


def appended(path: Path) -> None:
    with os.fdopen(open_to_append(path), "ab") as file:
        file.write(b"more")


def written(path: Path) -> None:
    with os.fdopen(open_new(path), "wb") as file:
        file.write(b"new")


@pytest.mark.parametrize("use", [open_regular, open_to_append, read_regular])
@pytest.mark.parametrize(("kind", "text"), [("link", LINK), ("nowhere", LINK), ("pipe", OTHER), ("folder", OTHER)])
def test_what_is_no_regular_file_is_refused_at_once(
    use: Callable[[Path], object], kind: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / "outside").write_bytes(b"kept")
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / {"link": "outside", "nowhere": "new"}[kind])
    with pytest.raises(OSError, match="it is") as error:
        use(path)
    assert error.value.strerror == text and error.value.filename == str(path)
    assert (tmp_path / "outside").read_bytes() == b"kept" and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (appended, b"oldmore"),
        (written, b"new"),
        (lambda path: replace_file(path, b"new"), b"new"),
        (lambda path: os.close(open_log(path, "--log-dir")), b"old"),
    ],
)
def test_another_name_of_a_file_keeps_its_content(change: Callable[[Path], None], want: bytes, tmp_path: Path) -> None:
    (tmp_path / "original").write_bytes(b"old")
    path = tmp_path / "fork"
    os.link(tmp_path / "original", path)
    change(path)
    appended(path)
    assert path.read_bytes() == want + b"more" and (tmp_path / "original").read_bytes() == b"old"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["fork", "original"]


def test_a_planted_temporary_file_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"kept")
    (tmp_path / f".file.{os.getpid()}.tmp").symlink_to(tmp_path / "outside")
    replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "outside").read_bytes() == b"kept" and (tmp_path / "file").read_bytes() == b"new"
    assert not (tmp_path / "file").is_symlink()


@pytest.mark.parametrize("name", ["folder", "gone/file"])
def test_an_error_names_the_file_and_not_the_temporary_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as caught:
        replace_file(tmp_path / name, b"new")
    assert caught.value.filename == str(tmp_path / name) and [*tmp_path.iterdir()] == [tmp_path / "folder"]


@pytest.mark.parametrize("resume", [0, 1, 9, None])
def test_metrics_of_a_fork_leave_the_original_s(resume: int | None, tmp_path: Path) -> None:
    line = b'{"step": %d, "loss": 1.0}\n'
    before = line % 1 + line % 2
    (tmp_path / "original").write_bytes(before)
    os.link(tmp_path / "original", tmp_path / "metrics.jsonl")
    with MetricsWriter(tmp_path / "metrics.jsonl", resume_step=resume) as writer:
        writer.write(3, {"loss": 1.0})
    assert (tmp_path / "original").read_bytes() == before
    kept = [step for step in (1, 2) if resume is not None and step <= resume]
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [*kept, 3]


def test_a_log_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank0.log")
    with pytest.raises(UserError, match=r"^--log-dir: '.*rank0.log' cannot be written: it is no regular file; give"):
        open_log(tmp_path / "rank0.log", "--log-dir")


def test_names_aside(tmp_path: Path) -> None:
    path = tmp_path / "6"
    assert name_aside(path).name == "6.damaged"
    (tmp_path / "6.damaged").symlink_to("nowhere")
    (tmp_path / "6.damaged-2").mkdir()
    assert name_aside(path).name == "6.damaged-3"


def test_the_umask_decides_who_may_read_and_write(tmp_path: Path) -> None:
    """A run directory may be shared by a group."""
    old = os.umask(0o002)
    try:
        replace_file(tmp_path / "a", b"x")
        os.close(open_to_append(tmp_path / "b"))
    finally:
        os.umask(old)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"] == [0o664, 0o664]
