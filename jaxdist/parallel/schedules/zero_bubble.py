"""ZB-H1: 1F1B whose backward pass is split, so that gradients of parameters (W) fill most of the bubble.

B, the gradient of the input, is all that the stage before waits for; W can wait until a stage has nothing else to do.
With equal costs of F, B and W the bubble is a third of that of `one_f_one_b`, and no stage keeps more microbatches than
the first one does there; what B leaves for W comes on top. Qi et al. 2024 (arXiv 2401.10241, section 2, ZB-H1). What is
left are the S - 1 forwards before the last stage can begin: with M >= 2 S - 2 no schedule that ends with a flush is
shorter.

Here stages keep step, and F and B are at the ticks of `one_f_one_b`. W follows two rules: the first stage, which has no
time to spare once its first B is there, computes W beside B; the others make no tick longer than that stage and F and B
make it, and work off the oldest of what waits whenever a tick leaves them time.
"""

from typing import Any

import jax
import numpy as np

from jaxdist.config.rules.pipeline import check_counts
from jaxdist.parallel.pipeline.run import run_ticks
from jaxdist.parallel.pipeline.table import Ticks
from jaxdist.parallel.schedule import Program, Seed
from jaxdist.parallel.schedules import one_f_one_b
from jaxdist.specs import PyTree

_PLACES = 2  # no tick leaves a stage time for more gradients of parameters


def table(stages: int, microbatches: int, chunks: int = 1) -> Ticks:
    """M + 2 S - 2 ticks. A stage keeps min(M, 2 S - 1) microbatches at most; of these min(M, 2 S - 2), or 1 with S = 1,
    have only W left. With equal costs the total is 3 M + S - 1 times one of them for M >= 2 S - 2. Raises `UserError`
    for M < 1 and chunks != 1."""
    check_counts("zero_bubble", stages=stages, microbatches=microbatches, chunks=chunks)
    ticks = one_f_one_b.table(stages, microbatches)
    backward_TS = ticks.backward[..., 0]
    busy_TS = (ticks.forward[..., 0] >= 0).astype(int) + (backward_TS >= 0)
    length_T = np.maximum(busy_TS.max(axis=1), busy_TS[:, 0] + (backward_TS[:, 0] >= 0))
    weights = np.full((ticks.length, stages, _PLACES, 2), -1, np.int32)
    for stage in range(stages):
        waiting: list[int] = []
        for tick in range(ticks.length):
            if backward_TS[tick, stage] >= 0:
                waiting.append(int(backward_TS[tick, stage]))
            count = min(len(waiting), int(length_T[tick] - busy_TS[tick, stage]))
            weights[tick, stage, :count] = [(microbatch, 0) for microbatch in waiting[:count]] or -1
            del waiting[:count]
    places = int((weights[..., 0] >= 0).any(axis=(0, 1)).sum())
    return ticks._replace(weights=np.ascontiguousarray(weights[:, :, :places]))


def zero_bubble(
    program: Program, diff: PyTree, held: PyTree, microbatches: PyTree, *, seed: Seed, reduce_dtype: Any
) -> tuple[jax.Array, jax.Array, PyTree]:
    """A `Schedule`, over the axis `pipe`."""
    return run_ticks(table, program, diff, held, microbatches, seed=seed, reduce_dtype=reduce_dtype)
