"""Which rank is to blame when a job ends: pure functions of the messages that the watching threads have received."""

import functools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jaxdist.runtime.rank_names import name_ranks
from jaxdist.runtime.watch.progress import LIMITS, OWN_WORK, SAVING, Breadcrumbs, Pace

LEAST_LIMIT_S, MEDIAN_STEPS = 60.0, 10.0  # the limit where none is set: the longer of these, in seconds and in steps
LONGEST = 3.0  # a phase may take so many times what it has taken before, whatever its limit
SLOW_RATIO, SLOW_SHARE = 2.0, 1 / 3  # see `slow`
MOST_SHOWN = 6  # ranks described one by one
SYMPTOMS = ("gloo", "nccl", "connection", "coordination service", "deadline_exceeded", "unavailable", "preempt")

_named = functools.partial(name_ranks, most=2 * MOST_SHOWN)


class Beat(NamedTuple):
    """The last report of a rank about its main thread.

    - age: seconds in that phase. The other fields: see `Crumb`.
    - saved, saving, saving_age: where that waits for a save, the `SavePhase`.
    """

    order: int
    step: int
    phase: str
    age: float
    longest: float = 0.0
    saved: int = 0
    saving: str = ""
    saving_age: float = 0.0

    @property
    def place(self) -> str:
        """Such as "in data of step 7"."""
        return f"in {self.phase}" + (f" of step {self.step}" if self.step else "")

    @property
    def in_save(self) -> bool:
        """Whether a save is all that the main thread does, or waits for."""
        return self.phase.removeprefix("first ") in ("settle", "save")

    def __str__(self) -> str:
        save = f" (the save: {self.saving} for {self.saving_age:.1f} s)" if self.saving else ""
        return f"{self.place} for {self.age:.1f} s{save}"

    def older(self, seconds: float) -> "Beat":
        """The same report, these seconds later."""
        return self._replace(age=self.age + seconds, saving_age=self.saving_age + seconds)


class Failure(NamedTuple):
    """An exception that ends a rank."""

    text: str  # its type and first line
    status: int  # the exit status of the rank
    symptom: bool  # whether the loss of another rank may be its cause
    at: float  # when this process heard of it


class Blame(NamedTuple):
    """The verdict on a job that ends."""

    kind: str  # "gone", "silent", "stuck" or "failed"
    ranks: tuple[int, ...]  # the ranks to blame
    text: str  # the verdict as one line
    status: int  # the exit status of the other ranks


def beat_of(crumbs: Breadcrumbs, now: float) -> Beat:
    """The report of a rank about the phase of its main thread, to be sent. now: may be a moment ago."""
    crumb, save = crumbs.last, crumbs.saving
    beat = Beat(crumb.order, crumb.step, crumb.phase, max(0.0, now - crumb.since), crumb.longest)
    if crumb.phase.removeprefix("first ") not in SAVING or not save.phase:
        return beat
    return beat._replace(saved=save.order, saving=save.phase, saving_age=max(0.0, now - save.since))


def limit_of(set_s: float | None, median_step: float) -> float:
    """Seconds without progress after which a rank is stuck. set_s: `train.watchdog_s`, None where it is not set."""
    if set_s is None:
        return max(LEAST_LIMIT_S, MEDIAN_STEPS * median_step)
    return set_s or math.inf  # 0 switches the watchdog off


def is_symptom(error: BaseException) -> bool:
    """Whether the loss of another rank may be the cause of an exception: collectives and JAX's service raise such."""
    runtime = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError", "ValueError")
    return runtime and any(word in str(error).lower() for word in SYMPTOMS)


def behind(beats: Mapping[int, Beat], limit: float) -> tuple[int, ...]:
    """The ranks with the least progress, if each of them is past its limit; else none. Of ranks that are all in a save,
    or wait for it, those count whose own part of the save is behind."""
    least = min(beat.order for beat in beats.values())
    last = {rank: beat for rank, beat in beats.items() if beat.order == least}
    if all(beat.in_save for beat in last.values()):
        lowest = min(beat.saved for beat in last.values())
        last = {rank: beat for rank, beat in last.items() if beat.saved == lowest}
    may = {rank: max(limit * LIMITS.get(beat.phase, math.inf), LONGEST * beat.longest) for rank, beat in last.items()}
    over = all(beat.age > may[rank] for rank, beat in last.items())
    return tuple(sorted(last)) if over else ()


def _others(beats: Mapping[int, Beat], but: Collection[int]) -> str:
    """The phases of the other ranks, for the end of a line."""
    rest = [rank for rank in sorted(beats) if rank not in but]
    parts = [f"; rank {rank} {beats[rank]}" for rank in rest[:MOST_SHOWN]]
    return "".join(parts) + (f"; and {len(rest) - MOST_SHOWN} more" if len(rest) > MOST_SHOWN else "")


def stuck(beats: Mapping[int, Beat], ranks: tuple[int, ...], why: str = "") -> Blame:
    """The blame of ranks that do not make progress."""
    if len(ranks) == len(beats) > 1:
        first = beats[ranks[0]]
        what = "the storage, a collective or the devices" if first.in_save else "a collective or the devices"
        text = f"stuck: no rank is behind the others, {what} hang; all {first}"
    else:
        text = f"stuck: {_named(ranks)} {beats[ranks[0]]}{_others(beats, ranks)}"
    return Blame("stuck", ranks, text + why, 75)


def quiet(beats: Mapping[int, Beat], seconds: float) -> str:
    """A line about where the ranks are while nothing moves, those behind first. It blames nobody."""
    groups: dict[tuple[int, int, str, str], list[int]] = {}
    for rank in sorted(beats):
        beat = beats[rank]
        groups.setdefault((beat.order, beat.saved, beat.place, beat.saving), []).append(rank)
    parts = [(_named(groups[key]) + " ") * (len(beats) > 1) + str(beats[groups[key][0]]) for key in sorted(groups)]
    more = f"; and {len(parts) - MOST_SHOWN} more" if len(parts) > MOST_SHOWN else ""
    return f"no step for {seconds:.0f} s: {'; '.join(parts[:MOST_SHOWN])}{more}"


def silent(beats: Mapping[int, Beat], rank: int, seconds: float) -> Blame:
    """The blame of a rank whose process says nothing, though its connection is there."""
    last = f", last {beats[rank]}" if rank in beats else ""
    text = f"silent: rank {rank} has said nothing for {seconds:.1f} s{last}; stopped, or its machine or network is"
    return Blame("silent", (rank,), text + _others(beats, (rank,)), 75)


def gone(beats: Mapping[int, Beat], ranks: Sequence[int]) -> Blame:
    """The blame of ranks whose connections have ended, in this order: the first rank is the cause."""
    first = ranks[0]
    last = f", last {beats[first]}" if first in beats else ""
    then = f"; then {_named(ranks[1:])}" if ranks[1:] else ""
    return Blame("gone", (first,), f"gone: rank {first} was killed or has crashed{last}{then}", 75)


def failed(failures: Mapping[int, Failure]) -> Blame:
    """The blame of ranks that an exception ends. Symptoms count only where there is nothing else; the earliest is named
    first."""
    roots = {rank: each for rank, each in failures.items() if not each.symptom} or dict(failures)
    first = min(roots, key=lambda rank: roots[rank].at)
    same = [rank for rank, each in roots.items() if each.text == roots[first].text]
    rest = [rank for rank in sorted(roots) if rank not in same][:MOST_SHOWN]
    also = "".join(f"; rank {rank}: {roots[rank].text}" for rank in rest)
    status = 2 if roots[first].status == 2 else 75
    return Blame("failed", tuple(sorted(roots)), f"failed: {_named(same)}: {roots[first].text}{also}", status)


def slow(paces: Mapping[int, Pace]) -> str | None:
    """A line about the rank for which the others wait in each step, or None.

    All ranks of a job take equally long for a step, but only the slow rank does not wait in it. A rank's own work is
    its time in the phases `OWN_WORK`. A rank is slow if its own work is more than `SLOW_RATIO` times the median of the
    other ranks', and the difference is more than `SLOW_SHARE` of a step.
    """
    own = {rank: sum(pace.seconds[phase] for phase in OWN_WORK) for rank, pace in paces.items()}
    worst = max(own, key=lambda rank: own[rank])
    others = [seconds for rank, seconds in own.items() if rank != worst]
    usual, whole = statistics.median(others), sum(paces[worst].seconds.values())
    if own[worst] - usual <= SLOW_SHARE * whole or own[worst] < SLOW_RATIO * usual:
        return None
    most = max(OWN_WORK, key=lambda phase: paces[worst].seconds[phase])
    share = (own[worst] - usual) / whole
    return (
        f"slow: rank {worst}, {own[worst] / max(usual, 1e-9):,.1f} times the own work of the others, most of it in"
        f" {most}; they wait for it {share:.0%} of the time (steps up to {paces[worst].step})"
    )


def difference(facts: Mapping[int, Mapping[str, Any]]) -> str | None:
    """A line about the first field of the facts in which the ranks differ, or None. The most frequent value is taken
    for the right one, that of the lowest rank among equally frequent ones."""
    fields = {field: None for rank in sorted(facts) for field in facts[rank]}
    found = []
    for field in fields:
        groups: dict[str, list[int]] = {}
        for rank in sorted(facts):
            groups.setdefault(str(facts[rank].get(field, "nothing")), []).append(rank)
        if len(groups) > 1:
            right = max(groups, key=lambda value: len(groups[value]))
            odd = [f"{value} on {_named(ranks)}" for value, ranks in groups.items() if value != right]
            found.append(f"{field}: {'; '.join(odd[:MOST_SHOWN])}, but {right} on {_named(groups[right])}")
    if not found:
        return None
    more = f" (and {len(found) - 1} more that differ)" if found[1:] else ""
    return f"{found[0]}{more}; allowed: the same on every rank"
