"""Timing of several programs by turns, so that what else the machine does falls on all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils

from jaxdist.processes import from_all

REPETITIONS = 7


class Timed(NamedTuple):
    """Seconds of a program. median: of the repetitions; of several processes the slowest counts.

    spread: relative, half of the range from the first to the third quartile.
    """

    median: float
    spread: float


def by_turns(programs: Mapping[Any, Callable[[], Any]], repetitions: int = REPETITIONS) -> dict[Any, Timed]:
    """Run each program once to warm up, then all of them by turns. All processes of a job must call it, with the same
    programs. The processes begin each run together, as those of a step do."""
    for run in programs.values():
        jax.block_until_ready(run())
    seconds: dict[Any, list[float]] = {name: [] for name in programs}
    for _ in range(repetitions):
        for name, run in programs.items():
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("calibrate")
            began = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - began)
    everywhere: list[dict[str, list[float]]] = from_all({str(i): each for i, each in enumerate(seconds.values())})
    return {name: _timed([each[str(i)] for each in everywhere]) for i, name in enumerate(programs)}


def _timed(of_processes: Sequence[Sequence[float]]) -> Timed:
    slowest = [max(each) for each in zip(*of_processes, strict=True)]
    low, middle, high = statistics.quantiles(slowest, n=4) if len(slowest) > 1 else slowest * 3
    return Timed(middle, (high - low) / 2 / middle)
