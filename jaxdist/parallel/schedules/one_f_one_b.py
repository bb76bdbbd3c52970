"""1F1B with a flush: a microbatch goes back as soon as it has reached the last stage.

The bubble is that of `gpipe`; the memory does not grow with the number of microbatches. PipeDream-Flush: Narayanan et
al. 2021 (arXiv 2006.09503, section 3.2; arXiv 2104.04473, section 2.2.1). There a stage works on one microbatch at a
time and stages work in turns, so that the first keeps S microbatches. Here stages keep step: each runs a forward and a
backward in every tick in which it has both, a tick takes as long whatever F and B cost, and the first stage keeps
2 S - 1.
"""

from typing import Any

import jax
import numpy as np

from jaxdist.config.rules.pipeline import check_counts
from jaxdist.parallel.pipeline.run import run_ticks
from jaxdist.parallel.pipeline.table import Ticks, in_order
from jaxdist.parallel.schedule import Program, Seed
from jaxdist.specs import PyTree


def table(stages: int, microbatches: int, chunks: int = 1) -> Ticks:
    """M + 2 S - 2 ticks; stage s keeps min(M, 2 (S - s) - 1) microbatches at most. Raises `UserError` for M < 1 and
    chunks != 1."""
    check_counts("one_f_one_b", stages=stages, microbatches=microbatches, chunks=chunks)
    tick_T1, stage_S = np.arange(microbatches + 2 * stages - 2)[:, None], np.arange(stages)
    return in_order(tick_T1 - stage_S, tick_T1 - (2 * stages - 2 - stage_S), microbatches=microbatches)


def one_f_one_b(
    program: Program, diff: PyTree, held: PyTree, microbatches: PyTree, *, seed: Seed, reduce_dtype: Any
) -> tuple[jax.Array, jax.Array, PyTree]:
    """A `Schedule`, over the axis `pipe`."""
    return run_ticks(table, program, diff, held, microbatches, seed=seed, reduce_dtype=reduce_dtype)
