"""The reasons of a plan: why the nearest others lost, and what would have to be true for another to win."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxdist.config.schema import Config
from jaxdist.plan.calibration.file import REMATS
from jaxdist.plan.changes import changed
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.closed.memory.peak import PEAK
from jaxdist.plan.search.choose import Predicted, Search, Tie, search, tie_of
from jaxdist.plan.search.cluster import PlanCluster
from jaxdist.plan.search.space import Layout, kind_of_layout
from jaxdist.specs import format_bytes

_PARTS = "parallel.microbatches"
FACTORS = (2, 4, 8, 16, 32, 64)


class Other(NamedTuple):
    """A layout that lost. why: in words."""

    candidate: Predicted
    why: str


class Turn(NamedTuple):
    """What would have to be true for another layout to win. what: in words."""

    what: str
    winner: Predicted


def others(found: Search, tie: Tie, *, most: int = 6) -> list[Other]:
    """The best of each kind of layout that is not in the tie class, with the reason why it lost; and of each kind of
    which none fits, the one that is nearest to fitting."""
    seen, lost = {kind_of_layout(each.layout) for each in tie.members}, list[Other]()
    for each in found.fitting:
        if (kind := kind_of_layout(each.layout)) not in seen:
            seen.add(kind)
            lost.append(Other(each, slower(each, tie.winner)))
    full = list[Other]()
    for each in sorted(found.tight, key=lambda each: each.peak):
        if (kind := kind_of_layout(each.layout)) not in seen:
            seen.add(kind)
            full.append(Other(each, does_not_fit(each, found.cluster.memory)))
    half = max(1, most // 2)
    return lost[: max(half, most - len(full))] + full[: max(half, most - len(lost))]


def slower(each: Predicted, winner: Predicted) -> str:
    """Why a layout is slower than the winner: the parts that grew most."""
    mine, best = each.seconds.parts(), winner.seconds.parts()
    grew = sorted(((mine.get(part, 0.0) - best.get(part, 0.0), part) for part in {*mine, *best}), reverse=True)
    total = each.seconds.total - winner.seconds.total
    parts = [f"{part} {duration(more)} more" for more, part in grew if more > 0.1 * abs(total)][:2]
    return f"{each.seconds.total / winner.seconds.total:.2f} x: {', '.join(parts) or 'no part stands out'}"


def does_not_fit(each: Predicted, room: float) -> str:
    """Why a layout does not fit: the largest part of its memory."""
    part = max((name for name in each.memory if name != PEAK), key=lambda name: each.memory[name])
    return (
        f"does not fit: {format_bytes(each.peak)} of {format_bytes(room)}; the most is {part},"
        f" {format_bytes(each.memory[part])}"
    )


def duration(seconds: float) -> str:
    """Seconds in three digits, in ms below one."""
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{1e3 * seconds:.3g} ms"


def turns(config: Config, found: Search, tie: Tie, known: Known) -> list[Turn]:
    """What would have to be true for a layout outside of the tie class to win: links, memory, batch."""
    inside = {each.layout for each in tie.members}
    among = [each.layout for each in (*found.fitting, *found.tight)]
    turned = list[Turn]()
    for changes in _clusters(found.cluster):
        for what, cluster in changes:
            winner = _winner(config, cluster, among, known)
            if winner is not None and winner.layout not in inside:
                turned.append(Turn(what, winner))
                break  # a smaller change is enough
    for factor in (2, 4):
        larger = changed(config, {"data.global_batch": factor * config.data.global_batch})
        winner = _winner(larger, found.cluster, _for_more_rows(among, inside, factor), known)
        if winner is not None and winner.layout not in inside | {_parts(each, factor) for each in inside}:
            turned.append(Turn(f"a batch {factor} x as large ({larger.data.global_batch:,})", winner))
            break
    return turned


def _parts(layout: Layout, times: int, changes: Mapping[str, Any] = MappingProxyType({})) -> Layout:
    """The layout with so many times the microbatches, and with other values of keys."""
    values = layout.values
    values[_PARTS] *= times
    return Layout(tuple({**values, **changes}.items()))


def _for_more_rows(among: Sequence[Layout], inside: Iterable[Layout], factor: int) -> list[Layout]:
    """What may win with a larger batch: all layouts, also in more microbatches; those that win now with less memory."""
    ways = [
        {"memory.remat": remat, "memory.offload.optimizer": offload}
        for remat, offload in itertools.product(REMATS, (False, True))
    ]
    found = [_parts(each, times) for each in among for times in (1, factor)]
    found += [_parts(each, times, way) for each in inside for times in (1, factor) for way in ways]
    return list(dict.fromkeys(found))


def _winner(config: Config, cluster: PlanCluster, among: Iterable[Layout], known: Known) -> Predicted | None:
    found = search(config, cluster, known, among=among)
    return tie_of(found.fitting, cluster.spread).winner if found.fitting else None


def _clusters(cluster: PlanCluster) -> Iterator[list[tuple[str, PlanCluster]]]:
    """Lists of changes of one thing, the small changes first: (in words, the changed cluster)."""
    far, near = cluster.between, cluster.inside
    if cluster.hosts > 1:
        rate = 8e-9 * far.bytes_per_s
        yield [
            (
                f"a link between hosts {factor} x as fast ({factor * rate:.4g} Gbit/s)",
                cluster._replace(between=far._replace(bytes_per_s=factor * far.bytes_per_s)),
            )
            for factor in FACTORS
        ]
        yield [
            (
                f"a link between hosts 1/{factor} as fast ({rate / factor:.4g} Gbit/s)",
                cluster._replace(between=far._replace(bytes_per_s=far.bytes_per_s / factor)),
            )
            for factor in FACTORS
        ]
    if cluster.per_host > 1:
        yield [
            (
                f"links inside a host 1/{factor} as fast ({near.bytes_per_s / factor / 1e9:.4g} GB/s)",
                cluster._replace(inside=near._replace(bytes_per_s=near.bytes_per_s / factor)),
            )
            for factor in FACTORS
        ]
    if cluster.memory < math.inf:
        twice = f"memory 2 x as large ({format_bytes(2 * cluster.memory)} usable)"
        yield [(twice, cluster._replace(memory=2 * cluster.memory))]
