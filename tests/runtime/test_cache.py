"""The compilation cache: a folder of one's own, on where it is safe."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import pytest

from jaxdist.errors import UserError
from jaxdist.runtime import cache
from jaxdist.runtime.cache import CacheHits, cache_row, check_private, default_folder, folder_in_use, set_up, why_off


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of its own; JAX's settings come back afterwards."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"):
        monkeypatch.delenv(name, raising=False)
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    before = {name: jax.config.values[name] for name in names}
    for name, value in zip(names, (None, True), strict=True):
        jax.config.update(name, value)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_folder_of_ones_own_on_gpus(home: Path) -> None:
    set_up(True, "gpu")
    folder = home / ".cache" / "jaxdist" / f"jax-{jax.__version__}"
    assert folder_in_use() == str(folder) and folder.stat().st_mode & 0o777 == 0o700
    set_up(True, "gpu")  # and again, now that it is there
    assert cache_row(True, "gpu", 2) == f"{folder}, 2 programs from it so far"


def test_folders(home: Path) -> None:
    assert default_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/jaxdist") / f"jax-{jax.__version__}"
    assert default_folder({"XDG_CACHE_HOME": "relative"}) == default_folder({})
    set_up("~/programs/mine", "gpu")
    assert folder_in_use() == str(home / "programs" / "mine")


@pytest.mark.parametrize(
    ("value", "backend", "text"),
    [(False, "gpu", "devices.compilation_cache=false"), (True, "cpu", "on CPUs"), ("~/x", "cpu", "on CPUs")],
)
def test_where_it_stays_off(value: str | bool, backend: str, text: str, home: Path) -> None:
    set_up(value, backend)
    assert text in (why_off(value, backend) or "") and folder_in_use() is None and not list(home.iterdir())
    assert cache_row(value, backend, 0) == (f"off: {why_off(value, backend)}" if value == "~/x" else None)


@pytest.mark.parametrize("name", ["JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"])
def test_the_environment_wins(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "false")
    set_up(True, "gpu")
    assert not list(home.iterdir())


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_can_write_to(mode: int, home: Path) -> None:
    folder = home / "shared"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(UserError, match=r"devices\.compilation_cache: .*shared' can be changed by others.*go-w"):
        set_up(str(folder), "gpu")
    (folder / "inner").mkdir(mode=0o700)
    if mode & 0o002:
        with pytest.raises(UserError, match="lies in '.*shared', where others could replace it"):
            set_up(str(folder / "inner"), "gpu")
    folder.chmod(mode | 0o1000)  # sticky: entries are their owners'
    set_up(str(folder / "inner"), "gpu")
    link = home / "link"
    link.symlink_to(folder)
    with pytest.raises(UserError, match="shared' can be changed by others"):
        check_private(link)


def test_somebody_elses_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = home / "own"
    own.mkdir(mode=0o700)
    check_private(own)
    true = own.stat()
    monkeypatch.setattr(Path, "stat", lambda _: os.stat_result((*true[:4], true.st_uid + 1, *true[5:])))
    with pytest.raises(UserError, match="can be changed by others"):
        check_private(own)


def test_a_file_in_its_place(home: Path) -> None:
    (home / "file").write_text("")
    with pytest.raises(UserError, match=r"devices\.compilation_cache: .*file': File exists; allowed: a folder"):
        set_up(str(home / "file"), "gpu")


def test_the_default_folder_is_left_alone_where_it_cannot_be(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody asked for it: no error, a warning."""
    (home / ".cache").write_text("")
    set_up(True, "gpu")
    (home / ".cache").unlink()
    folder = default_folder(os.environ)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    set_up(True, "gpu")
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    set_up(True, "gpu")
    assert folder_in_use() is None
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3 and all(line.startswith("no compilation cache: devices.compilation_cache: ") for line in said)


def answers(other: Callable[[int, Any], Any]) -> Callable[[Any], list[Any]]:
    """A stand-in for `from_all` in a job of two. other: (number of the exchange, own value) -> that of rank 1."""
    numbers = itertools.count()
    return lambda value: [value, other(next(numbers), value)]


def test_processes_that_see_one_default_folder_use_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process a GPU, or hosts with one home folder."""
    exchanged = list[Any]()

    def same(number: int, value: Any) -> Any:
        exchanged.append(value)
        return value

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(cache, "from_all", answers(same))
    set_up(True, "gpu")
    folder = default_folder(os.environ)
    assert folder_in_use() == str(folder) and len(exchanged) == 3 and not list(folder.iterdir())


@pytest.mark.parametrize(
    ("blind", "wanted"),
    [
        ("rank 1", "of rank 0 is not that of rank 1; allowed:"),
        ("rank 0", "jaxdist': Not a directory"),
        ("the key of rank 1", "devices.compilation_cache: true, and something else for rank 1"),
    ],
)
def test_processes_with_a_folder_each_have_no_cache(
    blind: str, wanted: str, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What each would keep, the others would not find: all of them say no, and rank 0 says why."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    first = 0 if blind == "the key of rank 1" else 2  # the exchange to which rank 1 answers no
    monkeypatch.setattr(cache, "from_all", answers(lambda number, value: value and number < first))
    if blind == "rank 0":
        (home / ".cache").write_text("")
    set_up(True, "gpu")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    replies = iter([[True, True], ["" if blind == "rank 0" else "seen-x", ""], [True, False]])
    monkeypatch.setattr(cache, "from_all", lambda value: next(replies))
    set_up(True, "gpu")
    assert folder_in_use() is None
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("no compilation cache: devices.compilation_cache: ") and wanted in said


@pytest.mark.parametrize("key", [False, "given"])
def test_a_rank_with_another_key_takes_part_in_the_exchange(
    key: str | bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the others would wait for it."""
    asked = list[Any]()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(cache, "from_all", lambda value: [asked.append(value) is None, value])
    set_up(str(home / key) if isinstance(key, str) else key, "gpu")
    assert asked == [False] and folder_in_use() == (str(home / key) if isinstance(key, str) else None)


def test_hits_are_counted_while_open() -> None:
    with CacheHits() as hits:
        jax.monitoring.record_event(cache.HIT)
        jax.monitoring.record_event("/jax/compilation_cache/cache_misses")
    jax.monitoring.record_event(cache.HIT)
    assert hits.count == 1
