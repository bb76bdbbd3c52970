"""Processes started from Python: `jaxdist.runtime.spawn`."""

import os
import time
from pathlib import Path

import pytest

from jaxdist.runtime import SpawnError, spawn


def write_environment(rank: int, folder: str) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    Path(folder, str(rank)).write_text(" ".join(os.environ[name] for name in names))


def fail_or_wait(rank: int, folder: str, how: str) -> None:
    written = Path(folder, f"writing{rank}")
    written.write_text(str(os.getpid()))
    written.rename(Path(folder, f"pid{rank}"))  # whole, or not there, when this process is ended
    if rank == 1:
        if how == "kill":
            os.kill(os.getpid(), 9)
        raise KeyError("planted")
    time.sleep(60)


def add_up(rank: int, folder: str) -> None:
    """With the job's devices: needs the roll call and JAX's service."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import multihost_utils

    from jaxdist.runtime.join.environment import find_job
    from jaxdist.runtime.join.join import join_job

    job = find_job(os.environ)
    assert job is not None
    join_job(job)
    total = multihost_utils.process_allgather(jax.numpy.array(10 ** jax.process_index())).sum()
    Path(folder, str(rank)).write_text(str(total))


def test_environment_of_each(tmp_path: Path) -> None:
    spawn(write_environment, 3, args=(str(tmp_path),))
    said = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [each[:5] for each in said] == [[str(rank), "3", str(rank), "3", "127.0.0.1"] for rank in range(3)]
    assert len({each[5] for each in said}) == 1
    assert "RANK" not in os.environ


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_failure_is_raised_and_ends_the_others(how: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(SpawnError) as error:
        spawn(fail_or_wait, 3, args=(str(tmp_path), how))
    assert time.monotonic() - began < 30
    assert error.value.rank == 1
    if how == "raise":
        assert str(error.value).startswith("rank 1 failed (exit status 1):\n\nTraceback ")
        assert "in fail_or_wait" in str(error.value) and "KeyError: 'planted'" in str(error.value)
    else:
        assert str(error.value) == "rank 1 failed (exit status -9)"
    for path in tmp_path.glob("pid*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_number_of_processes() -> None:
    with pytest.raises(ValueError, match="^nprocs is 0"):
        spawn(write_environment, 0)


def test_a_job_of_two(tmp_path: Path) -> None:
    spawn(add_up, 2, args=(str(tmp_path),))
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["11", "11"]
