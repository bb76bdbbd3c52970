"""Timeline of a pipeline's table: its length, its bubble, and what each stage keeps; as numbers and as text.

All stages start a tick together, so that it takes as long as the stage with most work in it. The bubble is the share of
the time in which a stage waits, the mean over stages.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxdist.parallel.pipeline.table import Ticks, moments

WORK_KINDS = ("F", "B", "W")  # forward, backward, gradients of parameters; also the order within a tick


class WorkCosts(NamedTuple):
    """Times of one microbatch on a whole stage, in any unit; a chunk takes its part of them.

    backward: of the gradient of the input
    weights: of the gradients of the parameters; added to `backward` in tables that do not split the two
    """

    forward: float = 1.0
    backward: float = 1.0
    weights: float = 1.0


EQUAL = WorkCosts()


class TimedWork(NamedTuple):
    """A piece of work and its time, in the unit of `WorkCosts`. kind: one of `WORK_KINDS`."""

    kind: str
    stage: int
    tick: int
    microbatch: int
    chunk: int
    start: float
    end: float


class Timeline(NamedTuple):
    """A table in time, in the unit of `WorkCosts`.

    starts, lengths: of the ticks, [T]
    work: sorted by tick, stage and start
    total: the time of all ticks
    busy: the time that each stage works, [S]
    bubble: 1 - busy / total, the mean over stages
    live: (microbatch, chunk) pairs that F has kept and B or W still need, in each tick on each stage, [T, S]
    most_live: the maximum of each stage, [S]
    """

    starts: np.ndarray
    lengths: np.ndarray
    work: tuple[TimedWork, ...]
    total: float
    busy: np.ndarray
    bubble: float
    live: np.ndarray
    most_live: np.ndarray


def simulate(ticks: Ticks, costs: WorkCosts = EQUAL, blocks: Sequence[int] = ()) -> Timeline:
    """The timeline of a valid table.

    costs: of a stage with the mean number of blocks
    blocks: of each virtual stage (`parallel.stages`), if these differ: work takes the time of its blocks then
    """
    share_vS = np.ones((ticks.chunks, ticks.stages)) / ticks.chunks  # what each chunk costs, of a whole stage
    if blocks:
        share_vS = np.reshape(blocks, share_vS.shape) * ticks.stages / sum(blocks)
    joint = costs.backward + costs.weights
    each = (costs.forward, costs.backward if ticks.weights.shape[2] else joint, costs.weights)
    tables = (ticks.forward[:, :, None], ticks.backward[:, :, None], ticks.weights)
    own_TS = np.zeros(ticks.forward.shape[:2])
    stage_S1 = np.arange(ticks.stages)[:, None]
    for cost, table_TSN2 in zip(each, tables, strict=True):
        own_TS += cost * np.where(table_TSN2[..., 0] >= 0, share_vS[table_TSN2[..., 1], stage_S1], 0).sum(axis=2)
    lengths_T = own_TS.max(axis=1)
    starts_T = np.cumsum(lengths_T) - lengths_T
    work = []
    for tick, stage in np.ndindex(own_TS.shape):
        end = float(starts_T[tick])
        for kind, cost, table_TSN2 in zip(WORK_KINDS, each, tables, strict=True):
            for microbatch, chunk in table_TSN2[tick, stage]:
                if microbatch >= 0:
                    start, end = end, end + cost * float(share_vS[chunk, stage])
                    work.append(TimedWork(kind, stage, tick, int(microbatch), int(chunk), start, end))
    total, busy_S, live_TS = float(lengths_T.sum()), own_TS.sum(axis=0), _live(ticks)
    bubble = 1 - float(busy_S.mean()) / total
    return Timeline(starts_T, lengths_T, tuple(work), total, busy_S, bubble, live_TS, live_TS.max(axis=0))


def _live(ticks: Ticks) -> np.ndarray:
    """How many (microbatch, chunk) pairs have had their F and not yet their last use, [T, S]."""
    when = moments(ticks)
    stage_MvS = np.broadcast_to(np.arange(ticks.stages), when.forward.shape)
    change_TS = np.zeros((ticks.length + 1, ticks.stages), int)
    np.add.at(change_TS, (when.forward, stage_MvS), 1)
    np.add.at(change_TS, (when.weights + 1, stage_MvS), -1)
    return np.cumsum(change_TS, axis=0)[:-1]


def table_text(ticks: Ticks) -> str:
    """The table for a terminal: a column for each tick, and lines for F, B and W of each stage.

    A cell is the number of a microbatch, with a letter for the chunk if there are several.
    """
    tables = [ticks.forward, ticks.backward, *np.moveaxis(ticks.weights, 2, 0)]
    kinds = ("F", "B", *"W" * ticks.weights.shape[2])
    letters = [chr(ord("a") + chunk) for chunk in range(ticks.chunks)] if ticks.chunks > 1 else [""]
    width = max(len(f"{ticks.microbatches - 1}{letters[-1]}"), len(f"{ticks.length - 1}")) + 1
    lines = [f"{'tick':<11}" + "".join(f"{tick:>{width}}" for tick in range(ticks.length))]
    for stage in range(ticks.stages):
        for kind, table_TS2 in zip(kinds, tables, strict=True):
            if (table_TS2[:, stage] < 0).all():
                continue
            cells = [f"{m}{letters[c]}" if m >= 0 else "." for m, c in table_TS2[:, stage]]
            name = f"stage {stage}" if kind == "F" else ""
            lines.append(f"{name:<9}{kind} " + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)
