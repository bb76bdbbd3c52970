"""Checks of how blocks are cut into the stages of a pipeline. Reads no jax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxdist.config.entries import ScheduleFacts
from jaxdist.config.fields import show
from jaxdist.errors import UserError

if TYPE_CHECKING:
    from jaxdist.config.schema import Config

FACTORED = 128  # the smallest dim that optax.adafactor factors


def divisors(number: int) -> list[int]:
    """All divisors of a positive integer, in order."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def near(numbers: Sequence[int], wish: int, *, most: int = 6) -> str:
    """The `most` numbers nearest to `wish`, in order."""
    return ", ".join(map(str, sorted(sorted(numbers, key=lambda n: abs(n - wish))[:most]))) or "none"


def check_pipeline(config: Config, stages: int) -> None:
    """Raise `UserError` where schedule, chunks, stages and microbatches do not fit each other or this many stages."""
    parallel, layers = config.parallel, config.model.layers
    facts = ScheduleFacts.of(parallel.schedule)
    if stages > 1 and facts.one_stage:
        raise UserError(
            f"mesh.pipe: {stages} is given, but parallel.schedule {parallel.schedule} has one stage;"
            f" allowed: 1; or parallel.schedule={', '.join(ScheduleFacts.with_fact(one_stage=False))}"
        )
    if parallel.chunks > 1 and facts.chunks is False:
        raise UserError(
            f"parallel.chunks: {parallel.chunks} is given, but parallel.schedule {parallel.schedule} has no"
            f" chunks; allowed: 1; or parallel.schedule={', '.join(ScheduleFacts.with_fact(chunks=True))}"
        )
    if layers is not None and (not parallel.stages or config.mesh.pipe != -1):
        check_stages(parallel.stages, layers=layers, stages=stages, chunks=parallel.chunks)
    if uneven(parallel.stages) and config.optimizer.name == "adafactor":  # empty rows would change its means
        raise UserError(
            f"optimizer.name: 'adafactor' takes means over all blocks, parallel.stages"
            f" {show(parallel.stages)} adds rows of zeros; allowed: adamw, sgd, lion, muon, or stages with"
            " equally many blocks"
        )
    if parallel.chunks > 1 and config.optimizer.name == "adafactor" and (layers or 0) >= FACTORED:
        raise UserError(
            f"optimizer.name: 'adafactor' factors over blocks if model.layers is {FACTORED} or more, whose"
            f" order a checkpoint could then not tell with parallel.chunks {parallel.chunks}; allowed:"
            " adamw, sgd, lion, muon; or parallel.chunks=1"
        )
    if parallel.chunks > 1 and parallel.microbatches % stages:
        count, below = parallel.microbatches, parallel.microbatches // stages * stages
        works = near([n for n in (below, below + stages) if n], count)
        raise UserError(
            f"parallel.microbatches: {count} is no multiple of mesh.pipe {stages}, as parallel.chunks"
            f" {parallel.chunks} needs; nearest that work: {works}"
        )


def uneven(blocks: Sequence[int]) -> tuple[int, ...]:
    """The sizes of stages, `parallel.stages`, or nothing if they are equal: then all is as without."""
    return tuple(blocks) if len(set(blocks)) > 1 else ()


def check_stages(blocks: Sequence[int], *, layers: int, stages: int, chunks: int) -> None:
    """Raise `UserError` unless `layers` blocks can be cut into `stages` stages of `chunks` chunks: into parts of these
    sizes (`parallel.stages`), or, if there are none, of equal sizes."""
    parts = stages * chunks
    sizes = _even_sizes(layers, parts)
    instead = f"; or parallel.stages={sizes}" if sizes else ""
    if blocks and (len(blocks) != parts or sum(blocks) != layers or min(blocks) < 1):
        of = f"mesh.pipe {stages}" + (f" x parallel.chunks {chunks}" if chunks > 1 else "")
        example = f", such as {sizes}" if sizes else ""
        raise UserError(
            f"parallel.stages: {show(tuple(blocks))} has {len(blocks)} sizes, {sum(blocks)} blocks in all;"
            f" allowed: {parts} sizes ({of}), 1 and more, {layers} in all (model.layers)"
            f"{example}"
        )
    if not blocks and layers % stages:
        raise UserError(
            f"mesh.pipe: {stages} does not divide model.layers {layers}; sizes that work:"
            f" {near(divisors(layers), stages)}{instead}"
        )
    if not blocks and layers % parts:
        raise UserError(
            f"parallel.chunks: {chunks} does not divide the {layers // stages} blocks of a stage"
            f" (model.layers {layers} / mesh.pipe {stages}); allowed:"
            f" {near(divisors(layers // stages), chunks)}{instead}"
        )


def _even_sizes(layers: int, parts: int) -> str:
    """ "[7,8,8,7]": sizes as even as possible, the smaller ones at the ends, where embedding and head are. Nothing
    where there are fewer blocks than parts, or more parts than fit into a message."""
    if not parts <= min(layers, 64):
        return ""
    few, more = divmod(layers, parts)
    larger = sorted(range(parts), key=lambda part: abs(2 * part + 1 - parts))[:more]
    return f"[{','.join(str(few + (part in larger)) for part in range(parts))}]"  # a shell takes it without quotes
