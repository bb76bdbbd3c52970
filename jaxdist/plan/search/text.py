"""A plan as text for a terminal."""

from collections.abc import Sequence

from jaxdist.config.schema import Config
from jaxdist.plan.closed.memory.peak import PEAK
from jaxdist.plan.search.choose import Predicted
from jaxdist.plan.search.reasons import duration
from jaxdist.plan.search.result import LayoutPlan
from jaxdist.plan.search.space import layout_of
from jaxdist.plan.traced.sharding import aligned
from jaxdist.specs import format_bytes

SHOWN_TIES = 6


def search_text(plan: LayoutPlan) -> str:
    """The plan: the choice with its seconds and memory by part, ties, others with reasons, what would turn it."""
    found, best, tie = plan.search, plan.winner, plan.tie
    lines = [
        f"Plan for {plan.cluster.described()}",
        f"rates: {plan.basis}",
        f"{found.considered:,} layouts in {found.took:.1f} s: {len(found.fitting):,} of the kept ones fit,"
        f" {sum(found.refused.values()):,} are not allowed",
        "",
        f"Choice: {best.layout.name()}: {duration(best.seconds.total)} a step",
        f"  {' '.join(_changes(best, plan.config))}",
        "",
        *_parts(best),
        "",
        *_memory(best, plan),
        "",
        *_ties(tie.members, plan),
    ]
    if plan.asked is not None:
        each = plan.asked.candidate
        lines += ["", f"Asked: {each.layout.name()}: {duration(each.seconds.total)} a step, {plan.asked.why}"]
        lines += _parts(each)
    if plan.others:
        lines += ["", "Why the nearest others lost, beside the choice:"]
        rows = [(each.candidate.layout.name(), _time(each.candidate), each.why) for each in plan.others]
        lines += [f"  {line}" for line in aligned(rows, right=(1,))]
    if plan.turns:
        lines += ["", "What would have to be true for another layout to win:"]
        lines += [f"  {each.what}: {each.winner.layout.name()}, {_time(each.winner)} a step" for each in plan.turns]
    else:
        lines += ["", "No link, memory or batch of up to 64, 2 or 4 times makes another layout win"]
    if found.refused:
        lines += ["", "Not allowed:"]
        counted = [
            (f"{count:,} x", f"{key}, as {found.examples[key].name()}") for key, count in found.refused.most_common(5)
        ]
        lines += [f"  {line}" for line in aligned(counted, right=(0,))]
    return "\n".join([*lines, *(["", *(f"Note: {each}" for each in plan.notes)] if plan.notes else [])])


def _changes(each: Predicted, config: Config) -> list[str]:
    """The overrides of a layout that change the configuration that was planned."""
    now = set(layout_of(config).arguments())
    return [each for each in each.layout.arguments() if each not in now]


def _time(each: Predicted) -> str:
    return duration(each.seconds.total)


def _parts(each: Predicted) -> list[str]:
    total = each.seconds.total
    rows = [(name, duration(part), f"{part / total:.1%}") for name, part in each.seconds.parts().items()]
    return [f"  {line}" for line in aligned([*rows, ("a step", duration(total), "")], right=(1, 2))]


def _memory(each: Predicted, plan: LayoutPlan) -> list[str]:
    room = plan.cluster.memory
    rows = [(name, format_bytes(size)) for name, size in each.memory.items() if size and name != PEAK]
    left = f", of {format_bytes(room)} that a step may take" if room < float("inf") else ""
    said = {"closed form": "by the closed form", "traced": "estimated from the traced step", "compiled": "compiled"}
    rows.append((f"peak, {said[each.how]}", format_bytes(each.peak) + left))
    return ["Memory of a device, parts by the closed form:", *(f"  {line}" for line in aligned(rows))]


def _ties(members: Sequence[Predicted], plan: LayoutPlan) -> list[str]:
    spread = f"{plan.cluster.spread:.0%}"
    if len(members) == 1:
        return [f"No other layout is within {spread} of it."]
    rows = [
        (each.layout.name(), _time(each), format_bytes(each.peak), each.how) for each in members[1 : SHOWN_TIES + 1]
    ]
    more = [f"  ... and {len(members) - 1 - SHOWN_TIES} more"] if len(members) > SHOWN_TIES + 1 else []
    return [
        f"As fast: within {spread} of the fastest, {duration(plan.tie.fastest)}, which these predictions cannot tell"
        " apart; the choice is the simplest:",
        *(f"  {line}" for line in aligned(rows, right=(1, 2))),
        *more,
    ]
