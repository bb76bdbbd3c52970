"""Picture of a pipeline's timeline: a row a stage, time to the right, a bar for each piece of work."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from jaxdist.parallel.pipeline.table import Ticks
from jaxdist.plan.report.draw_rounds import INK, LINE, MUTED, STYLE, svg_text
from jaxdist.plan.report.timeline import EQUAL, Timeline, simulate

_COLOURS = {  # of the first chunk, and of the last
    "F": ("#2f6fb5", "#b9d6f2"),
    "B": ("#c2570c", "#f8cfa9"),
    "W": ("#3a8a4d", "#bfe3c6"),
}
_WAITS: Any = {"facecolor": "#f1f3f5", "edgecolor": "#d3d9df", "hatch": "////", "lw": 0}
_BAR = 0.8  # height of a bar; rows are 1 apart


def draw_timeline(ticks: Ticks, path: Path, *, name: str, blocks: Sequence[int] = ()) -> None:
    """Draw a table as PNG or SVG, by the ending of `path`.

    Each bar has the number of its microbatch. Later chunks are paler, and a stage that waits is hatched. An SVG holds
    the table as data too, see `draw_rounds.data_of`.

    name: of the schedule, for the title
    blocks: see `simulate`
    """
    line = simulate(ticks, blocks=blocks)
    shortest = min(work.end - work.start for work in line.work if work.end > work.start)
    inches = float(np.clip(0.24 / shortest * line.total, 6.0, 22.0))  # of a row
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(inches + 1.6, 0.42 * ticks.stages + 1.7), layout="constrained")
        axes = figure.add_subplot(xlim=(0, line.total), ylim=(ticks.stages - 0.5, -0.6))
        title = _title(line, ticks, name, blocks)
        axes.set_title(title, loc="left", fontsize=11)
        _draw_rows(axes, line, ticks, inches / line.total)
        _draw_work(axes, line, ticks, inches / line.total)
        _draw_legend(axes, ticks)
        figure.supxlabel(_note(ticks, mean=bool(blocks)), x=0.01, ha="left", fontsize=8, color=MUTED)
        if path.suffix == ".svg":
            path.write_text(svg_text(figure, title=title, data=table_data(ticks, name)), encoding="utf-8")
        else:
            figure.savefig(path, dpi=160)


def table_data(ticks: Ticks, name: str) -> dict[str, Any]:
    """The data in an SVG of a table: the schedule's name, and the fields of `Ticks` as numbers and lists."""
    return {"schedule": name, **{key: np.asarray(value).tolist() for key, value in ticks._asdict().items()}}


def _title(line: Timeline, ticks: Ticks, name: str, blocks: Sequence[int]) -> str:
    stages = f"{ticks.stages} ({' + '.join(map(str, blocks))} blocks)" if blocks else ticks.stages
    chunks = f", chunks {ticks.chunks}" if ticks.chunks > 1 else ""
    return f"{name}: stages {stages}, microbatches {ticks.microbatches}{chunks}; bubble {line.bubble:.1%}"


def _draw_rows(axes: Axes, line: Timeline, ticks: Ticks, scale: float) -> None:
    """Draw what is under the bars: hatched rows with their names, what each keeps, and the ticks with their numbers.

    scale: inches a unit of time
    """
    stages = range(ticks.stages)
    axes.barh(stages, line.total, _BAR, **_WAITS)
    axes.vlines([*line.starts, line.total], -0.5, ticks.stages - 0.5, color=LINE, lw=0.6, zorder=1.5)
    axes.set_yticks(stages, [f"stage {stage}" for stage in stages])
    kept = axes.secondary_yaxis("right")
    kept.set_yticks(stages, [str(most) for most in line.most_live])
    kept.set_ylabel("kept at most", fontsize=8, color=MUTED)
    numbered: dict[float, str] = {}  # ticks by their middle; of short ones those whose numbers have room
    for tick, middle in enumerate(line.starts + line.lengths / 2):
        if not numbered or (middle - max(numbered)) * scale > 0.18:
            numbered[middle] = str(tick)
    axes.xaxis.tick_top()
    axes.set_xticks(list(numbered), list(numbered.values()), fontsize=8, color=MUTED)
    axes.set_xlabel("tick", loc="left", fontsize=8, color=MUTED)
    axes.xaxis.set_label_position("top")


def _draw_work(axes: Axes, line: Timeline, ticks: Ticks, scale: float) -> None:
    """Draw a bar for each piece of work, with its number where that can be read. scale: inches a unit of time."""
    digits = len(str(ticks.microbatches - 1))
    for work in line.work:
        colour, time = _colour(work.kind, work.chunk, ticks.chunks), work.end - work.start
        axes.barh(work.stage, time, _BAR, left=work.start, color=colour, edgecolor="white", lw=0.6, zorder=2)
        points = min(8.5, 72 * time * scale / (0.68 * digits + 0.15))
        if points >= 4:
            red, green, blue = to_rgb(colour)
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.6  # the luma of ITU-R BT.601
            style: Any = {"ha": "center", "va": "center_baseline", "fontsize": points, "zorder": 3}
            middle = work.start + time / 2
            axes.text(middle, work.stage, str(work.microbatch), color="white" if dark else INK, **style)


@functools.cache
def _colour(kind: str, chunk: int, chunks: int) -> str:
    """The colour of a piece of work: dark for the first chunk, light for the last, between the two for a single one."""
    shades = LinearSegmentedColormap.from_list(kind, _COLOURS[kind])
    return to_hex(shades(chunk / (chunks - 1) if chunks > 1 else 0.3))


def _draw_legend(axes: Axes, ticks: Ticks) -> None:
    names = {"F": "forward", "B": "backward"}
    if ticks.weights.shape[2]:
        names |= {"B": "gradient of the input", "W": "gradient of the parameters"}
    shades = [[_colour(kind, chunk, ticks.chunks) for chunk in range(ticks.chunks)] for kind in names]
    handles = [tuple(Patch(facecolor=shade, edgecolor="white", lw=0.6) for shade in each) for each in shades]
    axes.legend(
        [*handles, Patch(**_WAITS)],
        [*names.values(), "waits"],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="upper left",
        bbox_to_anchor=(0, 0),
        ncols=4,
        frameon=False,
    )


def _note(ticks: Ticks, *, mean: bool) -> str:
    """The lines under a picture. mean: whether stages differ: times are then of one with the mean number of blocks."""
    kept, paler = "microbatches", ""
    if ticks.chunks > 1:
        kept, paler = "chunks of microbatches", " Paler: later chunks."
    joint = EQUAL.backward + EQUAL.weights
    backward = f"B {EQUAL.backward:g}, W {EQUAL.weights:g}" if ticks.weights.shape[2] else f"B {joint:g}"
    stage = "an average stage" if mean else "a stage"
    return (
        f"Numbers: microbatches.{paler} Time of one on {stage}: F {EQUAL.forward:g}, {backward}.\n"
        f"Kept: {kept} whose forward has been done and whose last gradient has not."
    )
