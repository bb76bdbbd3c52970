"""Saves of two processes, one of which cannot: both are told, go on, and the next save lands."""

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxdist.runtime import spawn


def fail(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def broken(how: str, rank: int, folder: Path) -> Iterator[None]:
    """Where this process cannot write its arrays (rank 1), merge them, write checksums or make a folder (rank 0)."""
    from jaxdist.checkpoint import barrier, checksums

    with pytest.MonkeyPatch.context() as patch:
        if (how, rank) == ("arrays", 1):
            shared, future = barrier._SharedFuture, SimpleNamespace(result=fail)
            patch.setattr(barrier, "_SharedFuture", lambda _, saves: shared(future, saves))
        if (how, rank) == ("merging", 0):
            patch.setattr(Merging, "fails", True)
        if (how, rank) == ("metadata", 0):
            from orbax.checkpoint._src.metadata.checkpoint import _MetadataStoreImpl

            patch.setattr(_MetadataStoreImpl, "write", fail)
        if (how, rank) == ("checksums", 0):
            patch.setattr(checksums, "seal", fail)
        if (how, rank) == ("folder", 0):
            shutil.rmtree(folder)
            folder.write_text("in the way")
        try:
            yield
        finally:
            if (how, rank) == ("folder", 0):
                folder.unlink()


class Merging:
    """Orbax's, of what the processes have written."""

    fails = False

    @classmethod
    def plant(cls) -> None:
        """Let it fail on demand; before there are handlers."""
        import orbax.checkpoint as ocp

        merge = ocp.PyTreeCheckpointHandler.finalize
        ocp.PyTreeCheckpointHandler.finalize = lambda *arguments: fail() if cls.fails else merge(*arguments)


def joined() -> Any:
    """A function of a step to its state, split over the devices of the job, which this process joins."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_platforms", "cpu")
    from jaxdist.runtime.join.environment import find_job
    from jaxdist.runtime.join.join import join_job
    from jaxdist.state import TrainState

    job = find_job(os.environ)
    assert job is not None
    join_job(job)
    mesh, rows = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,)), jax.device_count()
    layout = TrainState(NamedSharding(mesh, P()), {"w": NamedSharding(mesh, P("data"))}, ())  # type: ignore[arg-type]
    make = jax.jit(lambda step: TrainState(step, {"w": jnp.full((rows, 10), step)}, ()), out_shardings=layout)
    return lambda step: make(jnp.int32(step))


def save_in_two_places(rank: int, place: str) -> None:
    """At the same time, the same steps."""
    make = joined()
    from jaxdist.checkpoint import Checkpoints

    first, second = (Checkpoints(Path(place, name), keep=8) for name in "ab")
    with first, second:
        for step in range(1, 9):
            first.save(step, make(step), {})
            second.save(step, make(step), {})
            first.wait()
            second.wait()
        intact = [each.newest_intact(lambda line: pytest.fail(line)) for each in (first, second)]
    Path(place, str(rank)).write_text(json.dumps(intact))


# What process 0 and process 1 say of the step that one of them cannot write.
OTHER, FULL = "another process could not", "No space left on device"
BROKEN = {
    "arrays": [OTHER, FULL],
    "merging": [FULL, OTHER],
    "checksums": [FULL, OTHER],
    "metadata": [FULL, OTHER],
    "folder": ["Not a directory", OTHER],
}


def save_three_times(rank: int, place: str) -> None:
    """In each way of breaking the second save, in a folder of its own."""
    make = joined()
    from jaxdist.checkpoint import Checkpoints, SaveFailed

    Merging.plant()
    said: dict[str, list[Any]] = {how: [] for how in BROKEN}
    for how, lines in said.items():
        folder = Path(place, how)
        with Checkpoints(folder, keep=3) as checkpoints:
            for step in (1, 2, 3):
                try:
                    with broken(how if step == 2 else "", rank, folder):
                        checkpoints.save(step, make(step), {})
                        checkpoints.wait()
                    lines.append("saved")
                except SaveFailed as error:
                    lines.append(error.why)
            lines.append(checkpoints.newest_intact(lines.append))
    Path(place, str(rank)).write_text(json.dumps(said))


@pytest.mark.slow
def test_a_save_that_one_process_cannot_write(tmp_path: Path) -> None:
    spawn(save_three_times, 2, args=(str(tmp_path),))
    for rank in (0, 1):
        said = json.loads((tmp_path / str(rank)).read_text())
        assert said == {how: ["saved", why[rank], "saved", 3] for how, why in BROKEN.items()}
    for how in BROKEN:
        left = sorted(path.name for path in (tmp_path / how).iterdir())
        assert left == (["3"] if how == "folder" else ["1", "3"]), how


HANGS = {"making its folder": 0, "copying": 1, "writing": 1, "completing": 0}  # the phase, and the process


@contextmanager
def hanging(phase: str, rank: int, hang: Callable[[], None]) -> Iterator[None]:
    """Where this process calls `hang` in a phase of a save."""
    import orbax.checkpoint as ocp

    from jaxdist.checkpoint import barrier, checksums, manager

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **keywords: (hang(), function(*arguments, **keywords))[1]

    places: dict[str, tuple[Any, str]] = {
        "making its folder": (manager, "no_room"),
        "copying": (ocp.PyTreeCheckpointHandler, "async_save"),
        "writing": (barrier._SharedFuture, "result"),
        "completing": (checksums, "seal"),
    }
    with pytest.MonkeyPatch.context() as patch:
        if HANGS.get(phase) == rank:
            where, name = places[phase]
            patch.setattr(where, name, before(getattr(where, name)))
        yield


def save_and_hang(rank: int, place: str) -> None:
    """In each phase, in one process. That one writes down where both are meanwhile."""
    make = joined()
    from jaxdist.checkpoint import Checkpoints

    for phase in HANGS:
        own, other = (Path(place, f"{phase} {each}") for each in (rank, 1 - rank))

        def hang(own: Path = own, other: Path = other) -> None:
            time.sleep(0.7)
            found = [json.loads(path.read_text()) for path in (own, other)]
            own.with_suffix(".hung").write_text(json.dumps(found))

        def entered(*now: Any, own: Path = own) -> None:
            own.with_suffix(".new").write_text(json.dumps(now))
            own.with_suffix(".new").replace(own)

        with hanging(phase, rank, hang), Checkpoints(Path(place, phase), keep=3, entered=entered) as checkpoints:
            checkpoints.save(1, make(1), {})
            checkpoints.wait()


@pytest.mark.slow
def test_the_process_in_which_a_save_hangs_is_behind(tmp_path: Path) -> None:
    spawn(save_and_hang, 2, args=(str(tmp_path),))
    for phase, rank in HANGS.items():
        own, other = json.loads((tmp_path / f"{phase} {rank}.hung").read_text())
        assert own[1] == phase and own[0] < other[0], (own, other)
        for each in (0, 1):
            assert json.loads((tmp_path / f"{phase} {each}").read_text())[1] == "done"


@pytest.mark.slow
def test_saves_in_two_places_at_once(tmp_path: Path) -> None:
    spawn(save_in_two_places, 2, args=(str(tmp_path),))
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1)] == [[8, 8], [8, 8]]


def test_the_job_may_be_joined_after_the_barrier_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxdist.checkpoint import barrier
    from jaxdist.processes import Place

    store = SimpleNamespace(set=lambda key: None, get=lambda key, seconds=0.0: None, delete=lambda folder: None)
    phases = list[str]()
    saves = barrier.SaveBarrier(lambda _, phase: phases.append(phase))
    saves.meet(key="alone", timeout_ms=0)
    monkeypatch.setattr(barrier, "place", lambda: Place(0, 2))
    monkeypatch.setattr(barrier, "JobStore", lambda name, rank: store)
    saves.begin()
    with pytest.raises(TimeoutError, match="no answer to 1/together/1/0"):
        saves.meet(key="together", timeout_ms=0)
    with pytest.raises(TimeoutError):
        saves.meet(key="async_commit_complete", timeout_ms=0)
    assert phases == ["copying", "waiting for the other ranks", "waiting for rank 0"]


def save_on_one_rank(rank: int, place: str, saves: int) -> None:
    """The other one calls save only when it is named."""
    make = joined()
    from jaxdist.checkpoint import Checkpoints, barrier

    barrier.TELL_S = 1.5
    told, state = Path(place, "told"), make(1)
    with Checkpoints(Path(place, "saved"), keep=3) as checkpoints:
        if rank == saves:
            sys.stderr = told.open("w")
        else:
            while not (told.exists() and told.read_text()):
                time.sleep(0.1)
        checkpoints.save(1, state, {})
    assert (Path(place) / "saved" / "1").exists()


@pytest.mark.slow
@pytest.mark.parametrize("saves", [0, 1])
def test_who_does_not_call_save_is_named(saves: int, tmp_path: Path) -> None:
    spawn(save_on_one_rank, 2, args=(str(tmp_path), saves))
    [line] = (tmp_path / "told").read_text().splitlines()
    assert line.startswith(f"save: not called in 1.5 s by rank {1 - saves}; every process must call it")
