"""The checks of `parallel.grad_sync`: what goes together. Imports no jax."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from jaxdist.errors import UserError

if TYPE_CHECKING:
    from jaxdist.config.schema import Config

LINKS = ("auto", "local", "nvlink", "infiniband", "tcp")
INT8 = ("ring", "balanced_fusion")
ORDERED_OPTIMIZERS = ("adamw", "sgd", "lion")
KEY = "parallel.grad_sync"


def check_grad_sync(config: Config, mesh: dict[str, int]) -> None:
    """Raise `UserError` for values that exclude each other. `mesh`: its sizes, 1 for what is not known yet."""
    sync = config.parallel.grad_sync
    rate = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(kbit|mbit|gbit)", sync.link)
    if sync.link not in LINKS and (rate is None or float(rate[1]) <= 0):
        raise UserError(
            f"{KEY}.link: {sync.link!r} is not known; allowed: {', '.join(LINKS)}, or a rate such as 200mbit or 10gbit"
        )
    if sync.wire_dtype is not None and sync.algorithm == "native":
        raise UserError(
            f"{KEY}.wire_dtype: {sync.wire_dtype!r} needs a hand-written {KEY}.algorithm; native sums in"
            " the type that it sends; allowed: null, or an algorithm such as ring"
        )
    if sync.wire_dtype == "int8" and sync.algorithm not in INT8:
        raise UserError(
            f"{KEY}.wire_dtype: 'int8' is not for {KEY}.algorithm {sync.algorithm}; allowed algorithms:"
            f" {', '.join(INT8)}"
        )
    microbatches = config.parallel.microbatches
    if config.parallel.schedule == "pairwise" and microbatches & (microbatches - 1):
        raise UserError(
            f"parallel.microbatches: {microbatches} is no power of two, which schedule pairwise needs;"
            " allowed: 1, 2, 4, 8, ..."
        )
    if sync.deterministic:
        _check_deterministic(config, mesh)


def _check_deterministic(config: Config, mesh: dict[str, int]) -> None:
    sync, parallel = config.parallel.grad_sync, config.parallel
    ranks = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    if sync.algorithm not in ("native", "ordered") or sync.wire_dtype is not None:
        raise UserError(
            f"{KEY}.deterministic: true sums by algorithm ordered, nothing rounded; leave out"
            f" {KEY}.algorithm {sync.algorithm} and wire_dtype {sync.wire_dtype}"
        )
    reduce_dtype = config.precision.reduce_dtype
    if reduce_dtype in ("bfloat16", "float16"):
        raise UserError(
            f"precision.reduce_dtype: {reduce_dtype!r} is not for {KEY}.deterministic; allowed: null, float32"
        )
    if config.precision.policy == "O3" and reduce_dtype is None:
        raise UserError(
            f"precision.policy: 'O3' sums gradients in a half type, which is not for {KEY}.deterministic;"
            " allowed with it: precision.reduce_dtype=float32"
        )
    for key, count in ((f"{KEY}.virtual_shards", sync.virtual_shards), ("mesh: data x fsdp x expert", ranks)):
        if count & (count - 1):
            raise UserError(f"{key}: {count} is no power of two, which deterministic needs; allowed: 1, 2, 4, 8, ...")
    if sync.virtual_shards % (ranks * parallel.microbatches):
        raise UserError(
            f"{KEY}.virtual_shards: {sync.virtual_shards} does not divide by {ranks} batch shards x"
            f" {parallel.microbatches} microbatches; allowed: a power of two from"
            f" {ranks * parallel.microbatches} on, the same in all runs to be compared"
        )
    if config.data.global_batch % sync.virtual_shards:
        raise UserError(
            f"data.global_batch: {config.data.global_batch} does not divide by {KEY}.virtual_shards"
            f" {sync.virtual_shards}; allowed: a multiple of it"
        )
    if parallel.schedule not in ("accumulate", "pairwise"):
        raise UserError(f"parallel.schedule: {parallel.schedule!r} is not for {KEY}.deterministic; allowed: accumulate")
    if config.optimizer.name not in ORDERED_OPTIMIZERS:
        raise UserError(
            f"optimizer.name: {config.optimizer.name!r} sums over elements in an order that depends on the"
            f" layout; allowed with {KEY}.deterministic: {', '.join(ORDERED_OPTIMIZERS)}"
        )
