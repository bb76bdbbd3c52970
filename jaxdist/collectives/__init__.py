"""Collectives inside `jax.shard_map(check_vma=True)`, the compiler's own and hand-written ones from `lax.ppermute`."""

from jaxdist.collectives.algorithm import Algorithm, Cost
from jaxdist.collectives.buckets import in_buckets
from jaxdist.collectives.claim import claim_replicated, stack, stacked_specs
from jaxdist.collectives.operations import all_gather, all_reduce, get_algorithm, reduce_scatter
from jaxdist.collectives.varying import active_axes, pmax, psum, rank, to_varying, varying_axes, zeros_varying_like

__all__ = [
    "Algorithm",
    "Cost",
    "active_axes",
    "all_gather",
    "all_reduce",
    "claim_replicated",
    "get_algorithm",
    "in_buckets",
    "pmax",
    "psum",
    "rank",
    "reduce_scatter",
    "stack",
    "stacked_specs",
    "to_varying",
    "varying_axes",
    "zeros_varying_like",
]
