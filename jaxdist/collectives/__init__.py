"""Collectives for use inside `jax.shard_map(check_vma=True)`: XLA's own, and algorithms written with `lax.ppermute`."""

from jaxdist.collectives.algorithm import Algorithm, get_algorithm
from jaxdist.collectives.bucket import in_buckets
from jaxdist.collectives.cost import Cost, Link, make_link
from jaxdist.collectives.group import Group, make_group
from jaxdist.collectives.operations import (
    all_gather,
    all_reduce,
    all_reduce_with_feedback,
    all_to_all,
    broadcast,
    cost,
    gather,
    reduce,
    reduce_scatter,
    scatter,
    send_recv,
)
from jaxdist.collectives.replicated import claim_replicated, stack, stacked_specs
from jaxdist.collectives.varying import active_axes, pmax, psum, rank, to_varying, varying_axes, zeros_varying_like
from jaxdist.config.rules.grad_sync import check_wire

__all__ = [
    "Algorithm", "Cost", "Group", "Link", "active_axes", "all_gather", "all_reduce", "all_reduce_with_feedback",
    "all_to_all", "broadcast", "check_wire", "claim_replicated", "cost", "gather", "get_algorithm", "in_buckets",
    "make_group", "make_link", "pmax", "psum", "rank", "reduce", "reduce_scatter", "scatter", "send_recv", "stack",
    "stacked_specs", "to_varying", "varying_axes", "zeros_varying_like",
]  # fmt: skip
