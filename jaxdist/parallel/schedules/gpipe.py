"""GPipe: all forwards, then all backwards.

Simple, and the most memory: what the first forward of a stage keeps waits for all others. The bubble is that of
`one_f_one_b`. Huang et al. 2019 (arXiv 1811.06965, section 2).
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
    """2 (M + S - 1) ticks, M microbatches kept at most on every stage. Raises `UserError` for M < 1 and chunks != 1."""
    check_counts("gpipe", stages=stages, microbatches=microbatches, chunks=chunks)
    half = microbatches + stages - 1
    tick_T1, stage_S = np.arange(2 * half)[:, None], np.arange(stages)
    return in_order(tick_T1 - stage_S, tick_T1 - half - (stages - 1 - stage_S), microbatches=microbatches)


def gpipe(
    program: Program, diff: PyTree, held: PyTree, microbatches: PyTree, *, seed: Seed, reduce_dtype: Any
) -> tuple[jax.Array, jax.Array, PyTree]:
    """A `Schedule`, over the axis `pipe`."""
    return run_ticks(table, program, diff, held, microbatches, seed=seed, reduce_dtype=reduce_dtype)
