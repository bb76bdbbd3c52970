"""Optimizers, learning rates, and norms of gradients.

Optimizers are optax's. They run in the global region, on whole arrays: Adafactor, Muon and clipping need statistics of
a whole tensor, and in the manual region they would silently use those of a shard. Adafactor is run for each block of a
stack (`per_block`). Muon sends its matrices by itself, in a manual region of its own (`muon`).
"""

from jaxdist.optim.norms import clip_by_ordered_norm, global_norm, norm_without, ordered_norm, ordered_sum
from jaxdist.optim.update import apply_updates, leave_out, only_trained

__all__ = [
    "apply_updates", "clip_by_ordered_norm", "global_norm", "leave_out", "norm_without", "only_trained",
    "ordered_norm", "ordered_sum",
]  # fmt: skip
