"""The claim of one run on its directory: who is refused, who waits, who takes over, and what is left."""

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import child
import pytest
from jobs import wait_until
from pages import on_page

from jaxdist.errors import UserError
from jaxdist.runtime import run_claim
from jaxdist.runtime.run_claim import LOCK, RunClaim

HELD = "belongs to a run under way, process {} on host {} "
OWNER = """
import sys, time
from pathlib import Path
from jaxdist.runtime.run_claim import RunClaim
claim = RunClaim(Path(sys.argv[1]))
print("claimed", flush=True)
time.sleep(60)
"""
RESTART = {"JAXDIST_ATTEMPT": "2"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_claim, "OWNER_LEAVES_S", 0.05)
    monkeypatch.setattr(run_claim, "TEXTS_SETTLE_S", 0.0)


def content(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    }


def owner_text(folder: Path, **changes: Any) -> None:
    """The lock file of a run that has ended without an end."""
    own = {"host": run_claim.host_name(), "pid": 4, "job": "7", "since": "then", "directory": folder.stat().st_ino}
    (folder / LOCK).write_text(json.dumps(own | changes))


def refused(folder: Path, environ: dict[str, str] | None = None) -> str:
    before = content(folder)
    with pytest.raises(UserError) as error:
        RunClaim(folder, environ or {})
    assert content(folder) == before, "nothing is touched"
    return str(error.value)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with RunClaim(folder, {"SLURM_JOB_ID": "77"}):
        text = json.loads((folder / LOCK).read_text())
        assert (text["host"], text["pid"], text["job"]) == (run_claim.host_name(), os.getpid(), "77")
        (folder / "metrics.jsonl").write_text("")
        line = refused(folder)
        assert line.startswith(
            f"--run-dir: '{folder}' {HELD.format(os.getpid(), run_claim.host_name())}(job 77, since "
        )
        assert line.endswith("; wait for it or stop it, or use another --run-dir")
        shown = {"'.*'": "'runs/a'", r"process \d+ on host \S+": "process 4711 on host a"}
        on_page("docs/checkpoints.md", f"error: {line}", shown | {"since [^)]+": "since 2026-11-24 10:00:00"})
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
    with RunClaim(folder, {}):
        pass


def test_a_killed_owner_leaves_no_claim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor do its children keep one."""
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child.environment()) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"claimed\n"
        assert HELD.format(owner.pid, run_claim.host_name()) in refused(tmp_path)
        owner.kill()
        owner.wait()
    begun = time.monotonic()
    with RunClaim(tmp_path, {}):
        assert time.monotonic() - begun < 0.2
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("environ", [RESTART, {"SLURM_RESTART_COUNT": "1"}])
def test_a_restart_waits_for_the_attempt_before(tmp_path: Path, environ: dict[str, str]) -> None:
    first, said = RunClaim(tmp_path, {}), list[str]()
    threading.Timer(0.6, first.close).start()
    with RunClaim(tmp_path, environ, said.append):
        assert re.fullmatch(r"waiting for process \d+ on host .* to leave .*, up to 20 s", said.pop()) and not said


def test_an_owner_of_another_host_that_is_gone_is_named(tmp_path: Path) -> None:
    owner_text(tmp_path, host="elsewhere")
    said: list[str] = []
    with RunClaim(tmp_path, {}, said.append):
        text = f"process 4 on host elsewhere (job 7, since then) has left {tmp_path} without an end"
        assert said == [text + "; this run takes its place"]


def test_an_owner_of_another_host_that_holds_its_lock(tmp_path: Path) -> None:
    """The server of a network file system may keep the lock of a host that is dead. The file can be removed then."""
    owner_text(tmp_path, host="elsewhere")
    with (tmp_path / LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        line = refused(tmp_path)
        assert "process 4 on host elsewhere (job 7, since then); " in line
        assert line.endswith(f"; if that host is dead and its lock stays, remove '{tmp_path / LOCK}'")
        (tmp_path / LOCK).unlink()
        RunClaim(tmp_path, {}).close()


def test_storage_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There only the text tells."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    said: list[str] = []
    with RunClaim(tmp_path, {}):
        assert "this storage has no locks to tell whether it lives: if it does not, remove '" in refused(tmp_path)
    again = {"SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": "7"}
    for changes, environ in (
        ({"pid": 2**22 + 1}, {}),
        ({"host": "elsewhere"}, again),
        ({"host": "elsewhere", "job": "a"}, RESTART | {"JAXDIST_JOB_ID": "a-2"}),
        ({"host": "elsewhere", "job": "8"}, RESTART | {"JAXDIST_JOB_ID": "a-2", "SLURM_JOB_ID": "8"}),
    ):
        owner_text(tmp_path, **changes)
        RunClaim(tmp_path, environ, said.append).close()
        assert said.pop().endswith(f"has left {tmp_path} without an end; this run takes its place")
    owner_text(tmp_path, host="elsewhere")
    assert "process 4 on host elsewhere (job 7, since then); wait" in refused(tmp_path)
    monkeypatch.setattr(run_claim, "RESTARTED_S", 0.2)
    with pytest.raises(UserError, match="belongs to a run under way, process 4"):
        RunClaim(tmp_path, again | {"SLURM_JOB_ID": "8"}, said.append)  # another job that was started again
    (tmp_path / LOCK).unlink()
    RunClaim(tmp_path, {}).close()


def test_a_copy_of_a_run_under_way(tmp_path: Path) -> None:
    """Of hard links or not: the lock is the original's."""
    with RunClaim(tmp_path / "run", {}):
        before = content(tmp_path / "run")
        for option in ("-al", "-a"):
            subprocess.run(["cp", option, str(tmp_path / "run"), str(tmp_path / option)], check=True)
            with RunClaim(tmp_path / option, {}):
                assert HELD.format(os.getpid(), run_claim.host_name()) in refused(tmp_path / option)
        assert content(tmp_path / "run") == before
        refused(tmp_path / "run")


@pytest.mark.parametrize(("kind", "text"), [("pipe", "it is no regular file"), ("link", "it is a symbolic link")])
def test_a_lock_that_is_no_file(kind: str, text: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    if kind == "pipe":
        os.mkfifo(folder / LOCK)
    else:
        (folder / LOCK).symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match=rf"^--run-dir: '.*{LOCK}' cannot be written: {text}; mend it"):
        RunClaim(folder, {})
    assert not (tmp_path / "outside").exists()


TEXTS = ["[" * 4000, "{", "null", '{"pid": 1}', '{"pid": 1e999}', "\0" * 9]


@pytest.mark.parametrize("text", [*TEXTS, {"host": "\x1b[31m"}, {"pid": -1}, {"pid": 10**30}], ids=range(9))
def test_a_lock_file_that_says_anything(text: str | dict[str, Any], tmp_path: Path) -> None:
    if isinstance(text, str):
        (tmp_path / LOCK).write_text(text)
    else:
        owner_text(tmp_path, **text)
    with (tmp_path / LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "belongs to a run under way, another process; wait for it or stop it" in refused(tmp_path)
    with RunClaim(tmp_path, {}):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_what_was_made_for_nothing_is_removed(tmp_path: Path) -> None:
    with RunClaim(tmp_path / "a" / "b", {}):
        (tmp_path / "a" / "b" / "checkpoints").mkdir()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    RunClaim(tmp_path / "mine", {}).close()
    assert (tmp_path / "mine").is_dir()


def test_a_directory_that_is_moved(tmp_path: Path) -> None:
    with RunClaim(tmp_path / "run", {}) as claim:
        assert not claim.is_moved() and claim.follow() == tmp_path / "run"
        (tmp_path / "run").rename(tmp_path / "new")
        assert claim.is_moved() and claim.follow() == tmp_path / "new"
        refused(tmp_path / "new")
        (tmp_path / "new" / "kept").touch()
        with RunClaim(tmp_path / "run", {}):
            assert claim.follow() == tmp_path / "new"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["kept"] and not (tmp_path / "run").exists()


def test_a_directory_that_is_removed(tmp_path: Path) -> None:
    with RunClaim(tmp_path / "run", {}) as claim:
        shutil.rmtree(tmp_path / "run")
        assert claim.is_moved() and claim.follow() == tmp_path / "run"
        (tmp_path / "run").mkdir()
        with pytest.raises(UserError, match=r"is another directory than this run began in, which is gone"):
            claim.follow()


def test_a_lock_that_was_removed_and_taken(tmp_path: Path) -> None:
    with RunClaim(tmp_path, {}) as claim:
        (tmp_path / LOCK).unlink()
        assert not claim.is_moved()
        with RunClaim(tmp_path, {}), pytest.raises(UserError, match="another run has been let in, so this one ends"):
            claim.is_moved()
    assert not (tmp_path / LOCK).exists()


def test_many_at_once(tmp_path: Path) -> None:
    """Claimed and given back over and over by several threads: never by two of them at a time."""
    inside, most, done = list[int](), list[int](), list[int]()

    def work(number: int) -> None:
        for _ in range(20):
            try:
                claim = RunClaim(tmp_path / "run", {})
            except UserError:
                continue
            inside.append(number)
            most.append(len(inside))
            inside.remove(number)
            claim.close()
        done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(done) == 4, "all threads", 60)
    assert set(most) == {1}


def test_a_lock_file_with_a_second_name(tmp_path: Path) -> None:
    """What is somebody else's file, too, is not written into."""
    (tmp_path / "victim").write_text("kept\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / LOCK).hardlink_to(tmp_path / "victim")
    with RunClaim(run):
        assert json.loads((run / LOCK).read_text())["pid"] == os.getpid()
    assert (tmp_path / "victim").read_text() == "kept\n"


def test_a_folder_above_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, too: a relative path still leads to the run directory, an absolute one does not."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with RunClaim(Path("run")) as claim:
        assert not claim.is_moved() and claim.follow() == Path("run")
        (tmp_path / "here").rename(tmp_path / "there")
        assert claim.is_moved() and claim.follow() == tmp_path / "there" / "run"
    assert not (tmp_path / "there" / "run" / LOCK).exists()


def test_storage_without_locks_on_which_another_run_is_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunClaim(tmp_path, {}) as claim:
        assert not claim.is_moved()
        owner_text(tmp_path, host="elsewhere")
        with pytest.raises(UserError, match="is not this run's any more: another run has been let in"):
            claim.is_moved()
