"""Whether all processes of a job see one folder: how one of them looks. What the others say is made up."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

from jaxdist.checkpoint import Checkpoints, arguments, manager
from jaxdist.checkpoint.arguments import check_shared
from jaxdist.errors import UserError
from jaxdist.state import TrainState

Job = Callable[..., None]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Makes this process one of a job. said: what process 0 has made, to the others. looks: what each process has seen,
    and where, None for this one."""

    def make(rank: int, looks: list[Any], said: list[str] | None = None) -> None:
        monkeypatch.setattr(jax, "process_count", lambda: len(looks))
        monkeypatch.setattr(jax, "process_index", lambda: rank)
        monkeypatch.setattr(arguments, "done_by_first", lambda work: said if rank else work())
        monkeypatch.setattr(arguments, "from_all", lambda own: [own if each is None else each for each in looks])

    return make


@pytest.mark.parametrize("told", [False, True])
def test_a_folder_that_is_seen_late(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], told: bool
) -> None:
    """As by NFS, which remembers for a while that it was not there. Who waits for long says so, once."""
    monkeypatch.setattr(arguments, "_NOTICE_S", 0.2 if told else 5.0)
    job(1, [(True, "/first"), None], [str(tmp_path), "made"])
    later = threading.Timer(1.0, (tmp_path / "made").mkdir)
    later.start()
    assert check_shared(tmp_path)
    later.join()
    line = f"rank 1 waits up to 90 s to see what rank 0 has made in {tmp_path}\n"
    assert capsys.readouterr().err == (line if told else "")


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ([False], "rank 1 (rank 1"),
        ([True, False, False, True, False], "ranks 2, 3, 5 (rank 2"),
        ([False] * 20, "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 12 more (rank 1"),
    ],
)
def test_all_who_do_not_see_it_are_named(job: Job, tmp_path: Path, others: list[bool], named: str) -> None:
    job(0, [None, *((seen, f"/own/{rank}") for rank, seen in enumerate(others, 1))])
    with pytest.raises(UserError) as error:
        check_shared(tmp_path)
    text = f"checkpoints: what rank 0 has made in {tmp_path} was not seen within 90 s by {named} looked in /own/"
    assert str(error.value).startswith(text)
    mend = "allowed: one folder for all processes; give one on storage that all share, as --run-dir or the folder of"
    assert mend in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir()), "what was made to be seen is removed"


def test_a_process_that_may_not_look_does_not_leave_the_others_waiting(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer is no, not an error between two collectives."""
    own = threading.get_ident()  # threads of a save before may look at other files meanwhile
    for where in (os, Path):

        def stat(*given: Any, look: Any = where.stat, **more: Any) -> Any:
            if threading.get_ident() == own:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return look(*given, **more)

        monkeypatch.setattr(where, "stat", stat)
    monkeypatch.setattr(arguments, "_VISIBLE_S", 0.2)
    assert not arguments._wait_to_see(tmp_path)


def test_what_cannot_be_removed_is_no_error(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start removes it."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        job(0, [None, (True, str(tmp_path))])
        assert check_shared(tmp_path)
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 1
    Checkpoints(tmp_path, keep=2).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.EROFS, errno.EDQUOT, errno.EACCES])
def test_a_folder_that_can_only_be_read_is_no_error(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Its checkpoints can be restored, by several processes as by one."""
    monkeypatch.setattr(Path, "mkdir", Mock(side_effect=OSError(code, os.strerror(code))))
    job(0, [None, (True, str(tmp_path))])
    assert check_shared(tmp_path) is False


def test_a_folder_that_could_only_be_read_is_looked_at_again_before_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full when the job began, and has room now."""
    answers: list[Any] = [False, UserError("checkpoints: not shared"), True]
    monkeypatch.setattr(manager, "check_shared", looked := Mock(side_effect=answers))
    state = TrainState(jnp.int32(0), {"w": jnp.ones(8)}, ())
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        with pytest.raises(UserError, match="^checkpoints: not shared$"):
            checkpoints.save(1, state, {})
        for step in (1, 2):
            checkpoints.save(step, state, {})
    assert looked.call_count == 3, "once it is known, nobody looks again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
