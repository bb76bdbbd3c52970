"""Schedule tables of pipelines: the work of every stage at every tick, the rules of a table, the buffers that it needs.

In a tick a stage runs at most one forward pass (F), then at most one backward pass (B), then gradients of parameters
(W). After the tick it sends the output of F to the next stage, and the output of B to the stage before, in a ring. The
receiver uses them in the next tick; otherwise they are lost, because stages buffer nothing that they receive.

The blocks of a stage may be cut into chunks: chunk c of stage s is virtual stage c * S + s. A microbatch then goes
round the ring once for each chunk (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). The backward pass may be
split into B, the gradient of the input, and W, as Qi et al. 2024 do (arXiv 2401.10241).

Dims of arrays: T ticks, S stages, W places for a W in a tick, M microbatches, v chunks, K = v * S virtual stages.
"""

import heapq
import importlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

SCHEDULES = "jaxdist.parallel.schedules"


class Ticks(NamedTuple):
    """The work of every stage of a pipeline at every tick.

    microbatches: M.
    chunks: v, the number of chunks that the blocks of a stage are cut into.
    forward, backward: (microbatch, chunk), [T, S, 2] int32; -1 where a stage has none.
    weights: the same for gradients of parameters, at most W in a tick: [T, S, W, 2]. With W = 0, B computes them too.

    Two stages, one microbatch: forward[..., 0] is [[0, -1], [-1, 0], [-1, -1]], and backward[..., 0] is
    [[-1, -1], [-1, 0], [0, -1]].
    """

    microbatches: int
    chunks: int
    forward: np.ndarray
    backward: np.ndarray
    weights: np.ndarray

    @property
    def length(self) -> int:
        """The number of ticks, T."""
        return self.forward.shape[0]

    @property
    def stages(self) -> int:
        """The number of stages, S."""
        return self.forward.shape[1]


class Moments(NamedTuple):
    """The ticks of F, B and W of each microbatch and chunk: [M, v, S]. With W = 0 `weights` is `backward`."""

    forward: np.ndarray
    backward: np.ndarray
    weights: np.ndarray


class Buffer(NamedTuple):
    """A buffer on every stage for arrays of one kind, and the slot that each F, B and W reads or writes.

    size: the number of slots. It is the same on all stages: the fewest that the stage with the most arrays can do with.
    forward, backward: slots, [T, S] int32; -1 where nothing is read or written.
    weights: the same, [T, S, W].
    """

    size: int
    forward: np.ndarray
    backward: np.ndarray
    weights: np.ndarray


class Slots(NamedTuple):
    """The buffers of a table, made by `allocate_slots`.

    residuals: written by F, read by B and W.
    cotangents: written by B, read by W. Size 0 with W = 0.
    late_loss: whether a B of the last virtual stage is in a later tick than its F. The gradient of the loss, computed
        beside F, then waits in a buffer as large as that of the residuals, in the same slot as these.
    """

    residuals: Buffer
    cotangents: Buffer
    late_loss: bool


def ticks_from_pairs(forward_TS2: np.ndarray, backward_TS2: np.ndarray, *, microbatches: int, chunks: int = 1) -> Ticks:
    """A table without W, made of pairs (microbatch, chunk); (-1, -1) where a stage does nothing."""
    forward, backward = (np.ascontiguousarray(table, dtype=np.int32) for table in (forward_TS2, backward_TS2))
    return Ticks(microbatches, chunks, forward, backward, np.empty((*forward.shape[:2], 0, 2), np.int32))


def ticks_from_numbers(forward_TS: np.ndarray, backward_TS: np.ndarray, *, microbatches: int) -> Ticks:
    """A table without chunks and W, made of numbers of microbatches; outside 0 ... M - 1 a stage does nothing."""

    def pairs(number_TS: np.ndarray) -> np.ndarray:
        inside = (number_TS >= 0) & (number_TS < microbatches)
        return np.where(inside[..., None], np.stack([number_TS, np.zeros_like(number_TS)], axis=-1), -1)

    return ticks_from_pairs(pairs(forward_TS), pairs(backward_TS), microbatches=microbatches)


def _moments(kind: str, table_TSN2: np.ndarray, ticks: Ticks) -> np.ndarray:
    """The tick of each pair in the table: [M, v, S]. Asserts that every stage has every pair exactly once."""
    sizes = ticks.microbatches, ticks.chunks
    tick, stage, place = np.nonzero((table_TSN2 != -1).any(axis=-1))
    pair = table_TSN2[tick, stage, place]
    wrong = ((pair < 0) | (pair >= sizes)).any(axis=-1)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise AssertionError(
            f"stage {stage[i]}, tick {tick[i]}: {kind} of microbatch {pair[i, 0]}, chunk {pair[i, 1]};"
            f" there are {sizes[0]} microbatches and {sizes[1]} chunks"
        )
    count_MvS = np.zeros((*sizes, ticks.stages), np.int32)
    np.add.at(count_MvS, (pair[:, 0], pair[:, 1], stage), 1)
    if (count_MvS != 1).any():
        m, c, s = np.argwhere(count_MvS != 1)[0]
        there = [int(t) for t in tick[(pair == (m, c)).all(axis=-1) & (stage == s)]]
        raise AssertionError(f"stage {s}: microbatch {m}, chunk {c} has {len(there)} {kind}, not one; ticks {there}")
    tick_MvS = np.empty_like(count_MvS)
    tick_MvS[pair[:, 0], pair[:, 1], stage] = tick
    return tick_MvS


def moments(ticks: Ticks) -> Moments:
    """The ticks of all F, B and W. Asserts that every stage has each of them exactly once."""
    forward = _moments("F", ticks.forward[:, :, None], ticks)
    backward = _moments("B", ticks.backward[:, :, None], ticks)
    return Moments(forward, backward, _moments("W", ticks.weights, ticks) if ticks.weights.shape[2] else backward)


def check_table(ticks: Ticks) -> None:
    """Assert that the table can be run. The message of an AssertionError names stage, tick and microbatch.

    - Every stage has one F, one B and, with W > 0, one W of every (microbatch, chunk).
    - F of a virtual stage is in the tick after F of the virtual stage before.
    - B is in the tick after B of the next virtual stage; on the last one it is not before its own F.
    - W is not before its B.
    """
    shape = ticks.forward.shape
    assert len(shape) == 3 and shape[2] == 2, f"forward has shape {shape}, not [ticks, stages, 2]"
    assert ticks.backward.shape == shape, f"backward has shape {ticks.backward.shape}, forward {shape}"
    places = ticks.weights.shape
    assert places[:2] + places[3:] == shape, f"weights has shape {places}, forward {shape}"
    for name, table in zip(("forward", "backward", "weights"), ticks[2:], strict=True):
        assert table.dtype == np.int32, f"{name} is {table.dtype}, not int32"
    forward_MK, backward_MK, weights_MK = (tick_MvS.reshape(ticks.microbatches, -1) for tick_MvS in moments(ticks))

    def where(m: int, k: int) -> str:
        return f"stage {k % shape[1]}: microbatch {m}, chunk {k // shape[1]}"

    for m, k in np.argwhere(np.diff(forward_MK, axis=1) != 1):
        raise AssertionError(
            f"{where(m, k + 1)} has F at tick {forward_MK[m, k + 1]}; must be {forward_MK[m, k] + 1},"
            f" the tick after F on stage {k % shape[1]}"
        )
    for m, k in np.argwhere(np.diff(backward_MK, axis=1) != -1):
        raise AssertionError(
            f"{where(m, k)} has B at tick {backward_MK[m, k]}; must be {backward_MK[m, k + 1] + 1},"
            f" the tick after B on stage {(k + 1) % shape[1]}"
        )
    for m, k in np.argwhere(backward_MK < forward_MK):
        raise AssertionError(f"{where(m, k)} has B at tick {backward_MK[m, k]}, before its F at {forward_MK[m, k]}")
    for m, k in np.argwhere(weights_MK < backward_MK):
        raise AssertionError(f"{where(m, k)} has W at tick {weights_MK[m, k]}, before its B at {backward_MK[m, k]}")


def _slots(first_MvS: np.ndarray, last_MvS: np.ndarray) -> np.ndarray:
    """A slot for each item from its first to its last tick: [M, v, S].

    Items take the lowest free slot, in the order of their first ticks. This is the colouring of an interval graph, and
    needs the fewest slots possible: as many as intervals overlap at most.
    """
    slot_MvS = np.empty_like(first_MvS)
    for stage in range(first_MvS.shape[2]):
        first, last = first_MvS[..., stage].ravel(), last_MvS[..., stage].ravel()
        free: list[int] = []
        used: list[tuple[int, int]] = []  # (last tick, slot)
        for item in np.argsort(first, kind="stable"):
            # Not in the tick of its last use: F writes before B and W read.
            while used and used[0][0] < first[item]:
                heapq.heappush(free, heapq.heappop(used)[1])
            slot = heapq.heappop(free) if free else len(used)
            heapq.heappush(used, (int(last[item]), slot))
            slot_MvS[..., stage].flat[item] = slot
    return slot_MvS


def _look_up(slot_MvS: np.ndarray, table_TSN2: np.ndarray) -> np.ndarray:
    """The slot of each pair in the table, -1 where there is none: [T, S, N]."""
    microbatch_TSN, chunk_TSN = table_TSN2[..., 0], table_TSN2[..., 1]
    stage_S1 = np.arange(table_TSN2.shape[1])[:, None]
    return np.where(microbatch_TSN >= 0, slot_MvS[microbatch_TSN, chunk_TSN, stage_S1], -1).astype(np.int32)


def allocate_slots(ticks: Ticks) -> Slots:
    """The fewest slots for residuals and cotangents that the table allows. Checks the table.

    Residuals keep their slot from the tick of F to the tick of W (of B with W = 0), both included: F, which comes first
    in a tick, cannot use a slot that B or W frees in the same tick. Cotangents keep theirs from the tick of B to the
    tick of W, both included.
    """
    check_table(ticks)
    forward, backward, weights = moments(ticks)
    nothing_TS = np.full(ticks.forward.shape[:2], -1, np.int32)
    residual_MvS = _slots(forward, weights)
    tables = ticks.forward[:, :, None], ticks.backward[:, :, None], ticks.weights
    reads_F, reads_B, reads_W = (_look_up(residual_MvS, table) for table in tables)
    residuals = Buffer(int(residual_MvS.max()) + 1, reads_F[..., 0], reads_B[..., 0], reads_W)
    late = bool((backward > forward)[:, -1, -1].any())
    if not ticks.weights.shape[2]:
        return Slots(residuals, Buffer(0, nothing_TS, nothing_TS, reads_W), late)
    cotangent_MvS = _slots(backward, weights)
    reads_B, reads_W = (_look_up(cotangent_MvS, table) for table in tables[1:])
    return Slots(residuals, Buffer(int(cotangent_MvS.max()) + 1, nothing_TS, reads_B[..., 0], reads_W), late)


def table_of(schedule: str) -> Callable[..., Ticks] | None:
    """The function table(stages, microbatches, chunks) in the module of a schedule; None if it is no pipeline.

    schedule: a name or a dotted path.
    """
    module = importlib.import_module(schedule.rpartition(".")[0] or f"{SCHEDULES}.{schedule}")
    found: Callable[..., Ticks] | None = getattr(module, "table", None)
    return found
