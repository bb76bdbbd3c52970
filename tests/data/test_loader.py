"""Windows, the loader and prefetching of `jaxdist.data`."""

import contextlib
import gc
import itertools
import math
import multiprocessing
import threading
import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from data_files import loader, sharding
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.data import Loader, prefetch
from jaxdist.data.loader import KEPT_BLOCKS, TOGETHER, ShuffledWindows, SpreadWindows, permute
from jaxdist.errors import UserError

FAST = settings(max_examples=60, deadline=None)


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


@pytest.mark.slow
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


@pytest.mark.parametrize("size", [100_000, 1000])  # with more windows than a block of samples has, and with fewer
def test_samples_have_their_places_whatever_is_asked_with_them(size: int) -> None:
    """Places are computed for many samples together, and the last ones kept."""
    windows, other = (ShuffledWindows(size, seq_len=7, seed=3) for _ in range(2))
    numbers = np.random.default_rng(0).integers(0, 12 * TOGETHER, 5000)
    whole = other._starts(np.arange(12 * TOGETHER))
    np.testing.assert_array_equal(windows.starts(numbers)[0], whole[numbers])
    for first in (TOGETHER - 3, 9 * TOGETHER + 5, 0, 11 * TOGETHER):  # across blocks, and back to one that is gone
        np.testing.assert_array_equal(windows.starts(np.arange(first, first + 32))[0], whole[first : first + 32])
    assert len(windows._blocks) == KEPT_BLOCKS


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
    assert [rows[leaf].dtype for leaf in rows] == [np.int32, np.int32, np.float32]


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
        assert list(batch) == ["inputs", "targets", "weights"]
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
    with pytest.raises(UserError, match=r"data\.global_batch: 6 does not divide by 4 \(data 2 x fsdp 2 .*work: 4, 8"):
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
    if prefetch_threads():
        gc.collect()  # of all that earlier tests have left, which takes most of a second
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


@pytest.mark.filterwarnings("ignore")  # jax's and Python's, of a fork beside threads
def test_a_process_that_is_forked_to_make_an_item_exits_as_usual() -> None:
    """As the workers of a DataLoader."""

    def make(i: int) -> int | None:
        worker = multiprocessing.get_context("fork").Process(target=int)
        worker.start()
        worker.join(30)
        return worker.exitcode

    assert list(prefetch(make, 0, 2)) == [0, 0]


def test_prefetched_batches_are_the_batches() -> None:
    spread = loader(sharding=sharding(data=4))
    for step, batch in enumerate(prefetch(spread.batch, 0, 6)):
        np.testing.assert_array_equal(as_numpy(batch)["inputs"], spread.host_rows(step, slice(None))["inputs"])
