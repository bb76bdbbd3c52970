"""Interleaved 1F1B: the blocks of a stage are cut into v chunks that lie apart, and the bubble shrinks v times.

A microbatch goes round the ring of stages v times, so v times as much is sent. S microbatches go through one chunk,
then the same through the next. Narayanan et al. 2021 (arXiv 2104.04473, section 2.2.2).
"""

from typing import Any

import jax
import numpy as np

from jaxdist.config.rules.pipeline import check_counts
from jaxdist.parallel.pipeline.run import run_ticks
from jaxdist.parallel.pipeline.table import Ticks, ticks_of
from jaxdist.parallel.schedule import Program, Seed
from jaxdist.specs import PyTree


def table(stages: int, microbatches: int, chunks: int = 1) -> Ticks:
    """M v + v S + S - 2 ticks, each a v-th of a stage's work. chunks: v; with 1 this is `one_f_one_b`. The first stage
    keeps most, min(M v, (v + 1) S - 1) times what a chunk keeps of a microbatch. Raises `UserError` for M < 1 or v < 1,
    and for v > 1 unless S divides M."""
    check_counts("interleaved", stages=stages, microbatches=microbatches, chunks=chunks, chunked=True)
    total, around = microbatches * chunks, stages * chunks
    tick_T1, stage_S = np.arange(total + around + stages - 2)[:, None], np.arange(stages)

    def pairs(number_TS: np.ndarray, *, reverse: bool) -> np.ndarray:
        chunk_TS = number_TS % around // stages
        microbatch_TS = number_TS // around * stages + number_TS % stages
        pair_TS2 = np.stack([microbatch_TS, chunks - 1 - chunk_TS if reverse else chunk_TS], axis=-1)
        return np.where(((number_TS >= 0) & (number_TS < total))[..., None], pair_TS2, -1)

    forward = pairs(tick_T1 - stage_S, reverse=False)
    backward = pairs(tick_T1 - (around - 1) - (stages - 1 - stage_S), reverse=True)
    return ticks_of(forward, backward, microbatches=microbatches, chunks=chunks)


def interleaved(
    program: Program, diff: PyTree, held: PyTree, microbatches: PyTree, *, seed: Seed, reduce_dtype: Any
) -> tuple[jax.Array, jax.Array, PyTree]:
    """A `Schedule`, over the axis `pipe`, for a model that `jaxdist.parallel.pipeline.stages` has cut into chunks."""
    return run_ticks(table, program, diff, held, microbatches, seed=seed, reduce_dtype=reduce_dtype)
