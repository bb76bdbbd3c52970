"""Damaged checkpoints: every kind of damage to every kind of file is found and named, and the step before is used."""

import errno
import functools
import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import child
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import on_page

from jaxdist.checkpoint import Checkpoints, checksums, manager
from jaxdist.checkpoint.checksums import CHECKSUMS, Cancelled, check_files, record_of, seal
from jaxdist.checkpoint.errors import reading
from jaxdist.errors import UserError
from jaxdist.state import TrainState

pytestmark = pytest.mark.xdist_group("damage")  # the saved folder is shared by the tests of this file

Damage = Callable[[Path, random.Random], None]


def state_of(step: int) -> TrainState:
    params = {f"w{i}": jax.random.normal(jax.random.key(step + i), (64, 64)) for i in range(3)}
    return TrainState(jnp.int32(step), params, (), residual={"w0": jnp.full((1, 64), step, jnp.float32)})


def asked() -> TrainState:
    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)  # noqa: E731
    return jax.tree.map(shape, state_of(0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("damage") / "checkpoints"
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), {"step": step})
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def kinds(folder: Path) -> list[str]:
    """One file of each kind."""
    return list({re.sub("[0-9a-f]{32}", "#", name): name for name in files_of(folder)}.values())


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def delete(path: Path, rng: random.Random) -> None:
    path.unlink()


def rename(path: Path, rng: random.Random) -> None:
    path.rename(path.with_name("other"))


def add(path: Path, rng: random.Random) -> None:
    path.with_name(path.name + ".new").write_bytes(b"")


def assert_same(got: TrainState, want: TrainState) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, want)


def found(folder: Path, name: str, damage: Damage, rng: random.Random, *, restoring: bool = True) -> str:
    """Damage a file of step 2; the line that says so, once it was seen that step 1 takes its place."""
    damage(folder / "2" / name, rng)
    lines: list[str] = []
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.newest_intact(lines.append) == 1, (name, damage)
        assert checkpoints.latest() == 1
        if restoring:
            assert_same(checkpoints.restore(1, asked()), state_of(1))
    [line] = lines
    assert re.fullmatch(r"checkpoint of step 2 is damaged: [^\n]*; moved to 2.damaged, step 1 is used", line)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2.damaged"]
    return line


def test_every_kind_of_file_damaged(saved: Path, tmp_path: Path) -> None:
    names, damages = kinds(saved / "2"), (flip, truncate, delete)
    assert {CHECKSUMS, "commit_success.txt", "_CHECKPOINT_METADATA", "meta/metadata"} < set(names) and len(names) > 10
    for i, name in enumerate(names):
        folder = Path(shutil.copytree(saved, tmp_path / str(i)))
        line = found(folder, name, damages[i % 3], random.Random(i), restoring=i < 2)
        assert f" {name} " in line


@pytest.mark.parametrize(
    ("name", "damage", "text"),
    [
        ("meta/metadata", rename, "meta/metadata is missing, meta/other does not belong there"),
        ("meta/metadata", add, "meta/metadata.new does not belong there"),
        (CHECKSUMS, delete, f"{CHECKSUMS} is missing"),
    ],
)
def test_names_and_strangers(copy: Path, name: str, damage: Damage, text: str) -> None:
    assert f"damaged: {text}; moved" in found(copy, name, damage, random.Random(0), restoring=False)


@pytest.mark.slow
def test_130_of_130(saved: Path, tmp_path: Path) -> None:
    rng, names = random.Random(0), files_of(saved / "2")
    for i, damage in enumerate([flip] * 100 + [truncate] * 20 + [delete] * 10):
        name = names[i % len(names)] if damage is flip else rng.choice(names)
        folder = Path(shutil.copytree(saved, tmp_path / str(i)))
        try:
            assert f" {name} " in found(folder, name, damage, rng, restoring=i % 20 == 0)
        except UserError:  # a bit of the version's digit: refused as a later version's, and nothing is moved
            assert name in (CHECKSUMS, "meta/metadata") and checksums.newer_format(folder / "2")
            assert files_of(folder / "2") == names


def test_restore_itself_looks_too(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = max((copy / "2" / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    flip(data, random.Random(0))
    name = data.relative_to(copy / "2").as_posix()
    with Checkpoints(copy, keep=2) as checkpoints:
        with pytest.raises(UserError, match=f"^checkpoint of step 2 is damaged: {name} changed; use another one"):
            checkpoints.restore(2, asked())
        assert checkpoints.newest_intact(print) == 1
        looked: list[int] = []
        monkeypatch.setattr(
            manager, "check_files", lambda folder, step: looked.append(step) or check_files(folder, step)
        )
        checkpoints.restore(1, asked())
        assert looked == [], "read a moment ago"
        checkpoints.restore(1, asked())
        assert looked == [1]


def test_none_is_left(copy: Path) -> None:
    for step, name in ((1, "meta/metadata"), (2, "state/_METADATA")):
        (copy / str(step) / name).unlink()
    with Checkpoints(copy, keep=2) as checkpoints, pytest.raises(UserError) as error:
        checkpoints.newest_intact(lambda line: pytest.fail(line))
    text = "is damaged (step 2: state/_METADATA is missing; step 1: meta/metadata is missing); use a copy, or another"
    assert text in str(error.value) and "\n" not in str(error.value)
    assert sorted(path.name for path in copy.iterdir()) == ["1", "2"], "nothing is moved"


def test_the_step_is_saved_again_and_damaged_again(copy: Path) -> None:
    for aside in ("2.damaged", "2.damaged-2"):
        truncate(copy / "2" / "state" / "_METADATA", random.Random(0))
        with Checkpoints(copy, keep=2) as checkpoints:
            lines: list[str] = []
            assert checkpoints.newest_intact(lines.append) == 1
            assert f"moved to {aside}," in lines[0]
            checkpoints.save(2, state_of(2), {"step": 2})
            checkpoints.wait()
            assert checkpoints.newest_intact(lines.append) == 2
            assert_same(checkpoints.restore(2, asked()), state_of(2))
    assert sorted(path.name for path in copy.iterdir()) == ["1", "2", "2.damaged", "2.damaged-2"]


def test_a_file_that_cannot_be_read_is_damage(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector is what checksums are for; and nothing that fails here leaves other processes waiting."""
    bad, digest = copy / "2" / kinds(copy / "2")[0], checksums._digest

    def read(path: Path, cancel: Event) -> str:
        if path == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return digest(path, cancel)

    monkeypatch.setattr(checksums, "_digest", read)
    lines: list[str] = []
    with Checkpoints(copy, keep=2) as checkpoints:
        monkeypatch.setattr(Path, "rename", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
        with pytest.raises(UserError, match="damaged and cannot be moved aside: Permission denied; move it away"):
            checkpoints.newest_intact(lines.append)
        monkeypatch.undo()
        monkeypatch.setattr(checksums, "_digest", read)
        assert checkpoints.newest_intact(lines.append) == 1
    assert len(lines) == 1 and f"{bad.relative_to(copy / '2')} cannot be read: Input/output error; moved" in lines[0]


def test_closing_ends_the_look_ahead(copy: Path) -> None:
    """A mistake in the data ends a run while its newest checkpoint is read: nobody waits for 64 GiB of it."""
    (copy / "3").mkdir()
    size, name = 1 << 36, "large"
    with (copy / "3" / name).open("wb") as file:
        file.truncate(size)  # takes no room
    (copy / "3" / CHECKSUMS).write_text(checksums._text(3, {name: [size, "0" * 64]}))
    with pytest.raises(UserError, match="^data"), Checkpoints(copy, keep=2) as checkpoints:
        assert checkpoints.latest() == 3
        checkpoints.look_ahead()
        assert checkpoints._ahead is not None
        step, verdict = checkpoints._ahead
        raise UserError("data")
    assert step == 3 and isinstance(verdict.exception(timeout=20), Cancelled)


def test_an_older_damaged_step_does_not_matter(copy: Path) -> None:
    for name in ("_CHECKPOINT_METADATA", "meta/metadata", CHECKSUMS):
        truncate(copy / "1" / name, random.Random(0))
    with Checkpoints(copy, keep=2, keep_best=1) as checkpoints:
        assert checkpoints.newest_intact(lambda line: pytest.fail(line)) == 2
        checkpoints.save(3, state_of(3), {})
    assert sorted(path.name for path in copy.iterdir()) == ["2", "3"]


def test_a_folder_under_another_name(copy: Path) -> None:
    (copy / "2").rename(copy / "5")
    lines: list[str] = []
    with Checkpoints(copy, keep=2) as checkpoints:
        assert checkpoints.newest_intact(lines.append) == 1
    assert f"checkpoint of step 5 is damaged: {CHECKSUMS} of step 2; moved to 5.damaged" in lines[0]


def test_an_older_version_s_checkpoint(copy: Path) -> None:
    """It has neither checksums nor a record that there should be."""
    (copy / "2" / CHECKSUMS).unlink()
    (copy / "2" / "meta" / "metadata").write_text(json.dumps({"step": 2}))
    lines: list[str] = []
    with Checkpoints(copy, keep=2) as checkpoints:
        assert checkpoints.newest_intact(lines.append) == 2
        assert lines == ["checkpoint of step 2 is not verified: an older version saved it, without checksums"]
        assert_same(checkpoints.restore(2, asked()), state_of(2))
        with pytest.warns(UserWarning, match="checkpoint of step 2 has no checksums and cannot be verified"):
            checkpoints.restore(2, asked())


def test_the_record_is_not_in_meta(saved: Path) -> None:
    with Checkpoints(saved, keep=2) as checkpoints:
        assert checkpoints.meta(2) == {"step": 2}
    assert record_of(saved / "2") == {"checksums": 1, "blocks": "in the model's order"}


@pytest.mark.parametrize(
    "name", ["../1/checksums.json", "/etc/hostname", "a/../../x", "a//b", ".", "a\\b", "a\0b", "a\nb", ""]
)
def test_a_listed_path_outside_is_not_opened(copy: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums that are right in themselves, by someone else's hand."""
    with monkeypatch.context() as patch:
        secret = copy / "secret"
        secret.write_text("x")
        real = "jaxdist.checkpoint.checksums._files"
        patch.setattr(real, lambda folder: ({name: secret}, []))
        seal(copy / "2", 2)
    opened = []
    monkeypatch.setattr(Path, "open", functools.partialmethod(_watched, opened, Path.open))
    verdict = check_files(copy / "2", 2)
    assert verdict.problem == f"{CHECKSUMS} names {name!r}, which is no place inside the folder" and verdict.sealed
    # The thread of an earlier test's save may look at its threads in /proc meanwhile.
    assert {path.name for path in opened if "proc" not in path.parts} <= {CHECKSUMS}


@pytest.mark.parametrize("entry", [["\n", "0" * 64], [True, "0" * 64], [2, None], [2], {"a": 1}, None])
def test_a_listed_entry_of_other_types(copy: Path, entry: object) -> None:
    (copy / "2" / CHECKSUMS).write_text(checksums._text(2, {"a": entry}))
    assert check_files(copy / "2", 2).problem == f"{CHECKSUMS} changed"


def _watched(self: Path, opened: list[Path], real: Callable[..., object], *args: object, **options: object) -> object:
    opened.append(self)
    return real(self, *args, **options)


@pytest.mark.parametrize("name", [CHECKSUMS, "state/_METADATA", "state"])
def test_links_are_not_followed(copy: Path, tmp_path: Path, name: str) -> None:
    path = copy / "2" / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert f"{name} is no file" in check_files(copy / "2", 2).problem


@pytest.mark.parametrize("name", [CHECKSUMS, "meta/metadata", "state/_METADATA"])
def test_a_pipe_is_not_waited_for(copy: Path, name: str) -> None:
    (copy / "2" / name).unlink()
    os.mkfifo(copy / "2" / name)
    lines: list[str] = []
    with Checkpoints(copy, keep=2) as checkpoints:
        assert checkpoints.newest_intact(lines.append) == 1
    assert f"checkpoint of step 2 is damaged: {name} is no file; moved to 2.damaged" in lines[0]


@pytest.mark.parametrize("where", ["version", "record", "both"])
def test_a_newer_format_is_no_damage(copy: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is read before anything else is judged, and nothing is moved, not even what is damaged."""
    folder = copy / "2"
    with monkeypatch.context() as patch:
        patch.setattr(checksums, "CHECKPOINT_FORMAT", 2)
        if where != "version":
            (folder / CHECKSUMS).unlink()
            meta = json.loads((folder / "meta" / "metadata").read_text())
            (folder / "meta" / "metadata").write_text(json.dumps(meta | {"jaxdist": {"checksums": 2}}))
        if where != "record":
            seal(folder, 2)
    (Path(shutil.copytree(folder, copy / "3")) / "state" / "_METADATA").unlink()
    if where == "record":
        (copy / "3" / "meta" / "metadata").unlink()  # this one is damaged
    names = files_of(copy)
    with Checkpoints(copy, keep=2) as checkpoints:
        for call in (lambda: checkpoints.newest_intact(print), lambda: checkpoints.restore(2, asked())):
            with pytest.raises(UserError) as error:
                call()
            on_page("docs/checkpoints.md", f"error: {error.value}", {"step [23]": "step 4"})
    assert files_of(copy) == names


KILLED = """
import os, signal, sys
from pathlib import Path
import jax.numpy as jnp
from jaxdist.checkpoint import Checkpoints, checksums
from jaxdist.state import TrainState
real = checksums.seal
def seal(folder, step):
    if step == 2:
        if sys.argv[2] == "after":
            real(folder, step)
        os.kill(os.getpid(), signal.SIGKILL)
    real(folder, step)
checksums.seal = seal
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
for step in (1, 2):
    checkpoints.save(step, TrainState(jnp.int32(step), {"w": jnp.full(8, step)}, ()), {"step": step})
checkpoints.wait()
"""


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_killed_around_the_checksums(when: str, tmp_path: Path) -> None:
    """After orbax's last write and before the folder has its name, without or with checksums: it is no checkpoint."""
    environ = child.environment() | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), when], env=environ)
    assert process.returncode == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2.orbax-checkpoint-tmp-sealing"]
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() == checkpoints.newest_intact(lambda line: pytest.fail(line)) == 1
        state = TrainState(jnp.int32(2), {"w": jnp.full(8, 2)}, ())
        checkpoints.save(2, state, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"], "the half is gone"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the reads that orbax gives up
def test_a_shard_that_was_never_written(copy: Path) -> None:
    """As of a process whose folder was another one: the checksums are right, and orbax finds no array."""
    written = (copy / "2" / "state" / "ocdbt.process_0" / "d").iterdir()
    max(written, key=lambda path: path.stat().st_size).unlink()
    (copy / "2" / CHECKSUMS).unlink()
    seal(copy / "2", 2)
    with Checkpoints(copy, keep=2) as checkpoints:
        with pytest.raises(
            UserError, match="^checkpoint of step 2 cannot be read: ValueError: [^\n]*; use another one"
        ):
            checkpoints.restore(2, asked())
        assert_same(checkpoints.restore(1, asked()), state_of(1))
    gc.collect()  # here, and not in another test


def test_what_hides_behind_orbax_s_bare_exception() -> None:
    """As a shard that is missing. What has another cause is no damage."""
    said = "^step 3 cannot be read: ValueError: NOT_FOUND: chunk; use another one$"
    with pytest.raises(UserError, match=said), reading("step 3"):
        raise Exception("while reading") from ValueError("NOT_FOUND: chunk")
    with pytest.raises(Exception, match="^while reading$") as raised, reading("step 3"):
        raise Exception("while reading") from RuntimeError("no memory")
    assert raised.type is Exception
