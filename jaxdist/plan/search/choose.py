"""The choice of a layout: every candidate predicted in closed form, the best ones traced, the finalists compiled."""

import contextlib
import gc
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from jaxdist.build import planned_mesh
from jaxdist.config.entries import ScheduleFacts, is_shipped
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.model import ModelDef
from jaxdist.parallel.program import check_axes
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.closed.ledger import sends_of
from jaxdist.plan.closed.memory.at_rest import at_rest
from jaxdist.plan.closed.memory.peak import BOUNDS, PEAK, memory_of
from jaxdist.plan.closed.sent import Transfer, bytes_by_axes
from jaxdist.plan.search.cluster import PlanCluster
from jaxdist.plan.search.second_process import SecondProcess
from jaxdist.plan.search.seconds import Seconds, seconds_of
from jaxdist.plan.search.space import Layout, checked, kind_of_layout, layouts, with_prefetch

ROOM = 2.2  # candidates that need up to so many times the memory are predicted too: for "with twice the memory"
WORTH_A_PROCESS = 3000  # candidates from which on a second process is started, which takes seconds
MOST_OF_A_KIND = 12  # candidates that are kept with all figures, of those with the same axes and strategy


class Predicted(NamedTuple):
    """A layout with its figures.

    memory: {part: bytes of a device}, with the peak. how: "closed form", "traced" or "compiled".
    sent: bytes that a device sends in a step.
    """

    layout: Layout
    config: Config
    seconds: Seconds
    memory: dict[str, int]
    sent: float
    how: str = "closed form"

    @property
    def peak(self) -> int:
        """Bytes of a device."""
        return self.memory[PEAK]


class Search(NamedTuple):
    """All candidates of a plan, predicted.

    fitting: those that fit by the closed form, the fastest first. tight: those that need more, up to `ROOM` times.
    nearest: the one that needs least memory; what it needs may be more than said (`predicted`).
    refused: {reason: how many}, of those that are not allowed.
    examples: one layout for each reason.
    considered: how many there were. took: seconds.
    """

    cluster: PlanCluster
    fitting: list[Predicted]
    tight: list[Predicted]
    nearest: Predicted
    refused: Counter[str]
    examples: dict[str, Layout]
    considered: int
    took: float

    @property
    def near(self) -> list[Predicted]:
        """Those of `tight` that may fit, by the margin of the closed form: compiling them tells."""
        return [each for each in self.tight if BOUNDS[0] * each.peak <= self.cluster.memory]


def _families(config: Config, cluster: PlanCluster, known: Known) -> list[list[Layout]]:
    """The `layouts` that are tried on a cluster."""
    layers = known.model_in_order(config).layers  # options of a model of somebody else's may have no such key
    return [*layouts(config, cluster.devices, per_host=cluster.per_host, layers=layers, halves=bool(cluster.hidden))]


def search(
    config: Config,
    cluster: PlanCluster,
    known: Known | None = None,
    *,
    among: Iterable[Layout] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Search:
    """Predict the candidates of a configuration on a cluster.

    among: the candidates; None: all of `layouts`. Raises `UserError` where none is allowed.
    """
    known, began = known or Known(), time.perf_counter()
    fitting, tight = list[Predicted](), list[Predicted]()
    refused, examples, considered, nearest = Counter[str](), dict[str, Layout](), 0, None
    if among is None:
        families = _families(config, cluster, known)
        predictions = _of_families(config, cluster, known, families, progress)
    else:
        predictions = [_family(config, cluster, known, [each]) for each in among]
    for found in predictions:
        considered += found.considered
        fitting += found.fitting
        tight += found.tight
        for reason, layout in found.refused:
            refused[reason] += 1
            examples.setdefault(reason, layout)
        if found.nearest is not None and (nearest is None or found.nearest.peak < nearest.peak):
            nearest = found.nearest
    if nearest is None:
        reasons = "; ".join(refused) or "its parts divide into no mesh of that many devices"
        raise UserError(f"plan: no layout of {cluster.devices} devices is allowed: {reasons}")
    fitting, tight = _first_of_each_kind(by_seconds(fitting)), _first_of_each_kind(by_seconds(tight))
    return Search(cluster, fitting, tight, nearest, refused, examples, considered, took=time.perf_counter() - began)


class FamilyFigures(NamedTuple):
    """What was found of the members of a family of layouts (`layouts`).

    fitting, tight: as of `Search`. nearest: the one that needs least memory. refused: (reason, layout).
    """

    fitting: list[Predicted]
    tight: list[Predicted]
    nearest: Predicted | None
    refused: list[tuple[str, Layout]]
    considered: int


def _of_families(
    config: Config, cluster: PlanCluster, known: Known, families: list[list[Layout]], progress: Callable[[str], None]
) -> list[FamilyFigures]:
    """What is found of each family: half of it by a second process, if that is worth its start."""
    here, there = _halves(config, families)
    other = SecondProcess(predict_families, config, cluster, there) if there else None
    began, beside, done, fit = time.perf_counter(), sum(len(families[number]) for number in there), 0, 0
    told = f", {beside:,} others in a second process" if there else ""
    found = dict[int, FamilyFigures]()
    try:
        with _without_collection():
            for place, number in enumerate(here, start=1):
                found[number] = _family(config, cluster, known, families[number])
                done, fit = done + len(families[number]), fit + len(found[number].fitting)
                if place % 20 == 0:
                    progress(f"{done:,} layouts, {fit:,} fit so far{told}, {time.perf_counter() - began:.0f} s")
        if other is not None:
            others, traced = other.result()
            found |= zip(there, others, strict=True)
            known.learn(traced)
    finally:
        if other is not None:
            other.stop()
    return [found[number] for number in range(len(families))]


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """A context without garbage collection: traces make millions of objects that are kept, and a sixth of the time
    would go into looking at them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _halves(config: Config, families: list[list[Layout]]) -> tuple[list[int], list[int]]:
    """The numbers of the families that are predicted here, and in a second process.

    Families with the same axes of layers need the same traces, and stay together.
    """
    everything = [*range(len(families))]
    own = not is_shipped(config.model.name)  # a module that may lie anywhere
    if sum(map(len, families)) < WORTH_A_PROCESS or own or len(os.sched_getaffinity(0)) < 2:
        return everything, []
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, family in enumerate(families):
        values = family[0].values
        groups.setdefault(tuple(values[f"mesh.{axis}"] for axis in ("expert", "context", "tensor")), []).append(number)
    here, there = list[int](), list[int]()
    for group in sorted(groups.values(), key=len, reverse=True):
        (here if len(here) <= len(there) else there).extend(group)
    return here, there


def predict_families(
    config: Config, cluster: PlanCluster, numbers: list[int]
) -> tuple[list[FamilyFigures], dict[tuple[Any, ...], Any]]:
    """(what is found of each family, what was traced for it): the work of a second process.

    numbers: of the families, in the order of `layouts`.
    """
    known = Known()
    families = _families(config, cluster, known)
    with _without_collection():
        return [_family(config, cluster, known, families[number]) for number in numbers], known.traced()


def _sent(config: Config, known: Known) -> list[Transfer]:
    """What a device sends, in closed form; of `parallel.batch_split: 2` as without it, since to trace each candidate
    would take seconds. Halves send as much, but for a few gradients of norms; `seconds_of` counts their calls."""
    return list(sends_of(replace(config, parallel=replace(config.parallel, batch_split=1)), known))


def _family(config: Config, cluster: PlanCluster, known: Known, members: list[Layout]) -> FamilyFigures:
    """Predict the members of a family, but for those that take more time than another one that fits."""
    found = FamilyFigures([], [], None, [], len(members))
    seen, fit = dict[object, int](), list[tuple[int, int, int]]()  # modes of remat in their order; members that fit
    for layout in members:
        own = _savings(layout, seen)
        if any(_slower(own, other, in_turn=_in_turn(layout)) for other in fit):
            continue
        candidate = if_allowed(config, layout, cluster, known)
        if isinstance(candidate, str):
            found.refused.append((_kind(candidate), layout))
            continue
        if found.nearest is None or candidate.peak <= found.nearest.peak:  # the later member saves more
            found = found._replace(nearest=candidate)
        if candidate.peak > ROOM * cluster.memory:
            continue
        fits = candidate.peak <= cluster.memory
        (found.fitting if fits else found.tight).append(candidate)
        if fits and cluster.measured is None:  # where time follows FLOPs and bytes
            fit.append(own)
    return found


def if_allowed(config: Config, layout: Layout, cluster: PlanCluster, known: Known) -> Predicted | str:
    """The figures of a layout; or, where it is refused, by its keys or when its model is made, the reason."""
    allowed = checked(config, layout, gpu=cluster.gpu)
    if isinstance(allowed, str):
        return allowed
    try:
        check_axes(known.model(allowed), planned_mesh(allowed))
        return predicted(layout, allowed, cluster, known)
    except UserError as error:
        return str(error)


def _first_of_each_kind(candidates: Iterable[Predicted]) -> list[Predicted]:
    """Without what comes after `MOST_OF_A_KIND` others of its kind."""
    counts, kept = Counter[tuple[object, ...]](), list[Predicted]()
    for each in candidates:
        counts[kind := kind_of_layout(each.layout)] += 1
        kept += [each] if counts[kind] <= MOST_OF_A_KIND else []
    return kept


def predicted(layout: Layout, config: Config, cluster: PlanCluster, known: Known) -> Predicted:
    """The figures of a layout. One that needs more than `ROOM` times the memory has no seconds, and its memory may be
    that of state and gradients alone."""
    memory = memory_of(config, known, most=ROOM * cluster.memory)
    if memory[PEAK] > ROOM * cluster.memory:
        return Predicted(layout, config, Seconds(math.inf, 0.0, {}, 0.0, 0.0), memory, math.inf)
    sent = _sent(config, known)
    seconds = seconds_of(config, cluster, sent, memory, known)
    return Predicted(layout, config, seconds, memory, sum(bytes_by_axes(sent).values()))


def step_seconds(config: Config, cluster: PlanCluster, known: Known) -> float | None:
    """Predicted seconds of a step of a configuration as it is, whatever memory it needs; None where none can be."""
    if unplannable(config, known) is not None:
        return None
    config = with_prefetch(config, gpu=cluster.gpu)
    return seconds_of(config, cluster, _sent(config, known), at_rest(config, known).state, known).total


def unplannable(config: Config, known: Known) -> str | None:
    """Why a step cannot be predicted: its parts are not known without tracing it. None: it can."""
    if not isinstance(known.model(config), ModelDef):
        return (
            f"model.name {config.model.name!r} is a loss, one unit whose work is not known by blocks; allowed: a"
            " model with blocks, such as gpt; or compare layouts with jaxdist bench and jaxdist explain --remedies"
        )
    for key, on in (("distill.teacher", config.distill.on), ("parallel.local.every", config.parallel.local.on)):
        if on:
            return f"{key} is set, and its part of a step is not predicted; plan without it"
    return None


def _savings(layout: Layout, seen: dict[object, int]) -> tuple[int, int, int]:
    """What a member of a family does to save memory: (offloads, the number of its mode of remat, microbatches)."""
    values = layout.values
    mode = seen.setdefault(values["memory.remat"], len(seen))
    return int(values["memory.offload.optimizer"]), mode, values["parallel.microbatches"]


def _slower(own: tuple[int, int, int], other: tuple[int, int, int], *, in_turn: bool) -> bool:
    """Whether a member takes more time than another one that fits: it saves as much or more in each way. But more
    microbatches of a pipeline (in_turn false) also make its bubble shorter. Fewer gather less, though more is computed
    again: neither is slower then."""
    return all(b <= a for a, b in zip(own, other, strict=True)) and (in_turn or own[:2] != other[:2])


def _in_turn(layout: Layout) -> bool:
    """Whether its microbatches follow each other, and no stage waits for them."""
    return bool(ScheduleFacts.of(layout.values["parallel.schedule"]).one_stage)


def _kind(reason: str) -> str:
    """A reason without the numbers that differ between candidates: its key."""
    return reason.partition(":")[0]


def by_seconds(candidates: Iterable[Predicted]) -> list[Predicted]:
    """The candidates, the fastest first."""
    return sorted(candidates, key=lambda each: each.seconds.total)


class Tie(NamedTuple):
    """The layouts that no prediction can tell from the fastest one, the simplest first."""

    members: list[Predicted]
    fastest: float

    @property
    def winner(self) -> Predicted:
        """The simplest."""
        return self.members[0]


def tie_of(candidates: list[Predicted], spread: float) -> Tie:
    """The tie class of candidates, which are sorted by seconds. spread: relative."""
    fastest = candidates[0].seconds.total
    members = [each for each in candidates if each.seconds.total <= (1 + spread) * fastest]
    members.sort(key=lambda each: (each.layout.simplicity(), each.seconds.total))
    return Tie(members, fastest)
