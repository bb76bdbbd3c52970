"""`mesh.pipe`, `parallel.schedule`, `chunks`, `stages`: how a model is cut into a pipeline. Imports no jax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

from jaxdist.config.entries import ScheduleFacts
from jaxdist.config.rules.fields import show
from jaxdist.errors import UserError


def divisors(number: int) -> list[int]:
    """All divisors of a positive integer, in order."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def near(numbers: Sequence[int], wish: int, *, most: int = 6) -> str:
    """The `most` numbers nearest to `wish`, in order."""
    return ", ".join(map(str, sorted(sorted(numbers, key=lambda n: abs(n - wish))[:most]))) or "none"


def multiples_around(number: int, of: int) -> list[int]:
    """The positive multiples of `of` that are next to a number which is none."""
    below = number - number % of
    return [n for n in (below, below + of) if n]


def check_one_stage(stages: int, schedule: str = "") -> None:
    """Raise `UserError` for several stages under a schedule that has one."""
    if stages > 1:
        raise UserError(
            f"mesh.pipe: {stages} is given, but {named_schedule(schedule)} has one stage;"
            f" allowed: 1; or parallel.schedule={', '.join(ScheduleFacts.with_fact(one_stage=False))}"
        )


def refuse_stages(setting: str, schedule: str = "", *, allowed: str) -> NoReturn:
    """Raise the `UserError` for a setting such as "parallel.prefetch: 1" under a schedule of several stages."""
    raise UserError(f"{setting} is for one stage, {named_schedule(schedule)} has several; allowed: {allowed}")


def named_schedule(schedule: str) -> str:
    """A schedule in a message; "" where a step does not know its name."""
    return f"parallel.schedule {schedule}" if schedule else "the parallel.schedule of this step"


def check_counts(schedule: str, *, stages: int, microbatches: int, chunks: int) -> None:
    """Raise `UserError` unless `schedule` can run these counts."""
    assert stages >= 1, stages
    chunked = ScheduleFacts.of(schedule).chunks is not False
    if chunks < 1 or (chunks > 1 and not chunked):
        others = ", ".join(ScheduleFacts.with_fact(chunks=True))
        allowed = "1 and more" if chunked else f"1; or parallel.schedule={others}"
        raise UserError(f"parallel.chunks: {chunks} is not for parallel.schedule {schedule}; allowed: {allowed}")
    if microbatches < 1:
        raise UserError(
            f"parallel.microbatches: {microbatches} is below 1; allowed: 1 and more; the more, the less the"
            f" {stages} stages wait, {4 * stages} say"
        )
    if chunks > 1 and microbatches % stages:
        raise UserError(
            f"parallel.microbatches: {microbatches} is no multiple of mesh.pipe {stages}, as parallel.schedule"
            f" {schedule} with parallel.chunks {chunks} needs; nearest that work:"
            f" {near(multiples_around(microbatches, stages), microbatches)}; or parallel.chunks=1"
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
