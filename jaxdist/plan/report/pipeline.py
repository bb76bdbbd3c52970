"""Reports of a configuration's pipeline before it runs: its table, in words and as a picture."""

from collections.abc import Sequence
from pathlib import Path

from jaxdist import registry
from jaxdist.config.rules.pipeline import uneven
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.parallel.pipeline.table import SCHEDULES, Ticks, allocate_slots, table_of
from jaxdist.plan.report.timeline import simulate, table_text

TERMINAL_TICKS = 40  # ticks: more do not fit beside each other on a terminal


def configured_ticks(config: Config) -> Ticks:
    """The table of a configuration's schedule, with a stage for each coordinate of the mesh axis pipe.

    Raises `UserError` if the schedule has no table, or none for these counts.
    """
    parallel, stages = config.parallel, config.mesh.pipe
    table = table_of(parallel.schedule)
    if table is None:
        known = ", ".join(name for name in registry.names(SCHEDULES) if table_of(name) is not None)
        raise UserError(
            f"parallel.schedule: {parallel.schedule!r} is no pipeline and has no timeline; these have one: {known}"
        )
    if stages < 2:
        raise UserError(
            f"mesh.pipe: {stages} is one stage, whose timeline shows nothing; give it 2 or more, with"
            f" parallel.schedule {parallel.schedule}"
        )
    return table(stages, parallel.microbatches, parallel.chunks)


def described(ticks: Ticks, *, name: str, blocks: Sequence[int] = ()) -> str:
    """A table in a few lines: ticks, bubble, what is kept, what is sent; drawn as text too, if it is narrow.

    name: of the schedule
    blocks: see `simulate`
    """
    line, split, done = simulate(ticks, blocks=blocks), ticks.weights.shape[2] > 0, ticks.microbatches * ticks.chunks
    chunks, kept, times = "", "microbatches", "once"
    if ticks.chunks > 1:
        chunks, kept, times = f", {ticks.chunks} chunks a stage", "chunks of microbatches", f"{ticks.chunks} times"
    speed, costs = "all stages are equally fast", "whatever F and B cost"
    if blocks:
        speed, costs = f"a stage takes the time of its blocks, {', '.join(map(str, blocks))}", "and B costs two F"
    costs = "and F, B and W cost the same" if split else costs
    most, first, last = int(line.most_live.max()), line.most_live[0], line.most_live[-1]
    late = f"; and what up to {allocate_slots(ticks).cotangents.size} B leave for W" if split else ""
    text = [
        f"Timeline of {name}: {ticks.stages} stages, {ticks.microbatches} microbatches{chunks}",
        f"{ticks.length} ticks; a stage runs F in {done} of them and B in {done}",
        f"bubble {100 * line.bubble:.1f} %, if {speed}, {costs}",
        f"a stage keeps up to {most} {kept}, the first {first}, the last {last}{late}",
        f"a microbatch crosses each boundary {times} forward and {times} back: {done} of the {ticks.length} sends each"
        " way, one a tick; the others carry nothing",
    ]
    return "\n".join([*text, *(["", table_text(ticks)] if ticks.length <= TERMINAL_TICKS else [])])


def show_pipeline(config: Config, ticks: Ticks, path: Path) -> str:
    """Draw the table of a configuration to `path`, PNG or SVG, and return it in words (see `described`)."""
    from jaxdist.plan.report.draw_timeline import draw_timeline  # matplotlib, which only pictures need

    name, blocks = config.parallel.schedule, uneven(config.parallel.stages)
    draw_timeline(ticks, path, name=name, blocks=blocks)
    return described(ticks, name=name, blocks=blocks)
