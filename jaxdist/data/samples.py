"""Batches of samples with fixed shapes, such as an image and its label, from random access or from a stream.

Legend: B global batch, n samples.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxdist.data.loader import ROUNDS, GlobalBatches, ShuffledWindows, SpreadWindows, permute
from jaxdist.errors import UserError

WEIGHTS = "weights"  # a leaf that is added to batches without one: float32 [B], 1 where a sample counts
Rows = dict[str, np.ndarray]
Leaves = dict[str, jax.ShapeDtypeStruct]


class Samples(NamedTuple):
    """Samples with random access. leaves: of one sample. read: numbers (int64 [n]) -> leaves [n, ...]."""

    size: int
    leaves: Leaves
    read: Callable[[np.ndarray], Rows]


class Stream(NamedTuple):
    """Samples that come in one order.

    - size: the samples of an epoch; None if that is not known.
    - leaves: of one sample.
    - start: a number -> an iterator over an epoch, from the sample of this number on.
    - take: an item of that iterator, and its number -> the leaves of the sample.
    - buffer: the number of samples that are shuffled together.
    """

    size: int | None
    leaves: Leaves
    start: Callable[[int], Iterator[Any]]
    take: Callable[[Any, int], Rows]
    buffer: int


def sample_leaves(sample: Mapping[str, Any], *, where: str) -> Leaves:
    """Shapes and dtypes of a sample on devices: 8-byte numbers become 4-byte ones.

    Raises `UserError` for what is not an array of numbers; its message begins with `where`.
    """
    leaves = {}
    for name, value in sample.items():
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise UserError(f"{where}: {name} is of type {array.dtype}; allowed: numbers and booleans")
        narrow = {"i8": np.int32, "u8": np.uint32, "f8": np.float32}.get(f"{array.dtype.kind}{array.dtype.itemsize}")
        leaves[name] = jax.ShapeDtypeStruct(array.shape, narrow or array.dtype.newbyteorder("="))
    return leaves


def as_dtype(rows: np.ndarray, dtype: np.dtype, *, where: str) -> np.ndarray:
    """Rows cast to `dtype`. Raises `UserError` for numbers that do not fit; its message begins with `where`."""
    rows = np.asarray(rows)
    with np.errstate(over="ignore"):  # told below
        cast = rows.astype(dtype, copy=False)
    if np.issubdtype(dtype, np.integer) and not np.array_equal(cast, rows):
        limits = np.iinfo(dtype)
        raise UserError(
            f"{where} holds integers that do not fit into {dtype.name}; allowed: from {limits.min} to {limits.max}"
        )
    narrowed = rows.dtype.kind == "f" and cast.dtype != rows.dtype
    if narrowed and (lost := np.isfinite(rows) & ~np.isfinite(cast)).any():
        raise UserError(
            f"{where} holds {rows[lost][0]:g}, which is infinite in {dtype.name}; allowed: up to "
            f"{jnp.finfo(dtype).max:.3g}; scale the data"
        )
    return cast


def batch_leaves(leaves: Leaves, global_batch: int) -> Leaves:
    """The leaves of a global batch, from those of a sample. A batch always has weights."""
    if WEIGHTS not in leaves:
        leaves = leaves | {WEIGHTS: jax.ShapeDtypeStruct((), np.float32)}
    return {leaf: jax.ShapeDtypeStruct((global_batch, *like.shape), like.dtype) for leaf, like in leaves.items()}


class ShuffledStream:
    """Endless epochs of a stream, shuffled within runs of `buffer` samples. Sample k depends on (seed, k) and on the
    stream alone.

    across: the distance between the smallest and the largest number of a step. Read numbers in rising order: a smaller
    one starts the stream again.
    """

    def __init__(self, stream: Stream, *, seed: int, across: int) -> None:
        self._stream, self._seed, self._across = stream, seed, across
        self._size = stream.size
        self._epoch, self._at, self._samples = -1, 0, iter(())
        self._runs: OrderedDict[tuple[int, int], tuple[list[Any], np.ndarray]] = OrderedDict()

    def read(self, k: np.ndarray) -> Rows:
        """The leaves [n, ...] of samples `k` (int64 [n])."""
        taken = [self._one(int(each)) for each in k]
        return {
            leaf: np.stack([each[leaf] for each in taken]) if taken else np.zeros((0, *like.shape), like.dtype)
            for leaf, like in self._stream.leaves.items()
        }

    def _one(self, k: int) -> Rows:
        while True:
            epoch, index = (0, k) if self._size is None else divmod(k, self._size)
            run, place = divmod(index, self._stream.buffer)
            samples, order = self._run(epoch, run)
            if place < len(samples):  # or the end was found just now, and k is in another epoch
                number = run * self._stream.buffer + int(order[place])
                return self._stream.take(samples[order[place]], number)

    def _run(self, epoch: int, run: int) -> tuple[list[Any], np.ndarray]:
        """The samples of a run of an epoch, and the order in which they are taken."""
        if (epoch, run) not in self._runs:
            first, most = run * self._stream.buffer, self._stream.buffer
            self._go_to(epoch, first)
            samples = list(islice(self._samples, most if self._size is None else min(most, self._size - first)))
            self._at += len(samples)
            self._check_end(short=len(samples) < most)
            state = np.random.SeedSequence((self._seed, epoch, run)).generate_state(ROUNDS, np.uint64)
            self._runs[epoch, run] = samples, permute(np.arange(len(samples)), len(samples), state)
            # As many runs are kept as the samples of a step may lie in.
            smallest = min(self._stream.buffer, self._size or self._stream.buffer)
            while len(self._runs) > self._across // smallest + 2:
                self._runs.popitem(last=False)
        return self._runs[epoch, run]

    def _go_to(self, epoch: int, first: int) -> None:
        """Move the stream's iterator to sample `first` of an epoch."""
        if epoch != self._epoch or first < self._at:
            self._epoch, self._at, self._samples = epoch, first, self._stream.start(first)
            if self._size is None:
                begun = list(islice(self._samples, 1))
                self._samples = chain(begun, self._samples)
                if not begun:  # beyond the end, which is to be found
                    self._at, self._samples = 0, self._stream.start(0)
        self._at += sum(1 for _ in islice(self._samples, first - self._at))

    def _check_end(self, *, short: bool) -> None:
        """Note the number of samples at the end of the first epoch; later ones must have as many."""
        ended = short or self._at == self._size
        if not ended:
            return
        more = self._size is not None and next(self._samples, None) is not None
        if self._at == 0:
            raise UserError("data.path: gives no samples; give an object whose __iter__ does")
        if self._size is None:
            self._size = self._at
        if more or self._at < self._size:
            raise UserError(
                f"data.path: gives {'more than ' if more else ''}{self._at} samples in epoch {self._epoch},"
                f" not {self._size} as before, or as its __len__ says; give the same in each"
            )


def _weighted(rows: Rows, counts: np.ndarray) -> Rows:
    if WEIGHTS not in rows:
        return {**rows, WEIGHTS: counts.astype(np.float32)}
    own = rows[WEIGHTS]
    return {**rows, WEIGHTS: own * counts.reshape(-1, *[1] * (own.ndim - 1)).astype(own.dtype)}


def shuffled(samples: Samples | Stream, *, global_batch: int, sharding: NamedSharding, seed: int) -> GlobalBatches:
    """Endless epochs from `seed`, each sample once an epoch."""
    if isinstance(samples, Stream):
        stream = ShuffledStream(samples, seed=seed, across=global_batch)
        pick = lambda k: _weighted(stream.read(k), np.ones(k.shape, bool))  # noqa: E731
    else:
        pick = _picked(samples, ShuffledWindows(samples.size + 1, seq_len=1, seed=seed))
    leaves = batch_leaves(samples.leaves, global_batch)
    return GlobalBatches(pick, leaves, global_batch=global_batch, sharding=sharding)


def spread(samples: Samples, *, global_batch: int, sharding: NamedSharding, batches: int | None) -> GlobalBatches:
    """A fixed set for evaluation of at most `batches` batches, evenly spread; None: all samples. Rows that are left
    over have weight 0."""
    windows = SpreadWindows(samples.size + 1, seq_len=1, global_batch=global_batch, batches=batches)
    pick, leaves = _picked(samples, windows), batch_leaves(samples.leaves, global_batch)
    return GlobalBatches(pick, leaves, global_batch=global_batch, sharding=sharding, batches=windows.batches)


def _picked(samples: Samples, windows: ShuffledWindows | SpreadWindows) -> Callable[[np.ndarray], Rows]:
    """Samples in the order of windows, as if each were a window of one id."""
    assert windows.count == samples.size

    def pick(k: np.ndarray) -> Rows:
        numbers, counts = windows.starts(k)
        return _weighted(samples.read(numbers), counts)

    return pick
