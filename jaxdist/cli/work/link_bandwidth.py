"""Bandwidth between all pairs of a job, one pair at a time, and the links that are slow beside the others."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.processes import from_all

ALL_PAIRS = 16  # ends; of more, only pairs at distances 1, 2, 4, ... are measured: n log n in place of n squared
SLOW = 0.5  # of the usual bandwidth


class SlowLink(NamedTuple):
    """A link that is slower than the others."""

    ends: tuple[int, ...]  # the two ends of a pair, or one end that is slow to all others
    mb_per_s: float  # its best bandwidth
    usual: float  # the bandwidth of the others


def one_device_a_process() -> list[jax.Device]:
    """The ends of the links: the first device of each process; of a single process, all of its devices."""
    if jax.process_count() == 1:
        return jax.devices()
    first: dict[int, jax.Device] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    return [first[rank] for rank in sorted(first)]


def pairs(ends: int) -> Iterator[tuple[int, int]]:
    """The pairs (sender, receiver) to measure: all, or of more than `ALL_PAIRS` ends those a power of two apart."""
    distances = range(1, ends) if ends <= ALL_PAIRS else [2**k for k in range((ends - 1).bit_length())]
    return ((i, (i + distance) % ends) for distance in distances for i in range(ends))


def bandwidths(devices: Sequence[jax.Device], *, mib: float, repetitions: int = 3) -> np.ndarray:
    """The bandwidth of each pair, [sender, receiver] in MB/s: the best of the repetitions, NaN where it was not
    measured. Every process must call it. mib: the size of a message."""
    n, count = len(devices), max(1, round(mib * 2**20 / 4))
    mesh = Mesh(np.array(devices), ("ends",))
    sharding = NamedSharding(mesh, P("ends"))
    x = jax.make_array_from_callback((n, count), sharding, lambda index: np.ones((1, count), np.float32))
    every, everywhere = list(pairs(n)), NamedSharding(mesh, P())
    seconds, send = np.full((n, n), np.inf), _one_program(mesh, every)
    for i, pair in enumerate(every):
        which = jax.device_put(np.int32(i), everywhere)
        jax.block_until_ready(send(x, which))  # compiles, the first time, and connects
        for _ in range(repetitions):
            multihost_utils.sync_global_devices("probe")
            begun = time.perf_counter()
            jax.block_until_ready(send(x, which))
            seconds[pair] = min(seconds[pair], time.perf_counter() - begun)
    # The times of the receivers count: a sender may be done when its bytes lie in a buffer.
    measured = np.array(from_all(seconds.tolist()))
    seconds = np.stack([measured[device.process_index, :, i] for i, device in enumerate(devices)], axis=1)
    return np.where(np.isfinite(seconds), count * 4 / 1e6 / seconds, np.nan)


def _one_program(mesh: Mesh, every: Sequence[tuple[int, int]]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function of (x, the number of a pair) that sends the sender's part of x to the receiver. All pairs are branches
    of one program: 16 ends have 240, and GPUs would compile each of them for a second."""
    branches = [functools.partial(jax.lax.ppermute, axis_name="ends", perm=[pair]) for pair in every]

    def send(x: jax.Array, which: jax.Array) -> jax.Array:
        return jax.lax.switch(which, branches, x)

    return jax.jit(jax.shard_map(send, mesh=mesh, in_specs=(P("ends"), P()), out_specs=P("ends")))


def slow_links(mb_per_s: np.ndarray) -> list[SlowLink]:
    """The slow links. The best bandwidth of an end is its best to or from any other.

    - An end is slow if its best is below half the median of all ends' bests.
    - A pair is slow if it is below half of the lower best of its two ends.

    Of two ends alone neither is known to be slow.
    """
    n = len(mb_per_s)
    if n < 3:
        return []
    best = np.array([np.nanmax(np.concatenate([mb_per_s[i], mb_per_s[:, i]])) for i in range(n)])
    usual = statistics.median(best.tolist())
    found = [SlowLink((i,), float(best[i]), usual) for i in range(n) if best[i] < SLOW * usual]
    slow = {link.ends[0] for link in found}
    for i in range(n):
        for j in range(i + 1, n):
            between = [value for value in (mb_per_s[i, j], mb_per_s[j, i]) if not np.isnan(value)]
            reached = float(min(best[i], best[j]))
            if between and not {i, j} & slow and max(between) < SLOW * reached:
                found.append(SlowLink((i, j), float(max(between)), reached))
    return found
