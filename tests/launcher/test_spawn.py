"""Processes started from Python: `jaxdist.runtime.spawn`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import child
import pytest
from jobs import wait_until

from jaxdist.runtime import SpawnError, spawn

HERE = Path(__file__).parent


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


def save_slowly(rank: int, folder: str) -> None:
    """As a run does that a signal asks to stop; a save takes longer than a failed job is waited for."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    Path(folder, f"pid{rank}").write_text(f"{os.getpid()}\n")
    while not asked:
        time.sleep(0.02)
    time.sleep(1.0)
    Path(folder, f"saved{rank}").write_text("")
    sys.exit(75)


PARENT = """
import sys
sys.path += sys.argv[2:]
from test_spawn import save_slowly, spawn
if __name__ == "__main__":
    import jaxdist.launcher.spawn
    jaxdist.launcher.spawn.GRACE_S = 0.3
    spawn(save_slowly, 2, args=(sys.argv[1],))
"""


@pytest.mark.parametrize(("number", "saved"), [(signal.SIGTERM, True), (signal.SIGINT, True), (signal.SIGKILL, False)])
def test_a_signal_to_the_parent(number: signal.Signals, saved: bool, tmp_path: Path) -> None:
    """The processes save, and end before it does. Where it is killed they are killed, too."""
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path), str(HERE), str(HERE.parent)]
    parent = subprocess.Popen(command, env=child.environment(), stderr=subprocess.PIPE, start_new_session=True)
    paths = [tmp_path / f"pid{rank}" for rank in range(2)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in paths), "both processes", 30)
    parent.send_signal(number)
    _, said = parent.communicate(timeout=20)
    assert parent.returncode == -number, said
    wait_until(lambda: not any(Path("/proc", path.read_text().strip()).exists() for path in paths), "their end", 10)
    assert [(tmp_path / f"saved{rank}").exists() for rank in range(2)] == [saved, saved]
    assert number != signal.SIGINT or b"KeyboardInterrupt" in said


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
