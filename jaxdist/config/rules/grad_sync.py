"""`parallel.grad_sync`: what goes together. Imports no jax."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxdist.config.entries import AlgorithmFacts, ScheduleFacts
from jaxdist.config.rules.fields import show
from jaxdist.errors import UserError

GRAD_SYNC = "parallel.grad_sync"
LINK_NAMES = ("local", "nvlink", "infiniband", "tcp")
RATE_UNITS = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}  # in bytes a second
WIRE_DTYPES = ("bfloat16", "int8")
ORDERED_OPTIMIZERS = ("adamw", "sgd", "lion")


def link_rate(link: str, *, auto: bool = False) -> float | None:
    """Bytes a second of a rate such as "200mbit"; None for a name. auto: whether "auto" is one. Raises `UserError`."""
    names = ("auto", *LINK_NAMES) if auto else LINK_NAMES
    rate = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?)({'|'.join(RATE_UNITS)})", link)
    if link not in names and (rate is None or float(rate[1]) <= 0):
        raise UserError(
            f"{GRAD_SYNC}.link: {link!r} is not known; allowed: {', '.join(names)}, or a rate such as 200mbit or 10gbit"
        )
    return None if rate is None else float(rate[1]) * RATE_UNITS[rate[2]]


def check_wire(wire_dtype: str | None, algorithm: Any, *, section: str = GRAD_SYNC) -> None:
    """Raise `UserError` for a wire format that the algorithm, a name or an `Algorithm`, cannot send. section: of both
    keys."""
    if wire_dtype is None:
        return
    key = f"{section}.wire_dtype"
    if wire_dtype not in WIRE_DTYPES:
        raise UserError(f"{key}: {wire_dtype!r} is not known; allowed: {', '.join(WIRE_DTYPES)}, or null")
    if algorithm == "native":
        raise UserError(
            f"{key}: {wire_dtype!r} needs a hand-written {section}.algorithm; native sums in"
            " the type that it sends; allowed: null, or an algorithm such as ring"
        )
    lossy = AlgorithmFacts.of(algorithm).int8 if isinstance(algorithm, str) else algorithm.int8
    if wire_dtype == "int8" and not lossy:
        raise UserError(
            f"{key}: 'int8' is not for {section}.algorithm {algorithm}; allowed algorithms:"
            f" {', '.join(AlgorithmFacts.with_fact(int8=True))}"
        )


def refuse_in_conditions(algorithm: str) -> NoReturn:
    """Raise the `UserError` for an algorithm whose sums would be in conditions that not all stages take: each send
    waits for all devices of the mesh, for ever."""
    raise UserError(
        f"{GRAD_SYNC}.algorithm: {algorithm!r} would sum inside a pipeline's stages, where this parallel.strategy sums"
        " over fsdp; allowed: native; or parallel.strategy=zero1 or ddp, or parallel.pipeline_cond=false"
    )


def check_pairs(microbatches: int, schedule: str) -> None:
    """Raise `UserError` for a number of microbatches that the schedule cannot halve until one is left."""
    if microbatches & (microbatches - 1):
        raise UserError(
            f"parallel.microbatches: {microbatches} is no power of two, which schedule {schedule} needs;"
            " allowed: 1, 2, 4, 8, ..."
        )


def check_ordered(algorithm: str, wire_dtype: str | None, *, reduce_dtype: str) -> None:
    """Raise `UserError` for a way to sum that does not go with `deterministic`.

    reduce_dtype: the type in which gradients are summed.
    """
    if algorithm not in ("native", "ordered") or wire_dtype is not None:
        raise UserError(
            f"{GRAD_SYNC}.deterministic: true sums by algorithm ordered, without a wire_dtype; leave out"
            f" {GRAD_SYNC}.algorithm {algorithm} and wire_dtype {show(wire_dtype)}"
        )
    if reduce_dtype in ("bfloat16", "float16"):
        raise UserError(
            f"{GRAD_SYNC}.deterministic: true sums in at least float32, and by precision.policy and"
            f" precision.reduce_dtype gradients are summed in {reduce_dtype}; allowed: false; or"
            " precision.reduce_dtype=float32"
        )


def check_shards(virtual_shards: int, sizes: Mapping[str, int], *, microbatches: int, schedule: str) -> None:
    """Raise `UserError` for a layout that does not go with `deterministic`. sizes: of the mesh axes."""
    if not ScheduleFacts.of(schedule).deterministic:
        raise UserError(
            f"parallel.schedule: {schedule!r} is not for {GRAD_SYNC}.deterministic; allowed:"
            f" {', '.join(ScheduleFacts.with_fact(deterministic=True))}"
        )
    if other := [axis for axis in ("pipe", "expert", "context") if sizes[axis] > 1]:
        raise UserError(
            f"mesh.{other[0]}: {sizes[other[0]]} is given, but {GRAD_SYNC}.deterministic sums over data and fsdp only;"
            " allowed: 1"
        )
    shards = sizes["data"] * sizes["fsdp"]
    for key, count in ((f"{GRAD_SYNC}.virtual_shards", virtual_shards), ("mesh: data x fsdp", shards)):
        if count & (count - 1):
            raise UserError(f"{key}: {count} is no power of two, which deterministic needs; allowed: 1, 2, 4, 8, ...")
    if virtual_shards % (shards * microbatches):
        raise UserError(
            f"{GRAD_SYNC}.virtual_shards: {virtual_shards} does not divide by {shards} batch shards x"
            f" {microbatches} microbatches; allowed: a power of two from {shards * microbatches} on, the same in all"
            " runs to be compared"
        )


def refuse_optimizer(what: str) -> NoReturn:
    """Raise the `UserError` for an optimizer that does not go with `deterministic`.

    what: it does over whole parameters, "'muon' sums".
    """
    raise UserError(
        f"optimizer.name: {what} over whole parameters, whose order or rounding depends on the layout; allowed with"
        f" {GRAD_SYNC}.deterministic: {', '.join(ORDERED_OPTIMIZERS)}; or, in Python, optimizers that work"
        " element by element, with jaxdist.optim.clip_by_ordered_norm"
    )
