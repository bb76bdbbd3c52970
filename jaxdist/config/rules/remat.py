"""`memory.remat`: its modes, the values that layers name, and what goes together. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from jaxdist.config.rules.fields import Rule, check_value, show
from jaxdist.config.rules.pipeline import named_schedule, refuse_stages
from jaxdist.errors import UserError

REMAT = "memory.remat"
MODES = ("none", "full", "dots", "sqrt", "offload")
AUTO = "auto"  # of a configuration: what `config.checks.default_remat` chooses
# Values of a block that layers name with `checkpoint_name`, for `memory.remat=[attention.out,mlp.hidden]`. A test
# compares them with the layers; docs/memory.md says what each is.
_OF_ATTENTION = ("attention.qkv", "attention.context", "attention.out")
NAMES = (*_OF_ATTENTION, "mlp.tokens", "mlp.rows", "mlp.hidden", "mlp.activation", "mlp.out")
ATTENTION_RESULT = "attention.result"  # with its statistics: of plain JAX and of a ring, which "dots" keeps
Remat = str | tuple[str, ...]


def names_value(remat: Remat, name: str) -> bool:
    """Whether a list of names keeps this value."""
    return not isinstance(remat, str) and name in remat


def keeps_ring(remat: Remat) -> bool:
    """Whether the result of ring attention is kept, so that the ring does not run again in the backward pass."""
    return remat in ("none", "dots") or names_value(remat, "attention.context")


def check_remat(value: str | Sequence[str]) -> Remat:
    """A mode, or a tuple of names. Raises `UserError` on what is neither."""
    return check_value(value, str, False, Rule("", choices=MODES, listed=NAMES), REMAT)


def check_prefetched(remat: Remat) -> None:
    """Raise `UserError` for modes that `parallel.prefetch: 1` does not have."""
    if remat in ("sqrt", "offload"):
        raise UserError(
            f"{REMAT}: {remat!r} does not go with parallel.prefetch 1, which stores each block's activations itself;"
            " allowed: none, full, dots, a list of names; or parallel.prefetch=0"
        )


def in_loop(scan_blocks: int | None) -> bool:
    """Whether blocks run one by one in a loop, as `model.scan_blocks` says or, by null, leaves open."""
    return scan_blocks in (None, 1)


def check_unrolled(scan_blocks: int | None, remat: Remat, *, prefetch: int = 0, deterministic: bool = False) -> None:
    """Raise `UserError` for loops over blocks that are not unrolled: those of prefetching and of "sqrt" are arranged by
    hand, and without a loop the compiler may round otherwise in other layouts."""
    for key, has in (
        ("parallel.prefetch 1", prefetch),
        (f"{REMAT} 'sqrt'", remat == "sqrt"),
        ("parallel.grad_sync.deterministic", deterministic),
    ):
        if not in_loop(scan_blocks) and has:
            raise UserError(f"model.scan_blocks: {scan_blocks} does not go with {key}; allowed with it: 1")


def check_deterministic(remat: Remat) -> None:
    """Raise `UserError` for all modes but "none": where a block is computed again beside its backward pass, the
    compiler arranges both by how the block's parameters come, from memory or from a gather, and rounds otherwise."""
    if remat not in (AUTO, "none"):
        raise UserError(
            f"{REMAT}: {show(remat)} does not go with parallel.grad_sync.deterministic: recomputed"
            " activations round differently in other layouts; allowed: none"
        )


def refuse_split_backward(schedule: str = "") -> NoReturn:
    """Raise the `UserError` for "sqrt" where the backward pass runs in two halves."""
    raise UserError(
        f"{REMAT}: 'sqrt' does not go with {named_schedule(schedule)}, whose backward pass has two halves:"
        " each would compute every segment again; allowed: none, full, dots, a list of names"
    )


def refuse_split_sequence() -> NoReturn:
    """Raise the `UserError` for "sqrt" with positions split over `tensor`."""
    raise UserError(
        f"{REMAT}: 'sqrt' does not go with parallel.sequence_parallel; allowed with it: none, full, dots,"
        " offload, a list of names"
    )


def with_offload(remat: Remat, *, activations: bool) -> Remat:
    """`memory.remat`, with `memory.offload.activations` as the mode that it means. Raises `UserError` for another."""
    if activations and remat not in (AUTO, "none", "full", "offload"):
        raise UserError(
            f"memory.offload.activations: true is memory.remat 'offload', and {show(remat)} is set;"
            " allowed with it: auto, none, full, offload"
        )
    return "offload" if activations else remat


def check_offload(remat: Remat, *, schedule: str, several: bool) -> None:
    """Raise `UserError` for "offload" where the schedule has several stages."""
    if remat == "offload" and several:
        refuse_stages(f"{REMAT}: 'offload'", schedule, allowed="none, full, dots, sqrt, a list of names")


def check_prefetch(prefetch: int, *, reshard_after_forward: bool, deterministic: bool) -> None:
    """Raise `UserError` for what does not go with `parallel.prefetch: 1`, if that is asked for."""
    if prefetch not in (0, 1):
        raise UserError(f"parallel.prefetch: {prefetch!r} is out of range; allowed: 0, 1")
    if prefetch and not reshard_after_forward:
        raise UserError(
            "parallel.prefetch: 1 gathers blocks again for the backward pass; set"
            " parallel.reshard_after_forward to true, or prefetch to 0"
        )
    if prefetch and deterministic:
        raise UserError(
            "parallel.prefetch: 1 changes the order of work; set it to 0 with parallel.grad_sync.deterministic"
        )
