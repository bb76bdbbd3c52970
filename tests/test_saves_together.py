"""Saves of two processes, one of which cannot: both are told, go on, and the next save lands."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
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
    from jaxdist.checkpoint import integrity, together

    with pytest.MonkeyPatch.context() as patch:
        if (how, rank) == ("arrays", 1):
            told, future = together._Told, SimpleNamespace(result=fail)
            patch.setattr(together, "_Told", lambda _: told(future))
        if (how, rank) == ("merging", 0):
            patch.setattr(Merging, "fails", True)
        if (how, rank) == ("checksums", 0):
            patch.setattr(integrity, "seal", fail)
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


def save_three_times(rank: int, place: str, how: str) -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_platforms", "cpu")
    from jaxdist.checkpoint import Checkpoints, SaveFailed
    from jaxdist.runtime.job import describe_job
    from jaxdist.runtime.join import join
    from jaxdist.state import TrainState

    job = describe_job(os.environ)
    assert job is not None
    join(job)
    Merging.plant()
    folder = Path(place, "checkpoints")
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    layout = TrainState(NamedSharding(mesh, P()), {"w": NamedSharding(mesh, P("data"))}, ())  # type: ignore[arg-type]
    rows = jax.device_count()
    make = jax.jit(lambda step: TrainState(step, {"w": jnp.full((rows, 10), step)}, ()), out_shardings=layout)
    said = []
    with Checkpoints(folder, keep=3) as checkpoints:
        for step in (1, 2, 3):
            try:
                with broken(how if step == 2 else "", rank, folder):
                    checkpoints.save(step, make(jnp.int32(step)), {})
                    checkpoints.wait()
                said.append("saved")
            except SaveFailed as error:
                said.append(error.why)
        intact = checkpoints.newest_intact(said.append)
    Path(place, str(rank)).write_text(json.dumps([*said, intact]))


@pytest.mark.parametrize(("how", "why"), [
    ("arrays", ["another process could not", "No space left on device"]),
    ("merging", ["No space left on device", "another process could not"]),
    ("checksums", ["No space left on device", "another process could not"]),
    ("folder", ["Not a directory", "another process could not"]),
])  # fmt: skip
def test_a_save_that_one_process_cannot_write(how: str, why: list[str], tmp_path: Path) -> None:
    spawn(save_three_times, 2, args=(str(tmp_path), how))
    for rank in (0, 1):
        assert json.loads((tmp_path / str(rank)).read_text()) == ["saved", why[rank], "saved", 3]
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == (["3"] if how == "folder" else ["1", "3"])
