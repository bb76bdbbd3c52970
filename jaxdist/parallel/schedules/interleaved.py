"""Interleaved 1F1B: a stage has v chunks of blocks from different places of the model, and the bubble is v times
shorter (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2).

A microbatch goes round the ring of stages v times, so the stages send v times as much. S microbatches go through one
chunk, then the same S through the next chunk.
"""

import numpy as np

from jaxdist.config.entries import ScheduleFacts
from jaxdist.config.rules.pipeline import check_counts
from jaxdist.parallel.pipeline.run import pipeline_schedule
from jaxdist.parallel.pipeline.table import Ticks, ticks_from_pairs

FACTS = ScheduleFacts(one_stage=False, chunks=True)


def table(stages: int, microbatches: int, chunks: int = 1) -> Ticks:
    """M v + v S + S - 2 ticks, each a v-th of a stage's work. With v = 1 this is `one_f_one_b`.

    chunks: v. The first stage keeps the most: min(M v, (v + 1) S - 1) times the residuals of one chunk. Raises
    `UserError` for M < 1 or v < 1, and for v > 1 unless S divides M.
    """
    check_counts("interleaved", stages=stages, microbatches=microbatches, chunks=chunks)
    total, around = microbatches * chunks, stages * chunks
    tick_T1, stage_S = np.arange(total + around + stages - 2)[:, None], np.arange(stages)

    def pairs(number_TS: np.ndarray, *, reverse: bool) -> np.ndarray:
        chunk_TS = number_TS % around // stages
        microbatch_TS = number_TS // around * stages + number_TS % stages
        pair_TS2 = np.stack([microbatch_TS, chunks - 1 - chunk_TS if reverse else chunk_TS], axis=-1)
        return np.where(((number_TS >= 0) & (number_TS < total))[..., None], pair_TS2, -1)

    forward = pairs(tick_T1 - stage_S, reverse=False)
    backward = pairs(tick_T1 - (around - 1) - (stages - 1 - stage_S), reverse=True)
    return ticks_from_pairs(forward, backward, microbatches=microbatches, chunks=chunks)


interleaved = pipeline_schedule(table)
