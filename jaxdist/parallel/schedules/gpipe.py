"""GPipe: all forward passes, then all backward passes (Huang et al. 2019, arXiv 1811.06965, section 2).

It is the simplest schedule, and needs the most memory: a stage keeps the residuals of all microbatches at once. Its
bubble is as long as that of `one_f_one_b`.
"""

import numpy as np

from jaxdist.config.entries import ScheduleFacts
from jaxdist.config.rules.pipeline import check_counts
from jaxdist.parallel.pipeline.run import pipeline_schedule
from jaxdist.parallel.pipeline.table import Ticks, ticks_from_numbers

FACTS = ScheduleFacts(one_stage=False, chunks=False)


def table(stages: int, microbatches: int, chunks: int = 1) -> Ticks:
    """2 (M + S - 1) ticks; every stage keeps up to M microbatches. Raises `UserError` for M < 1 and chunks != 1."""
    check_counts("gpipe", stages=stages, microbatches=microbatches, chunks=chunks)
    half = microbatches + stages - 1
    tick_T1, stage_S = np.arange(2 * half)[:, None], np.arange(stages)
    return ticks_from_numbers(tick_T1 - stage_S, tick_T1 - half - (stages - 1 - stage_S), microbatches=microbatches)


gpipe = pipeline_schedule(table)
