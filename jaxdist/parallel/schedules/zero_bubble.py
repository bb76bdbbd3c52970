"""ZB-H1: 1F1B with a split backward pass, where gradients of parameters (W) fill most of the bubble (Qi et al. 2024,
arXiv 2401.10241, section 2).

The stage before waits for the gradient of the input (B) only; W can wait until a stage has nothing else to do. With
equal costs of F, B and W the bubble is a third of that of `one_f_one_b`. No stage keeps more microbatches than the
first stage keeps there, besides the values that B hands to W. The S - 1 forwards before the last stage begins remain:
with M >= 2 S - 2 no schedule that ends with a flush is shorter.

All stages keep step, and F and B are at the ticks of `one_f_one_b`. W has two rules. The first stage has no time to
spare after its first B, and computes W beside B. Another stage computes the oldest waiting W whenever that makes the
tick no longer than F, B and the first stage make it.
"""

import numpy as np

from jaxdist.config.entries import ScheduleFacts
from jaxdist.config.rules.pipeline import check_counts
from jaxdist.parallel.pipeline.run import pipeline_schedule
from jaxdist.parallel.pipeline.table import Ticks
from jaxdist.parallel.schedules import one_f_one_b

FACTS = ScheduleFacts(one_stage=False, chunks=False, split_backward=True)

_PLACES = 2  # the most W for which a tick leaves a stage time


def table(stages: int, microbatches: int, chunks: int = 1) -> Ticks:
    """M + 2 S - 2 ticks. A stage keeps up to min(M, 2 S - 1) microbatches; up to min(M, 2 S - 2) of them, or 1 with
    S = 1, have only W left. If F, B and W cost the same, all ticks cost 3 M + S - 1 times as much, for M >= 2 S - 2.
    Raises `UserError` for M < 1 and chunks != 1."""
    check_counts("zero_bubble", stages=stages, microbatches=microbatches, chunks=chunks)
    ticks = one_f_one_b.table(stages, microbatches)
    backward_TS = ticks.backward[..., 0]
    busy_TS = (ticks.forward[..., 0] >= 0).astype(int) + (backward_TS >= 0)
    length_T = np.maximum(busy_TS.max(axis=1), busy_TS[:, 0] + (backward_TS[:, 0] >= 0))
    weights = np.full((ticks.length, stages, _PLACES, 2), -1, np.int32)
    for stage in range(stages):
        waiting: list[int] = []  # microbatches after their B and before their W, the oldest first
        for tick in range(ticks.length):
            if backward_TS[tick, stage] >= 0:
                waiting.append(int(backward_TS[tick, stage]))
            count = min(len(waiting), int(length_T[tick] - busy_TS[tick, stage]))
            weights[tick, stage, :count] = [(microbatch, 0) for microbatch in waiting[:count]] or -1
            del waiting[:count]
    places = int((weights[..., 0] >= 0).any(axis=(0, 1)).sum())
    return ticks._replace(weights=np.ascontiguousarray(weights[:, :, :places]))


zero_bubble = pipeline_schedule(table)
