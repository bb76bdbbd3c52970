"""`parallel.prefetch`: where a step can have it, and where it has it unasked. Imports no jax."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from jaxdist.config.entries import ScheduleFacts, StrategyFacts
from jaxdist.config.rules.remat import check_prefetched, check_unrolled
from jaxdist.errors import UserError

if TYPE_CHECKING:
    from jaxdist.config.schema import Config


def check_prefetch(config: Config) -> None:
    """Raise `UserError` for what does not go with `parallel.prefetch: 1`, if that is asked for."""
    parallel, remat = config.parallel, config.memory.remat
    if not parallel.prefetch:
        return
    if ScheduleFacts.of(parallel.schedule).one_stage is False:
        raise UserError(
            f"parallel.prefetch: 1 is for one stage, parallel.schedule {parallel.schedule} has several; allowed: 0"
        )
    if not parallel.reshard_after_forward:
        raise UserError(
            "parallel.prefetch: 1 gathers blocks again for the backward pass; set"
            " parallel.reshard_after_forward to true, or prefetch to 0"
        )
    if parallel.grad_sync.deterministic:
        raise UserError(
            "parallel.prefetch: 1 changes the order of work; set it to 0 with parallel.grad_sync.deterministic"
        )
    check_prefetched(remat)
    check_unrolled(config.model.scan_blocks, remat, prefetch=1)


def prefetches(config: Config, *, gpu: bool) -> bool:
    """Whether a step prefetches: as `parallel.prefetch` says, or, where that is null, under zero3 over several GPUs if
    nothing that is set excludes it. Figures: docs/plan.md. gpu: what it runs on."""
    parallel = config.parallel
    if parallel.prefetch is not None:
        return bool(parallel.prefetch)
    stages = config.mesh.pipe != 1 or parallel.stages or not ScheduleFacts.of(parallel.schedule).one_stage
    if not gpu or not StrategyFacts.of(parallel.strategy).regathers or config.mesh.fsdp == 1 or stages:
        return False
    try:
        check_prefetch(replace(config, parallel=replace(parallel, prefetch=1)))
    except UserError:
        return False
    return True
