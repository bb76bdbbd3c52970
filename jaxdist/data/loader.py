"""Batches of windows of a token array. The global batch is a pure function of (seed, step).

It does not depend on the number of processes or devices: a run can stop, change its mesh and go on with the same data.
There is no state to save.

Legend: B global batch, S seq_len. A window has S + 1 ids: S inputs, and the S targets one id later. Neighbours share an
id, so every id but the first is a target once.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxdist.config.rules.batch import check_rows
from jaxdist.data.file_array import FileArray, Ids
from jaxdist.errors import UserError
from jaxdist.specs import spec_axes

_Item = TypeVar("_Item")

ROUNDS = 8
TOGETHER, KEPT_BLOCKS = 4096, 4  # samples whose places are computed together, and how many such blocks are kept


def permute(index: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of [0, count), at each `index` (int64). keys: uint64, one a round, choose the permutation.

    It is a Feistel network over the smallest even number of bits that holds count - 1, walked until the result is below
    count (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"): random access without a table.
    """
    # Not grain's index_shuffle: for 2**(2k) + 1 indices (65,537 and up) it gives one twice and leaves one out (0.2.18).
    half = max(3, (int(count - 1).bit_length() + 1) // 2)  # of 64 at least: fewer bits shuffle badly
    mask = (1 << half) - 1
    out = index.astype(np.uint64)
    walking = np.arange(out.size)
    while walking.size:  # ends: a permutation returns to where it started, which is below count
        left, right = out[walking] >> half, out[walking] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        out[walking] = left << half | right
        walking = walking[out[walking] >= count]
    return out.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): every bit of x (uint64) moves every bit of the result."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


class ShuffledWindows:
    """Endless epochs of shuffled windows, each window once an epoch. Sample k = step * B + row is in epoch k // count.

    Window i of an epoch starts at offset + i * seq_len. The offset, below seq_len, changes with the epoch, so that a
    model does not see the same cuts again. An epoch leaves out up to 2 seq_len - 1 ids at the ends of the text.
    """

    def __init__(self, size: int, *, seq_len: int, seed: int) -> None:
        self.seq_len = seq_len
        self.seed = seed
        self.count = max(1, (size - seq_len) // seq_len)  # windows an epoch, for every offset
        self.slack = min(seq_len - 1, size - 1 - self.count * seq_len)  # the largest offset
        self._size = min(TOGETHER, self.count)  # of a short text an epoch: many would take long
        self._blocks: dict[int, np.ndarray] = {}
        assert self.slack >= 0, "the text is shorter than a window"

    def starts(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First positions of the windows of samples `k` (int64), and whether each counts (here all do)."""
        blocks, place = np.divmod(k, self._size)
        starts = np.empty_like(k)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            starts[here] = self._block(block)[place[here]]
        return starts, np.ones(k.shape, bool)

    def _block(self, block: int) -> np.ndarray:
        """The first positions of the windows of neighbouring samples. The last blocks are kept: each of numpy's
        operations on the samples of one batch alone would cost as much as on hundreds."""
        if (found := self._blocks.get(block)) is None:
            found = self._starts(block * self._size + np.arange(self._size))
            self._blocks = dict([*self._blocks.items(), (block, found)][-KEPT_BLOCKS:])
        return found

    def _starts(self, k: np.ndarray) -> np.ndarray:
        """The first positions of the windows of samples `k`, computed."""
        epochs, index = np.divmod(k, self.count)
        starts = np.empty_like(k)
        for epoch in np.unique(epochs):  # one, or two at an epoch's end, unless the batch is larger than the text
            here = epochs == epoch
            state = np.random.SeedSequence((self.seed, int(epoch))).generate_state(ROUNDS + 1, np.uint64)
            offset = int(state[-1]) % (self.slack + 1)
            starts[here] = offset + permute(index[here], self.count, state[:-1]) * self.seq_len
        return starts


class SpreadWindows:
    """A fixed set of windows for evaluation: `batches` batches, or fewer of a short text.

    If the set is smaller than the text, its windows lie at even distances over the whole text. So do those of each
    batch: batch s holds every `batches`-th window of the set from the s-th on. Otherwise the set is every window once,
    and the weights of the rows that are left over are 0.
    """

    def __init__(self, size: int, *, seq_len: int, global_batch: int, batches: int | None) -> None:
        self.seq_len = seq_len
        self.global_batch = global_batch
        self.count = (size - 1) // seq_len
        assert self.count >= 1, "the text is shorter than a window"
        needed = math.ceil(self.count / global_batch)
        self.batches = needed if batches is None else min(batches, needed)
        self.chosen = min(self.batches * global_batch, self.count)

    def starts(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First positions of the windows of samples `k` (int64), and whether each counts."""
        step, row = np.divmod(k, self.global_batch)
        place = row * self.batches + step
        counts = place < self.chosen
        return np.where(counts, place * self.count // self.chosen, 0) * self.seq_len, counts


def targets_across(starts: np.ndarray, first: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """The (rows, columns) of targets that are in another document than their input.

    starts: the positions at which documents start, increasing. first: the first position of each window; target j of a
    window is the token at first + j + 1.
    """
    low, high = np.searchsorted(starts, first + 1), np.searchsorted(starts, first + 1 + seq_len)
    rows = np.repeat(np.arange(first.size), high - low)
    within = np.arange(rows.size) - np.repeat(np.cumsum(high - low) - (high - low), high - low)
    return rows, starts[low[rows] + within] - first[rows] - 1


def starts_of(starts: np.ndarray, first: np.ndarray, seq_len: int) -> np.ndarray:
    """For each input of windows, the position in its window at which its document starts; 0 for one that starts before.
    int32 [windows, S]. starts, first: as for `targets_across`."""
    positions = first[:, None] + np.arange(seq_len)
    before = starts[np.searchsorted(starts, positions, side="right") - 1]
    return np.maximum(before - first[:, None], 0).astype(np.int32)


class GlobalBatches:
    """A loader of global batches of numbered samples: batch s has the samples s * B to s * B + B - 1.

    - samples: numbers of samples (int64 [n]) -> their rows on the host, leaves [n, ...].
    - leaves: shapes and dtypes of a global batch.
    - sharding: of every leaf; it splits dim 0 (`NamedSharding(mesh, P(BATCH_AXES))`).
    - batches: the number of batches; None: endless.

    Raises `UserError` unless the devices divide the batch.
    """

    def __init__(
        self,
        samples: Callable[[np.ndarray], dict[str, np.ndarray]],
        leaves: dict[str, jax.ShapeDtypeStruct],
        *,
        global_batch: int,
        sharding: NamedSharding,
        batches: int | None = None,
    ) -> None:
        check_rows(global_batch, {axis: sharding.mesh.shape[axis] for axis in spec_axes(sharding.spec)})
        self.samples, self.leaves = samples, leaves
        self.global_batch, self.sharding, self.batches = global_batch, sharding, batches

    def host_rows(self, step: int, rows: slice) -> dict[str, np.ndarray]:
        """Rows `rows` of the global batch of a step, on the host: any slice of [0, B) with step 1.

        Raises `IndexError` for a step outside a fixed set.
        """
        if step < 0 or (self.batches is not None and step >= self.batches):
            raise IndexError(f"no batch {step}: they are numbered from 0, there are {self.batches or 'endless ones'}")
        return self.samples(step * self.global_batch + np.arange(self.global_batch)[rows])

    def batch(self, step: int) -> dict[str, jax.Array]:
        """The global batch of a step, as global arrays.

        There is no communication and no computation on devices, so it may run in a thread (`prefetch`) beside a step.
        """
        read: dict[tuple[int, int], dict[str, np.ndarray]] = {}  # devices and leaves ask for the same rows again

        def rows_of(leaf: str, index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "the callback is asked for data, not for a shape"
            start, stop, _ = index[0].indices(self.global_batch)
            if (start, stop) not in read:
                read[start, stop] = self.host_rows(step, slice(start, stop))
            return read[start, stop][leaf]

        with jax.transfer_guard_host_to_device("allow"):  # the guard takes this for a transfer by accident
            return {
                leaf: jax.make_array_from_callback(like.shape, self.sharding, partial(rows_of, leaf), dtype=like.dtype)
                for leaf, like in self.leaves.items()
            }


class Loader(GlobalBatches):
    """Global batches of a 1-D token array, in memory or in a file. A process reads only the rows of its own devices.

    - shuffle: endless shuffled epochs from `seed` (`ShuffledWindows`); otherwise a fixed set for evaluation
      (`SpreadWindows`) of at most `batches` batches. None: the whole text.
    - documents: the positions (increasing) at which documents start. A target that is the first token of a document has
      weight 0, because its input is of another one.
    - apart: whether batches say where documents start, so that models can keep them apart.

    Raises `UserError` if there are fewer tokens than a window has, or the devices do not divide the batch.
    """

    def __init__(
        self,
        tokens: Ids,
        *,
        seq_len: int,
        global_batch: int,
        sharding: NamedSharding,
        documents: np.ndarray | None = None,
        apart: bool = False,
        seed: int = 0,
        shuffle: bool = True,
        batches: int | None = None,
    ) -> None:
        if tokens.size < seq_len + 1:
            raise UserError(
                f"data.seq_len={seq_len}: a window is {seq_len + 1} tokens, the text has {tokens.size}; use a shorter "
                "window or a longer text"
            )
        if shuffle and batches is not None:
            raise UserError(f"batches={batches} is for shuffle=False: shuffled batches have no end")
        assert not apart or documents is not None
        self.seq_len, self.documents, self.apart = seq_len, documents, apart
        self.windows: ShuffledWindows | SpreadWindows
        if shuffle:
            self.windows = ShuffledWindows(tokens.size, seq_len=seq_len, seed=seed)
        else:
            self.windows = SpreadWindows(tokens.size, seq_len=seq_len, global_batch=global_batch, batches=batches)
            batches = self.windows.batches
        leaves = batch_shapes(global_batch, seq_len, apart=apart)
        super().__init__(self._rows, leaves, global_batch=global_batch, sharding=sharding, batches=batches)
        self._windows: Callable[[np.ndarray], np.ndarray]  # starts [n] -> seq_len + 1 ids from each on
        if isinstance(tokens, FileArray):
            self._windows = lambda starts: tokens.windows(starts, seq_len + 1)
        else:  # overlapping views, one per position; indexing copies
            self._windows = np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1).__getitem__

    def _rows(self, k: np.ndarray) -> dict[str, np.ndarray]:
        """inputs and targets int32 [n, S]; weights float32 [n, S], 1 where a target counts; documents: `starts_of`."""
        starts, counts = self.windows.starts(k)
        ids = self._windows(starts)
        weights = np.repeat(counts[:, None], self.seq_len, axis=1).astype(np.float32)
        if self.documents is not None:
            weights[targets_across(self.documents, starts, self.seq_len)] = 0
        rows = {"inputs": ids[:, :-1].astype(np.int32), "targets": ids[:, 1:].astype(np.int32), "weights": weights}
        if self.apart and self.documents is not None:
            rows["documents"] = starts_of(self.documents, starts, self.seq_len)
        return rows


def batch_shapes(global_batch: int, seq_len: int, *, apart: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the leaves of `Loader.batch`."""
    grid = (global_batch, seq_len)
    leaves: dict[str, type] = {"inputs": np.int32, "targets": np.int32, "weights": np.float32}
    leaves |= {"documents": np.int32} if apart else {}
    return {leaf: jax.ShapeDtypeStruct(grid, dtype) for leaf, dtype in leaves.items()}


def prefetch(make: Callable[[int], _Item], start: int, stop: int, depth: int = 2) -> Generator[_Item, None, None]:
    """Yield make(start), ..., make(stop - 1), in order. A thread makes up to `depth` of them ahead of the consumer.

    An exception in `make` is raised here, at its place in the order, with its own traceback. Closing the generator
    drops what is not begun, waits for the item being made, and ends the thread. Wrap it in `contextlib.closing` if
    something else than the loop keeps a reference.
    """
    assert depth >= 1, "depth is how many items may be made ahead"
    todo, ahead = iter(range(start, stop)), deque[Future[_Item]]()
    asked = SimpleQueue[tuple[int, Future[_Item]] | None]()

    def ask(count: int) -> None:
        for number in islice(todo, count):
            ahead.append(Future())
            asked.put((number, ahead[-1]))

    def work() -> None:
        while (each := asked.get()) is not None:
            number, future = each
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(make(number))
            except BaseException as error:
                future.set_exception(error)

    # No executor: a process that `make` forks, as a DataLoader does, could not exit, since it would join this thread.
    thread = threading.Thread(target=work, name="jaxdist-prefetch", daemon=True)
    thread.start()
    try:
        ask(depth)
        while ahead:
            item = ahead.popleft().result()
            ask(1)
            yield item
    finally:
        for future in ahead:
            future.cancel()
        asked.put(None)
        thread.join()
