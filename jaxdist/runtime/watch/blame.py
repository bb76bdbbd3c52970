"""Who is to blame, from what the ranks of a job have said: pure functions of what the watching threads know."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jaxdist.runtime.watch.progress import LIMITS, OWN, Crumb, Pace

LEAST_LIMIT_S, MEDIAN_STEPS = 60.0, 10.0  # the limit, where none is set
LONGEST = 3.0  # times what a phase has taken before: it may take that, whatever its limit
SLOW_RATIO, SLOW_SHARE = 2.0, 1 / 3  # of a rank's own work to the others', and of a step's time, to be called slow
SHOWN = 6  # ranks described one by one
SYMPTOMS = ("gloo", "nccl", "connection", "coordination service", "deadline_exceeded", "unavailable", "preempt")


class Beat(NamedTuple):
    """What a rank said last of its main thread. age: seconds in that phase. The others: as in `Crumb`."""

    order: int
    step: int
    phase: str
    age: float
    longest: float = 0.0

    def __str__(self) -> str:
        step = f" of step {self.step}" if self.step else ""
        return f"in {self.phase}{step} for {self.age:.1f} s"


class Failure(NamedTuple):
    """An exception that ends a rank. text: type and first line. status: what it exits with. symptom: whether it may
    come of another rank's loss. at: when it was heard of."""

    text: str
    status: int
    symptom: bool
    at: float


class Verdict(NamedTuple):
    """Why the job ends. kind: "gone", "silent", "stuck" or "failed". ranks: those to blame. text: one line. status:
    what the other ranks exit with."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    status: int


def beat_of(crumb: Crumb, now: float) -> Beat:
    """The beat to send."""
    return Beat(crumb.order, crumb.step, crumb.phase, now - crumb.since, crumb.longest)


def limit_of(set_s: float | None, median_step: float) -> float:
    """Seconds without progress after which a rank is stuck. set_s: `train.watchdog_s`."""
    if set_s is None:
        return max(LEAST_LIMIT_S, MEDIAN_STEPS * median_step)
    return set_s or math.inf


def is_symptom(error: BaseException) -> bool:
    """Whether an exception may only say that another rank is lost, as those of collectives do."""
    runtime = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError", "ValueError")
    return runtime and any(word in str(error).lower() for word in SYMPTOMS)


def behind(beats: Mapping[int, Beat], limit: float) -> tuple[int, ...]:
    """The ranks that have made least progress, if each of them is past its limit, else none."""
    least = min(beat.order for beat in beats.values())
    last = {rank: beat for rank, beat in beats.items() if beat.order == least}
    may = {rank: max(limit * LIMITS.get(beat.phase, math.inf), LONGEST * beat.longest) for rank, beat in last.items()}
    over = all(beat.age > may[rank] for rank, beat in last.items())
    return tuple(sorted(last)) if over else ()


def named(ranks: Collection[int]) -> str:
    """ "rank 3", "ranks 0 and 2"."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) > 2 * SHOWN:
        return f"ranks {', '.join(names[:SHOWN])} and {len(names) - SHOWN} more"
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _others(beats: Mapping[int, Beat], but: Collection[int]) -> str:
    """What the other ranks are at, for the end of a line."""
    rest = [rank for rank in sorted(beats) if rank not in but]
    parts = [f"; rank {rank} {beats[rank]}" for rank in rest[:SHOWN]]
    return "".join(parts) + (f"; and {len(rest) - SHOWN} more" if len(rest) > SHOWN else "")


def stuck(beats: Mapping[int, Beat], ranks: tuple[int, ...], why: str = "") -> Verdict:
    """For ranks that do not get on."""
    if len(ranks) == len(beats) > 1:
        text = f"stuck: no rank is behind the others, a collective or the devices hang; all {beats[ranks[0]]}"
    else:
        text = f"stuck: {named(ranks)} {beats[ranks[0]]}{_others(beats, ranks)}"
    return Verdict("stuck", ranks, text + why, 75)


def silent(beats: Mapping[int, Beat], rank: int, seconds: float) -> Verdict:
    """For a rank whose process does not speak, though its connection is there."""
    last = f", last {beats[rank]}" if rank in beats else ""
    text = f"silent: rank {rank} has said nothing for {seconds:.1f} s{last}; stopped, or its machine or network is"
    return Verdict("silent", (rank,), text + _others(beats, (rank,)), 75)


def gone(beats: Mapping[int, Beat], ranks: Sequence[int]) -> Verdict:
    """For ranks whose connection ended, in that order: the first is to blame."""
    first = ranks[0]
    last = f", last {beats[first]}" if first in beats else ""
    then = f"; then {named(ranks[1:])}" if ranks[1:] else ""
    return Verdict("gone", (first,), f"gone: rank {first} was killed or has crashed{last}{then}", 75)


def failed(failures: Mapping[int, Failure]) -> Verdict:
    """For ranks that an exception ends: all that are no mere symptoms, the earliest first."""
    roots = {rank: each for rank, each in failures.items() if not each.symptom} or dict(failures)
    first = min(roots, key=lambda rank: roots[rank].at)
    same = [rank for rank, each in roots.items() if each.text == roots[first].text]
    rest = [rank for rank in sorted(roots) if rank not in same][:SHOWN]
    also = "".join(f"; rank {rank}: {roots[rank].text}" for rank in rest)
    status = 2 if roots[first].status == 2 else 75
    return Verdict("failed", tuple(sorted(roots)), f"failed: {named(same)}: {roots[first].text}{also}", status)


def slow(paces: Mapping[int, Pace]) -> str | None:
    """A line about the rank that the others wait for in each step, or None.

    A rank's own work is its time in `OWN`. In a job in step with itself all ranks take equally long; the slow one is
    that which does not wait. It must do more than `SLOW_RATIO` times the work of the middle one of the others, and more
    by `SLOW_SHARE` of a step.
    """
    own = {rank: sum(pace.seconds[phase] for phase in OWN) for rank, pace in paces.items()}
    worst = max(own, key=lambda rank: own[rank])
    others = [seconds for rank, seconds in own.items() if rank != worst]
    usual, whole = statistics.median(others), sum(paces[worst].seconds.values())
    if own[worst] - usual < SLOW_SHARE * whole or own[worst] < SLOW_RATIO * usual:
        return None
    most = max(OWN, key=lambda phase: paces[worst].seconds[phase])
    share = (own[worst] - usual) / whole
    return (
        f"slow: rank {worst}, {own[worst] / max(usual, 1e-9):,.1f} times the own work of the others, most of it in"
        f" {most}; they wait for it {share:.0%} of the time (steps up to {paces[worst].step})"
    )


def refused(facts: Mapping[int, Mapping[str, Any]]) -> str | None:
    """A line about the first field in which the ranks differ, or None. The most frequent value is taken for the right
    one, that of the lowest rank among equals."""
    fields = {field: None for rank in sorted(facts) for field in facts[rank]}
    found = []
    for field in fields:
        groups: dict[str, list[int]] = {}
        for rank in sorted(facts):
            groups.setdefault(str(facts[rank].get(field, "nothing")), []).append(rank)
        if len(groups) > 1:
            right = max(groups, key=lambda value: len(groups[value]))
            odd = [f"{value} on {named(ranks)}" for value, ranks in groups.items() if value != right]
            found.append(f"{field}: {'; '.join(odd[:SHOWN])}, but {right} on {named(groups[right])}")
    if not found:
        return None
    more = f" (and {len(found) - 1} more that differ)" if found[1:] else ""
    return f"{found[0]}{more}; allowed: the same on every rank"
