"""Tables of a pipeline: what every stage does at every tick, the rules that a table keeps, the buffers that it needs.

In a tick a stage runs at most one forward (F), then at most one backward (B), then gradients of parameters (W). After
the tick every stage sends what F gave to the next stage and what B gave to the one before, in a ring. What arrives is
used in the next tick or lost: nothing is buffered between stages.

The blocks of a stage may be cut into chunks: chunk c of stage s is virtual stage c * S + s, so that a microbatch goes
round the ring once a chunk (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). The split of the backward pass into
B (gradient of the input) and W is that of Qi et al. 2024 (arXiv 2401.10241).

Dims of arrays: T ticks, S stages, W places for a W in a tick, M microbatches, v chunks, K = v * S virtual stages.
"""

import heapq
import importlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

SCHEDULES = "jaxdist.parallel.schedules"


class Ticks(NamedTuple):
    """What every stage of a pipeline does at every tick. int32, -1 where a stage does nothing.

    microbatches: M. chunks: v, into which the blocks of a stage are cut. forward, backward: [T, S, 2] of (microbatch,
    chunk). weights: [T, S, W, 2], gradients of parameters, at most W in a tick; with W = 0, B computes them too.
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
    """The tick of each piece of work: [M, v, S]. With W = 0 `weights` is `backward`."""

    forward: np.ndarray
    backward: np.ndarray
    weights: np.ndarray


class Buffer(NamedTuple):
    """Places for arrays of one kind, the same number on every stage, and the place that each piece of work uses.

    size: the number of places, the fewest possible on the stage that needs most. forward, backward: [T, S], weights:
    [T, S, W]: int32, -1 where nothing is read or written.
    """

    size: int
    forward: np.ndarray
    backward: np.ndarray
    weights: np.ndarray


class Slots(NamedTuple):
    """The buffers of a table, see `allocate`.

    residuals: what F keeps: written by F, read by B and W. cotangents: what B keeps for W: written by B, read by W;
    size 0 with W = 0, where B is all there is. late_loss: whether the last virtual stage has a B in a later tick than
    its F, so that the gradient of the loss, computed beside F, has to wait (the place of the residuals of that F is its
    own until then).
    """

    residuals: Buffer
    cotangents: Buffer
    late_loss: bool


def ticks_of(forward_TS2: np.ndarray, backward_TS2: np.ndarray, *, microbatches: int, chunks: int = 1) -> Ticks:
    """A table without W from (microbatch, chunk) pairs, both of which are -1 where a stage does nothing."""
    forward, backward = (np.ascontiguousarray(table, dtype=np.int32) for table in (forward_TS2, backward_TS2))
    return Ticks(microbatches, chunks, forward, backward, np.empty((*forward.shape[:2], 0, 2), np.int32))


def in_order(forward_TS: np.ndarray, backward_TS: np.ndarray, *, microbatches: int) -> Ticks:
    """A table without chunks and W from numbers of microbatches; those outside 0 ... M - 1 mean nothing is done."""

    def pairs(number_TS: np.ndarray) -> np.ndarray:
        inside = (number_TS >= 0) & (number_TS < microbatches)
        return np.where(inside[..., None], np.stack([number_TS, np.zeros_like(number_TS)], axis=-1), -1)

    return ticks_of(pairs(forward_TS), pairs(backward_TS), microbatches=microbatches)


def _moments(kind: str, table_TSN2: np.ndarray, ticks: Ticks) -> np.ndarray:
    """The tick of each pair in the table: [M, v, S]. Asserts that every stage has every pair once, and no other."""
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
    """When each piece of work is done. Asserts that each is done once on every stage."""
    forward = _moments("F", ticks.forward[:, :, None], ticks)
    backward = _moments("B", ticks.backward[:, :, None], ticks)
    return Moments(forward, backward, _moments("W", ticks.weights, ticks) if ticks.weights.shape[2] else backward)


def check(ticks: Ticks) -> None:
    """Assert that the table can be run: the message of an AssertionError names stage, tick and microbatch.

    Every stage has one F, one B and, with W > 0, one W of every (microbatch, chunk). F of a virtual stage is in the
    tick after F of the one before; B is in the tick after B of the next one, on the last not before its own F; W is not
    before its B.
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


def _colour(first_MvS: np.ndarray, last_MvS: np.ndarray) -> np.ndarray:
    """A place for each item, in use from its first to its last tick: [M, v, S]; the lowest that is free, by start.

    Going through intervals by their start needs as many places as intervals overlap at most, the fewest possible.
    """
    place_MvS = np.empty_like(first_MvS)
    for stage in range(first_MvS.shape[2]):
        first, last = first_MvS[..., stage].ravel(), last_MvS[..., stage].ravel()
        free: list[int] = []
        used: list[tuple[int, int]] = []  # (last tick, place)
        for item in np.argsort(first, kind="stable"):
            # Strictly before: in the tick of its last use a place is read after it would be written.
            while used and used[0][0] < first[item]:
                heapq.heappush(free, heapq.heappop(used)[1])
            place = heapq.heappop(free) if free else len(used)
            heapq.heappush(used, (int(last[item]), place))
            place_MvS[..., stage].flat[item] = place
    return place_MvS


def _look_up(place_MvS: np.ndarray, table_TSN2: np.ndarray) -> np.ndarray:
    """The place of each pair in the table, -1 where there is none: [T, S, N]."""
    microbatch_TSN, chunk_TSN = table_TSN2[..., 0], table_TSN2[..., 1]
    stage_S1 = np.arange(table_TSN2.shape[1])[:, None]
    return np.where(microbatch_TSN >= 0, place_MvS[microbatch_TSN, chunk_TSN, stage_S1], -1).astype(np.int32)


def allocate(ticks: Ticks) -> Slots:
    """Places in buffers for what is kept between F, B and W, as few as the table allows. Checks the table.

    A place of `residuals` is in use from the tick of F to that of the last use, B or, with W > 0, W, both included: a
    stage runs F before B and W, so that F cannot take what they free in its own tick. A place of `cotangents` is in use
    from the tick of B to that of W, for a W in the tick of its B too.
    """
    check(ticks)
    forward, backward, weights = moments(ticks)
    nothing_TS = np.full(ticks.forward.shape[:2], -1, np.int32)
    residual_MvS = _colour(forward, weights)
    tables = ticks.forward[:, :, None], ticks.backward[:, :, None], ticks.weights
    reads_F, reads_B, reads_W = (_look_up(residual_MvS, table) for table in tables)
    residuals = Buffer(int(residual_MvS.max()) + 1, reads_F[..., 0], reads_B[..., 0], reads_W)
    late = bool((backward > forward)[:, -1, -1].any())
    if not ticks.weights.shape[2]:
        return Slots(residuals, Buffer(0, nothing_TS, nothing_TS, reads_W), late)
    cotangent_MvS = _colour(backward, weights)
    reads_B, reads_W = (_look_up(cotangent_MvS, table) for table in tables[1:])
    return Slots(residuals, Buffer(int(cotangent_MvS.max()) + 1, nothing_TS, reads_B[..., 0], reads_W), late)


def table_of(schedule: str) -> Callable[..., Ticks] | None:
    """The function table(stages, microbatches, chunks) beside a schedule, which is a name or a dotted path. None: the
    schedule is no pipeline's."""
    found: Callable[..., Ticks] | None = getattr(importlib.import_module(_module(schedule)), "table", None)
    return found


def _module(schedule: str) -> str:
    return schedule.rpartition(".")[0] or f"{SCHEDULES}.{schedule}"
