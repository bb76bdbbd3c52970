"""1F1B with a flush: the backward pass of a microbatch starts as soon as its forward pass has reached the last stage
(PipeDream-Flush: Narayanan et al. 2021, arXiv 2006.09503, section 3.2; arXiv 2104.04473, section 2.2.1).

The bubble is as long as that of `gpipe`, but memory does not grow with the number of microbatches. In the paper a stage
runs either a forward (F) or a backward (B) at a time, and the first stage keeps S microbatches. Here all stages keep
step: in every tick a stage runs both F and B, if it has both. So all ticks take the same time, whatever F and B cost,
and the first stage keeps 2 S - 1 microbatches.
"""

import numpy as np

from jaxdist.config.entries import ScheduleFacts
from jaxdist.config.rules.pipeline import check_counts
from jaxdist.parallel.pipeline.run import pipeline_schedule
from jaxdist.parallel.pipeline.table import Ticks, ticks_from_numbers

FACTS = ScheduleFacts(one_stage=False, chunks=False)


def table(stages: int, microbatches: int, chunks: int = 1) -> Ticks:
    """M + 2 S - 2 ticks; stage s keeps up to min(M, 2 (S - s) - 1) microbatches. Raises `UserError` for M < 1 and
    chunks != 1."""
    check_counts("one_f_one_b", stages=stages, microbatches=microbatches, chunks=chunks)
    tick_T1, stage_S = np.arange(microbatches + 2 * stages - 2)[:, None], np.arange(stages)
    return ticks_from_numbers(tick_T1 - stage_S, tick_T1 - (2 * stages - 2 - stage_S), microbatches=microbatches)


one_f_one_b = pipeline_schedule(table)
