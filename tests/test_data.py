"""Sources, loader and n-gram yardsticks of `jaxdist.data`."""

import contextlib
import dataclasses
import gc
import itertools
import math
import os
import re
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist import registry
from jaxdist.config import DataConfig
from jaxdist.data import Loader, Source, bigram_bits, prefetch, trigram_bits
from jaxdist.data.loader import ShuffledWindows, SpreadWindows, permute
from jaxdist.data.source import fingerprint, held_out_files, split_tail
from jaxdist.data.sources.text import text
from jaxdist.data.sources.tokens import tokens
from jaxdist.errors import UserError
from jaxdist.mesh import BATCH_AXES, make_mesh

FAST = settings(max_examples=60, deadline=None)


def sharding(**sizes: int) -> NamedSharding:
    return NamedSharding(make_mesh(devices=None, **sizes), P(BATCH_AXES))


def config(path: Path | str, **changes: Any) -> DataConfig:
    return dataclasses.replace(DataConfig(), **{"path": str(path), "seq_len": 4, **changes})


def numbers(size: int) -> np.ndarray:
    """Ids that are their own positions, so that a window shows where it was cut."""
    return np.arange(size, dtype=np.uint32)


def loader(size: int = 1000, *, seq_len: int = 7, global_batch: int = 8, **options: Any) -> Loader:
    options.setdefault("sharding", sharding(data=1))
    return Loader(numbers(size), seq_len=seq_len, global_batch=global_batch, **options)


def folder_of(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def many_files(number: int) -> dict[str, bytes]:
    return {f"part{i // 10}/{i}.txt": f"<{i}> some text\n".encode() for i in range(number)}


# Shuffle


@FAST
@given(count=st.integers(1, 700), seed=st.integers(0, 2**32 - 1))
def test_permute_is_a_permutation(count: int, seed: int) -> None:
    keys = np.random.default_rng(seed).integers(0, 2**64, 8, np.uint64)
    assert sorted(permute(np.arange(count), count, keys)) == list(range(count))


@pytest.mark.parametrize("count", [100_000, 2**16 - 1, 2**16, 2**16 + 1, 2**18 + 1])
def test_permute_mixes_and_is_exact_around_powers_of_two(count: int) -> None:
    keys = np.arange(8, dtype=np.uint64)
    out = permute(np.arange(count), count, keys)
    assert np.array_equal(np.sort(out), np.arange(count))
    assert abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < 0.02  # neighbours part
    assert abs(np.corrcoef(np.arange(count), out)[0, 1]) < 0.02  # nothing stays where it was, not even in its half


def test_permute_gives_every_order_equally_often() -> None:
    trials = 1200
    keys = np.random.SeedSequence(1).generate_state(8 * trials, np.uint64).reshape(trials, 8)
    seen: dict[tuple[int, ...], int] = {}
    for row in keys:
        order = tuple(permute(np.arange(4), 4, row).tolist())
        seen[order] = seen.get(order, 0) + 1
    expected = trials / 24
    chi2 = sum((seen.get(order, 0) - expected) ** 2 / expected for order in itertools.permutations(range(4)))
    assert chi2 < 49.7  # 99.9 % point at 23 degrees of freedom


def test_order_is_pinned() -> None:
    """If this fails, runs under way would go on with other data after an update."""
    windows = ShuffledWindows(1000, seq_len=7, seed=3)
    assert windows.starts(np.arange(5))[0].tolist() == [546, 420, 147, 889, 455]
    assert windows.starts(10**9 + np.arange(5))[0].tolist() == [692, 328, 944, 678, 811]


# Windows


@FAST
@given(size=st.integers(2, 400), seq_len=st.integers(1, 40), batch=st.integers(1, 70), seed=st.integers(0, 2**31 - 1))
def test_every_window_once_an_epoch(size: int, seq_len: int, batch: int, seed: int) -> None:
    size = max(size, seq_len + 1)
    windows = ShuffledWindows(size, seq_len=seq_len, seed=seed)
    epochs = 3
    steps = math.ceil(epochs * windows.count / batch)
    parts = [windows.starts(np.arange(s * batch, (s + 1) * batch))[0] for s in range(steps)]
    starts = np.concatenate(parts)[: epochs * windows.count].reshape(epochs, windows.count)
    for epoch in starts:
        offset = int(epoch.min())
        assert 0 <= offset < seq_len
        assert sorted(epoch) == [offset + i * seq_len for i in range(windows.count)]
        assert epoch.max() + seq_len < size  # the last target is inside
    unread = size - 1 - windows.count * seq_len
    assert unread < 2 * seq_len


def test_epochs_differ_in_order_and_offset() -> None:
    windows = ShuffledWindows(1000, seq_len=20, seed=0)
    epochs = windows.starts(np.arange(40 * windows.count))[0].reshape(40, windows.count)
    assert len(set(epochs.min(axis=1).tolist())) > 10  # offsets, of 20
    assert len({tuple(np.argsort(epoch)) for epoch in epochs}) == 40
    other = ShuffledWindows(1000, seq_len=20, seed=1).starts(np.arange(40 * windows.count))[0].reshape(40, -1)
    assert not any(np.array_equal(a, b) for a in epochs for b in other)  # seed + 1 is not the next epoch of seed


def test_batch_across_an_epoch_boundary_and_batch_larger_than_the_text() -> None:
    few = loader(100, seq_len=7, global_batch=5)  # 13 windows: the third batch has 3 of epoch 0 and 2 of epoch 1
    assert few.windows.count == 13
    assert [few.epoch_of(step) for step in range(6)] == [0, 0, 0, 1, 1, 1]
    inputs = np.concatenate([few.host_rows(step, slice(None))["inputs"] for step in range(13)])
    for epoch in range(5):
        assert len(set(inputs[epoch * 13 : (epoch + 1) * 13, 0].tolist())) == 13
    many = loader(100, seq_len=7, global_batch=65)
    assert np.array_equal(many.host_rows(0, slice(None))["inputs"], inputs)


@FAST
@given(size=st.integers(2, 300), seq_len=st.integers(1, 20), batch=st.integers(1, 30), start=st.integers(0, 10**6))
def test_targets_are_inputs_shifted(size: int, seq_len: int, batch: int, start: int) -> None:
    rows = loader(max(size, seq_len + 1), seq_len=seq_len, global_batch=batch).host_rows(start, slice(None))
    assert rows["inputs"].shape == rows["targets"].shape == rows["weights"].shape == (batch, seq_len)
    assert np.array_equal(rows["targets"], rows["inputs"] + 1)  # the text counts up
    assert np.array_equal(np.diff(rows["inputs"], axis=1), np.ones((batch, seq_len - 1)))
    assert np.all(rows["weights"] == 1)
    assert np.array_equal(rows["sample"], np.arange(batch))
    assert [rows[leaf].dtype for leaf in rows] == [np.int32, np.int32, np.float32, np.int32]


@FAST
@given(
    size=st.integers(2, 500),
    seq_len=st.integers(1, 20),
    batch=st.integers(1, 20),
    batches=st.none() | st.integers(1, 9),
)
def test_evaluation_windows(size: int, seq_len: int, batch: int, batches: int | None) -> None:
    size = max(size, seq_len + 1)
    fixed = loader(size, seq_len=seq_len, global_batch=batch, shuffle=False, batches=batches)
    assert fixed.batches is not None
    assert batches is None or fixed.batches <= batches
    made = [fixed.host_rows(step, slice(None)) for step in range(fixed.batches)]
    counted = [rows["inputs"][rows["weights"][:, 0] == 1, 0] for rows in made]
    assert all(len(starts) for starts in counted)  # no batch without weight
    starts = np.sort(np.concatenate(counted))
    assert len(set(starts.tolist())) == len(starts) == min(fixed.batches * batch, (size - 1) // seq_len)
    assert np.all(starts % seq_len == 0)
    if batches is None:
        assert starts.tolist() == list(range(0, size - seq_len, seq_len))  # all of the text, once
    if len(starts) > 1:
        gaps = np.diff(starts) // seq_len
        assert gaps.max() - gaps.min() <= 1  # evenly spread
    with pytest.raises(IndexError):
        fixed.host_rows(fixed.batches, slice(None))


def test_each_evaluation_batch_is_spread_over_the_text() -> None:
    windows = SpreadWindows(100_001, seq_len=10, global_batch=16, batches=4)
    for step in range(4):
        starts = np.sort(windows.starts(step * 16 + np.arange(16))[0])
        assert starts[0] < 100_000 / 16
        assert starts[-1] > 100_000 * 14 / 16


# Global batches


def as_numpy(batch: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    return {leaf: np.asarray(value) for leaf, value in batch.items()}


@pytest.mark.parametrize(
    "sizes", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"expert": 4, "pipe": 2}, {"tensor": 8}]
)
def test_global_batch_does_not_depend_on_the_mesh(sizes: dict[str, int]) -> None:
    alone, spread = loader(seed=5), loader(seed=5, sharding=sharding(**sizes))
    for step in (0, 1, 40):
        with jax.transfer_guard("disallow"):
            batch = spread.batch(step)
        rows = alone.host_rows(step, slice(None))
        assert list(batch) == ["inputs", "targets", "weights", "sample"]
        for leaf, value in as_numpy(batch).items():
            np.testing.assert_array_equal(value, rows[leaf], strict=True)
            assert batch[leaf].sharding == spread.sharding
            for shard in batch[leaf].addressable_shards:
                np.testing.assert_array_equal(shard.data, rows[leaf][shard.index])


def test_each_row_range_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    original = Loader.host_rows

    def counting(self: Loader, step: int, rows: slice) -> dict[str, np.ndarray]:
        asked.append((rows.start, rows.stop))
        return original(self, step, rows)

    monkeypatch.setattr(Loader, "host_rows", counting)
    loader(sharding=sharding(data=2, fsdp=2, tensor=2)).batch(3)
    assert sorted(asked) == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_two_processes_read_the_batch_of_one() -> None:
    one, first, second = (loader(seed=9) for _ in range(3))
    for step in range(20):
        whole = one.host_rows(step, slice(None))
        halves = first.host_rows(step, slice(0, 4)), second.host_rows(step, slice(4, 8))
        for leaf, value in whole.items():
            np.testing.assert_array_equal(np.concatenate([half[leaf] for half in halves]), value, strict=True)


def test_determinism_and_seed() -> None:
    def inputs(seed: int, step: int) -> np.ndarray:
        return loader(seed=seed).host_rows(step, slice(None))["inputs"]

    np.testing.assert_array_equal(inputs(1, 4), inputs(1, 4))
    assert not np.array_equal(inputs(1, 4), inputs(2, 4))
    assert not np.array_equal(inputs(1, 4), inputs(1, 5))


def test_loader_errors() -> None:
    with pytest.raises(UserError, match=r"data\.seq_len=7: a window is 8 tokens, the text has 7"):
        loader(7)
    with pytest.raises(UserError, match=r"data\.global_batch=6 .* 4 devices .*use a multiple of 4"):
        loader(global_batch=6, sharding=sharding(data=2, fsdp=2))
    with pytest.raises(UserError, match="shuffle=False"):
        loader(batches=3)
    with pytest.raises(IndexError):
        loader().host_rows(-1, slice(None))
    assert loader(8).host_rows(0, slice(0, 1))["inputs"].tolist() == [list(range(7))]  # exactly one window


# Prefetch


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("jaxdist-prefetch")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not prefetch_threads()


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_prefetch_order(depth: int) -> None:
    assert list(prefetch(lambda i: i * i, 3, 9, depth)) == [9, 16, 25, 36, 49, 64]
    assert list(prefetch(lambda i: i, 5, 5, depth)) == []
    assert not prefetch_threads()


def test_prefetch_makes_ahead_but_not_further_than_depth() -> None:
    made: list[int] = []
    reached = threading.Event()

    def make(i: int) -> int:
        made.append(i)
        if i == 2:
            reached.set()
        return i

    with contextlib.closing(prefetch(make, 0, 100, 2)) as items:
        assert next(items) == 0
        assert reached.wait(5)  # 1 and 2 come without being asked for
        time.sleep(0.05)
        assert made == [0, 1, 2]


def test_prefetch_raises_in_place_with_the_traceback() -> None:
    def make_fails(i: int) -> int:
        if i == 2:
            raise RuntimeError("disk gone")
        return i

    seen = []
    with pytest.raises(RuntimeError, match="disk gone") as caught:
        for item in prefetch(make_fails, 0, 10):
            seen.append(item)
    assert seen == [0, 1]
    assert "make_fails" in [entry.name for entry in caught.traceback]
    assert not prefetch_threads()


@pytest.mark.parametrize("leave", ["close", "break", "interrupt"])
def test_prefetch_stops_when_left(leave: str) -> None:
    made: list[int] = []

    def make(i: int) -> int:
        made.append(i)
        time.sleep(0.02)
        return i

    begun = time.perf_counter()
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(prefetch(make, 0, 10_000, 50)) as items:
        for item in items:
            if item == 1 and leave == "interrupt":
                raise KeyboardInterrupt
            if item == 1 and leave == "close":
                items.close()
            if item == 1:
                break
    assert not prefetch_threads()
    assert time.perf_counter() - begun < 0.5  # not the 50 items of 20 ms that were ahead
    assert len(made) < 10


def test_prefetched_batches_are_the_batches() -> None:
    spread = loader(sharding=sharding(data=4))
    for step, batch in enumerate(prefetch(spread.batch, 0, 6)):
        np.testing.assert_array_equal(as_numpy(batch)["inputs"], spread.host_rows(step, slice(None))["inputs"])


# Text


def test_stdlib() -> None:
    begun = time.perf_counter()
    source = text(DataConfig())
    assert time.perf_counter() - begun < 5  # 0.15 s where nobody else is at work
    assert source.vocab == 256
    assert source.train.dtype == source.held_out.dtype == np.uint8
    assert 8e6 < source.train.size + source.held_out.size < 14e6
    assert 0.02 < source.held_out.size / source.train.size < 0.1
    assert source.info["train"] == source.train.size
    assert source.info["files"] > 10 * source.info["held_out_files"] > 0
    assert source.info["unit"] == "bytes"
    assert not source.train.flags.writeable
    assert b"def dataclass(" in source.train.tobytes() + source.held_out.tobytes()
    assert text(DataConfig()).info == source.info


def test_stdlib_is_the_library_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"ast.py": b"import ast\n", "json/_tests_helper.py": b"import json\n", "xml/sax/a.py": b"import xml\n"}
    dropped = ("site-packages/a.py", "dist-packages/a.py", "test/a.py", "ctypes/test/a.py", "lib2to3/tests/a.py",
               "idlelib/idle_test/a.py", "pydoc_data/topics.py", "_sysconfigdata__linux.py", "config-3.11/a.py",
               "__pycache__/a.py", "os.pyc", "LICENSE.txt")  # fmt: skip
    folder_of(tmp_path, kept | dict.fromkeys(dropped, b"not wanted\n"))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    source = text(config("stdlib"))
    assert sorted((source.train.tobytes() + source.held_out.tobytes()).splitlines(True)) == sorted(kept.values())
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python311.zip")})
    with pytest.raises(UserError, match=r"^data\.path: cannot read .*python311\.zip"):
        text(config("stdlib"))


def test_folder_is_split_by_file_and_stays_split(tmp_path: Path) -> None:
    files = many_files(60)
    before = text(config(folder_of(tmp_path, files), held_out=0.2))
    train, held = before.train.tobytes(), before.held_out.tobytes()
    for content in files.values():
        assert (content in train) != (content in held)
    assert len(train) + len(held) == sum(map(len, files.values()))
    assert (before.info["files"], before.info["held_out_files"]) == (train.count(b"<"), held.count(b"<"))
    after = text(config(folder_of(tmp_path, {"new.txt": b"<new> text\n", "part1/zzz": b"<zzz> more\n"}), held_out=0.2))
    for content in files.values():
        assert (content in train) == (content in after.train.tobytes())
    assert after.info["sha256"] != before.info["sha256"]


def test_folder_order_and_what_is_left_out(tmp_path: Path) -> None:
    kept = {"b.txt": b"bbbbbbbb", "a/z": b"zzzzzzzz", "a.txt": b"aaaaaaaa", "c/d/e.md": b"eeeeeeee"}
    dropped = {".hidden": b"hidden.. ", ".git/config": b"config.. ", "image.png": b"PNG\0......", "empty": b""}
    outside = folder_of(tmp_path / "outside", {"secret.txt": b"outside."})
    root = folder_of(tmp_path / "root", kept | dropped)
    (root / "link.txt").symlink_to(outside / "secret.txt")
    (root / "linked").symlink_to(outside, target_is_directory=True)
    (root / "loop").symlink_to(root, target_is_directory=True)
    os.mkfifo(root / "pipe")
    source = text(config(root))
    names = sorted(kept)
    chosen = held_out_files(names, 0.05)
    assert source.train.tobytes() == b"".join(kept[n] for n, held in zip(names, chosen, strict=True) if not held)
    assert source.held_out.tobytes() == b"".join(kept[n] for n, held in zip(names, chosen, strict=True) if held)
    late = folder_of(tmp_path / "late", {"x": b"x" * 8192 + b"\0", "y": b"y" * 99})  # NUL after the probe: text
    assert text(config(late)).info["train"] + text(config(late)).info["held_out"] == 8193 + 99


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1.0])
@pytest.mark.parametrize("number", [2, 3, 20])
def test_both_sides_have_a_file(fraction: float, number: int) -> None:
    chosen = held_out_files(list(many_files(number)), fraction)
    assert any(chosen)
    assert not all(chosen)


def test_single_file_is_split_at_its_end(tmp_path: Path) -> None:
    content = bytes(range(200))
    one = text(config(folder_of(tmp_path, {"one.txt": content[1:]}) / "one.txt", held_out=0.1))
    assert (one.train.tobytes(), one.held_out.tobytes()) == (content[1:181], content[181:])
    assert (one.info["files"], one.info["held_out_files"]) == (1, 1)
    folder = text(config(tmp_path, held_out=0.1))
    assert folder.train.tobytes() == one.train.tobytes()
    assert folder.info["sha256"] == one.info["sha256"]
    assert text(config(tmp_path, seq_len=1, held_out=0.015)).held_out.size == 2


def test_sha_changes_with_content_name_and_boundaries(tmp_path: Path) -> None:
    variants = [
        {"a": b"12345678", "b": b"abcdefgh"},
        {"a": b"12345678", "b": b"abcdefgX"},
        {"a": b"12345678a", "b": b"bcdefgh"},
        {"a": b"12345678", "c": b"abcdefgh"},
    ]
    shas = [text(config(folder_of(tmp_path / str(i), files))).info["sha256"] for i, files in enumerate(variants)]
    assert len(set(shas)) == 4
    assert all(len(sha) == 64 for sha in shas)
    again = text(config(folder_of(tmp_path / "again", variants[0]))).info
    assert again["sha256"] == shas[0]
    assert fingerprint([("a", 4, [b"12", b"34"])]) == fingerprint([("a", 4, [b"1234"])])
    assert fingerprint([("a", 2, [b"bc"]), ("d", 1, [b"e"])]) != fingerprint([("a", 1, [b"b"]), ("cd", 1, [b"e"])])


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "none", "does not exist"),
        ({}, ".", "no text in"),
        ({"a": b"\0", ".b": b"text of a hidden file", "c": b""}, ".", "no text in"),
        ({"a": b""}, "a", "is empty"),
        ({"a": b"12345678"}, "a", r"1 held-out bytes, less than one window of data.seq_len \+ 1 = 5"),
        ({"a": b"123456789", "b": b"12"}, ".", "less than one window"),
        ({"a": b"12"}, "a/b", "data.path: .*(does not exist|cannot read)"),
    ],
)
def test_text_errors(tmp_path: Path, files: dict[str, bytes], path: str, message: str) -> None:
    folder_of(tmp_path, files)
    with pytest.raises(UserError, match=r"^data\.path: ") as caught:
        text(config(tmp_path / path))
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder_of(tmp_path, many_files(12) | {"locked.txt": b"locked file"})
    opened = Path.open

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == "locked.txt":
            raise PermissionError(13, "Permission denied")  # as for a user who is not root, but without a file name
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"^data\.path: cannot read .*locked\.txt': Permission denied"):
        text(config(root))
    monkeypatch.undo()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="neither a regular file nor a folder"):
        text(config(tmp_path / "pipe"))
    scandir = os.scandir

    def locked(path: Any) -> Any:
        if str(path).endswith("part1"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(UserError, match=r"^data\.path: cannot read .*part1': Permission denied"):
        text(config(root))


# Tokens


def ids_file(path: Path, values: Any, dtype: str = "uint16") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.asarray(values, dtype).tofile(path)
    return path


def same(source: Source, train: Any, held_out: Any) -> bool:
    return bool(np.array_equal(source.train, train) and np.array_equal(source.held_out, held_out))


def test_tokens_in_a_folder(tmp_path: Path) -> None:
    ids_file(tmp_path / "train.bin", range(100))
    assert same(tokens(config(tmp_path, held_out=0.2)), range(80), range(80, 100))
    ids_file(tmp_path / "val.bin", range(500, 550))
    for path in (tmp_path, tmp_path / "train.bin"):
        source = tokens(config(path, held_out=0.2))
        assert same(source, range(100), range(500, 550))
        assert source.vocab == 550
    assert isinstance(source.train, np.memmap)
    assert not source.train.flags.writeable
    assert (source.info["unit"], source.info["train"], source.info["held_out"]) == ("tokens", 100, 50)
    other = ids_file(tmp_path / "other.bin", range(7))
    assert same(tokens(config(tmp_path, val_path=str(other))), range(100), range(7))
    assert same(tokens(config(other, held_out=0.5, seq_len=2)), range(4), range(4, 7))  # no val.bin for other names
    sha = source.info["sha256"]
    ids_file(tmp_path / "val.bin", [*range(500, 549), 9])
    assert tokens(config(tmp_path)).info["sha256"] != sha


def test_tokens_uint32_reach_the_batch(tmp_path: Path) -> None:
    path = ids_file(tmp_path / "ids", np.arange(70_000, 70_100), "uint32")
    source = tokens(config(path, token_dtype="uint32", held_out=0.2))
    assert source.vocab == 70_100
    made = Loader(source.train, seq_len=4, global_batch=8, sharding=sharding(data=8)).batch(0)
    assert int(made["inputs"].min()) >= 70_000
    np.testing.assert_array_equal(np.asarray(made["targets"]), np.asarray(made["inputs"]) + 1)


@pytest.mark.parametrize(
    ("key", "changes", "message"),
    [
        ("data.path", {"path": "none"}, "does not exist"),
        ("data.path", {"path": "folder"}, "train.bin' does not exist"),
        ("data.path", {"path": "empty"}, "is empty"),
        ("data.path", {"path": "odd"}, "has 101 bytes, not a multiple of 2"),
        ("data.path", {"path": "ids", "token_dtype": "uint32"}, "has 202 bytes, not a multiple of 4"),
        ("data.path", {"path": "ids", "seq_len": 10}, "5 held-out tokens, less than one window"),
        ("data.path", {"path": "ids", "seq_len": 100, "val_path": "ids2"}, "100 held-out tokens, less than one window"),
        ("data.path", {"path": "large", "token_dtype": "uint32"}, "holds the id 4294967295"),
        ("data.path", {"path": "holder"}, "not a regular file"),
        ("data.val_path", {"path": "ids", "val_path": "none"}, "does not exist"),
        ("data.val_path", {"path": "ids", "val_path": "ids"}, "is the training file"),
        ("data.val_path", {"path": "ids", "val_path": "odd"}, "not a multiple"),
        ("data.val_path", {"path": "ids", "val_path": "folder"}, "not a regular file"),
    ],
)
def test_tokens_errors(tmp_path: Path, key: str, changes: dict[str, Any], message: str) -> None:
    folder_of(tmp_path, {"empty": b"", "odd": b"x" * 101, "folder/readme": b"hello", "holder/train.bin/x": b"x"})
    ids_file(tmp_path / "ids", range(101))
    ids_file(tmp_path / "ids2", range(100))
    ids_file(tmp_path / "large", [2**32 - 1] * 99, "uint32")
    paths = {name: str(tmp_path / value) for name, value in changes.items() if name.endswith("path")}
    with pytest.raises(UserError, match=rf"^{key}: ") as caught:
        tokens(config(**{**changes, **paths}))
    caught.match(message)


@pytest.mark.parametrize("name", registry.names("jaxdist.data.sources"))
def test_every_source_keeps_the_contract(name: str, tmp_path: Path) -> None:
    path = ids_file(tmp_path / "ids", np.arange(300) % 97)
    source = registry.load("jaxdist.data.sources", name, key="data.source")(config(path))
    assert isinstance(source, Source)
    assert source.train.ndim == source.held_out.ndim == 1
    assert source.train.dtype == source.held_out.dtype
    assert max(int(source.train.max()), int(source.held_out.max())) < source.vocab
    keys = {"name", "path", "unit", "train", "held_out", "files", "held_out_files", "sha256"}
    assert set(source.info) == keys
    assert (source.info["name"], source.info["path"]) == (name, str(path))
    assert (source.info["train"], source.info["held_out"]) == (source.train.size, source.held_out.size)
    with pytest.raises(ValueError, match="read-only"):
        source.train[0] = 0


def test_split_tail_always_holds_something_out() -> None:
    assert [part.tolist() for part in split_tail(np.arange(5), 0.01)] == [[0, 1, 2, 3], [4]]


# N-grams


def test_bigram_against_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    train, held_out = rng.integers(0, 5, 300).astype(np.uint8), rng.integers(0, 6, 80).astype(np.uint8)
    total = 0.0
    for a, b in itertools.pairwise(held_out.tolist()):
        pairs = list(itertools.pairwise(train.tolist()))
        both, first = pairs.count((a, b)), sum(pair[0] == a for pair in pairs)
        total -= math.log2((both + 0.1) / (first + 0.1 * 6))
    assert bigram_bits(train, held_out, 6) == pytest.approx(total / 79, rel=1e-12)
    whole = bigram_bits(train, held_out, 6), trigram_bits(train, held_out, 6)
    monkeypatch.setattr("jaxdist.data.ngram._CHUNK", 7)  # counting in pieces changes nothing
    assert (bigram_bits(train, held_out, 6), trigram_bits(train, held_out, 6)) == whole


def test_bigram_closed_form() -> None:
    constant = np.zeros(1001, np.uint16)
    expected = -math.log2((1000 + 0.5) / (1000 + 0.5 * 64))
    assert bigram_bits(constant, constant[:10], 64, smoothing=0.5) == pytest.approx(expected, rel=1e-12)
    nothing = np.zeros(1, np.uint16)
    assert bigram_bits(nothing, constant[:9] + 1, 64) == pytest.approx(6)  # never seen: uniform, log2 64
    assert math.isnan(bigram_bits(constant, constant, 4097))


def test_trigram_against_counting() -> None:
    rng = np.random.default_rng(1)
    train, held_out = rng.integers(0, 3, 60).tolist(), rng.integers(0, 4, 40).tolist()

    def probability(context: tuple[int, ...] | None, last: int) -> float:
        if context is None:
            return 1 / 4
        size = len(context)
        after = [train[i + size] for i in range(len(train) - size) if tuple(train[i : i + size]) == context]
        below = probability(context[1:] if size else None, last)
        kinds = len(set(after))
        return (after.count(last) + kinds * below) / (len(after) + kinds) if after else below

    bits = [-math.log2(probability((a, b), c)) for a, b, c in zip(held_out, held_out[1:], held_out[2:], strict=False)]
    got = trigram_bits(np.asarray(train, np.uint8), np.asarray(held_out, np.uint8), 4)
    assert got == pytest.approx(np.mean(bits), rel=1e-12)
    assert sum(probability((1, 2), c) for c in range(4)) == pytest.approx(1)
    assert math.isnan(trigram_bits(np.zeros(9, np.uint16), np.zeros(9, np.uint16), 257))


def test_yardsticks_of_the_standard_library() -> None:
    source = text(DataConfig())
    bigram = bigram_bits(source.train, source.held_out, source.vocab)
    trigram = trigram_bits(source.train, source.held_out, source.vocab)
    assert 3.2 < bigram < 4.0  # 3.55 for Python 3.11, 3.56 for 3.12
    assert 2.2 < trigram < bigram - 0.5  # 2.49 and 2.55
