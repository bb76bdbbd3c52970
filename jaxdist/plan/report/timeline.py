"""Timeline of a pipeline's table: its length, its bubble, and what each stage keeps; as text and as a picture.

All stages start a tick together, so that it takes as long as the stage with most work in it. The bubble is the share of
the time in which a stage waits, the mean over stages.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxdist.parallel.pipeline.table import Ticks, moments

if TYPE_CHECKING:  # matplotlib is loaded by who draws
    from matplotlib.axes import Axes

WORK_KINDS = ("F", "B", "W")  # forward, backward, gradients of parameters; also the order within a tick
_INK, _MUTED, _LINE = "#1b1f24", "#5c6670", "#c3cad1"
_DARK = {"F": "#2f6fb5", "B": "#c2570c", "W": "#3a8a4d"}
_LIGHT = {"F": "#b9d6f2", "B": "#f8cfa9", "W": "#bfe3c6"}
_IDLE, _HATCH = "#f1f3f5", "#d3d9df"
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": _INK,
    "text.parse_math": False,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "path",
    "svg.hashsalt": "jaxdist",
}
_ROW, _BAR = 0.42, 0.34  # inches: from row to row, of a bar
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.75, 0.9, 0.8, 0.88  # inches around the bars


class WorkCosts(NamedTuple):
    """Times of one microbatch on a whole stage, in any unit; a chunk takes its part of them.

    backward: of the gradient of the input
    weights: of the gradients of the parameters; added to `backward` in tables that do not split the two
    """

    forward: float = 1.0
    backward: float = 1.0
    weights: float = 1.0


EQUAL = WorkCosts()


class TimedWork(NamedTuple):
    """A piece of work and its time, in the unit of `WorkCosts`. kind: one of `WORK_KINDS`."""

    kind: str
    stage: int
    tick: int
    microbatch: int
    chunk: int
    start: float
    end: float


class Timeline(NamedTuple):
    """A table in time, in the unit of `WorkCosts`.

    starts, lengths: of the ticks, [T]
    work: sorted by tick, stage and start
    total: the time of all ticks
    busy: the time that each stage works, [S]
    bubble: 1 - busy / total, the mean over stages
    live: (microbatch, chunk) pairs that F has kept and B or W still need, in each tick on each stage, [T, S]
    most_live: the maximum of each stage, [S]
    """

    starts: np.ndarray
    lengths: np.ndarray
    work: tuple[TimedWork, ...]
    total: float
    busy: np.ndarray
    bubble: float
    live: np.ndarray
    most_live: np.ndarray


def simulate(ticks: Ticks, costs: WorkCosts = EQUAL, blocks: Sequence[int] = ()) -> Timeline:
    """The timeline of a valid table.

    costs: of a stage with the mean number of blocks
    blocks: of each virtual stage (`parallel.stages`), if these differ: work takes the time of its blocks then
    """
    share_vS = np.ones((ticks.chunks, ticks.stages)) / ticks.chunks  # what each chunk costs, of a whole stage
    if blocks:
        share_vS = np.reshape(blocks, share_vS.shape) * ticks.stages / sum(blocks)
    joint = costs.backward + costs.weights
    each = (costs.forward, costs.backward if ticks.weights.shape[2] else joint, costs.weights)
    tables = (ticks.forward[:, :, None], ticks.backward[:, :, None], ticks.weights)
    own_TS = np.zeros(ticks.forward.shape[:2])
    stage_S1 = np.arange(ticks.stages)[:, None]
    for cost, table_TSN2 in zip(each, tables, strict=True):
        own_TS += cost * np.where(table_TSN2[..., 0] >= 0, share_vS[table_TSN2[..., 1], stage_S1], 0).sum(axis=2)
    lengths_T = own_TS.max(axis=1)
    starts_T = np.cumsum(lengths_T) - lengths_T
    work = []
    for tick, stage in np.ndindex(own_TS.shape):
        end = float(starts_T[tick])
        for kind, cost, table_TSN2 in zip(WORK_KINDS, each, tables, strict=True):
            for microbatch, chunk in table_TSN2[tick, stage]:
                if microbatch >= 0:
                    start, end = end, end + cost * float(share_vS[chunk, stage])
                    work.append(TimedWork(kind, stage, tick, int(microbatch), int(chunk), start, end))
    total, busy_S, live_TS = float(lengths_T.sum()), own_TS.sum(axis=0), _live(ticks)
    bubble = 1 - float(busy_S.mean()) / total
    return Timeline(starts_T, lengths_T, tuple(work), total, busy_S, bubble, live_TS, live_TS.max(axis=0))


def _live(ticks: Ticks) -> np.ndarray:
    """How many (microbatch, chunk) pairs have had their F and not yet their last use, [T, S]."""
    when = moments(ticks)
    stage_MvS = np.broadcast_to(np.arange(ticks.stages), when.forward.shape)
    change_TS = np.zeros((ticks.length + 1, ticks.stages), int)
    np.add.at(change_TS, (when.forward, stage_MvS), 1)
    np.add.at(change_TS, (when.weights + 1, stage_MvS), -1)
    return np.cumsum(change_TS, axis=0)[:-1]


def table_text(ticks: Ticks) -> str:
    """The table for a terminal: a column for each tick, and lines for F, B and W of each stage.

    A cell is the number of a microbatch, with a letter for the chunk if there are several.
    """
    tables = [ticks.forward, ticks.backward, *np.moveaxis(ticks.weights, 2, 0)]
    kinds = ("F", "B", *"W" * ticks.weights.shape[2])
    letters = [chr(ord("a") + chunk) for chunk in range(ticks.chunks)] if ticks.chunks > 1 else [""]
    width = max(len(f"{ticks.microbatches - 1}{letters[-1]}"), len(f"{ticks.length - 1}")) + 1
    lines = [f"{'tick':<11}" + "".join(f"{tick:>{width}}" for tick in range(ticks.length))]
    for stage in range(ticks.stages):
        for kind, table_TS2 in zip(kinds, tables, strict=True):
            if (table_TS2[:, stage] < 0).all():
                continue
            cells = [f"{m}{letters[c]}" if m >= 0 else "." for m, c in table_TS2[:, stage]]
            name = f"stage {stage}" if kind == "F" else ""
            lines.append(f"{name:<9}{kind} " + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)


def draw_timeline(ticks: Ticks, path: Path, *, name: str, costs: WorkCosts = EQUAL, blocks: Sequence[int] = ()) -> None:
    """Draw a table as PNG or SVG, by the ending of `path`.

    A row is a stage, time goes to the right, and each piece of work is a bar with its microbatch in it. Later chunks
    are paler, and a stage that waits is hatched. An SVG holds the table as data too, see `draw_rounds.data_of`.

    name: of the schedule, for the title
    blocks: see `simulate`
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from jaxdist.plan.report.draw_rounds import svg_text

    line = simulate(ticks, costs, blocks)
    shortest = min(work.end - work.start for work in line.work if work.end > work.start)
    inches = float(np.clip(0.24 / shortest * line.total, 6.0, 22.0))
    width, height = _LEFT + inches + _RIGHT, _TOP + ticks.stages * _ROW + _BOTTOM
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set(xlim=(0, width), ylim=(height, 0))
        title = _title(line, ticks, name, blocks)
        axes.text(0.14, 0.22, title, va="center", fontsize=11)
        _waits(axes, line, ticks, inches)
        _bars(axes, line, ticks, inches)
        _legend(axes, ticks, costs, height, mean=bool(blocks))
        if path.suffix == ".svg":
            path.write_text(svg_text(figure, title=title, data=table_data(ticks, name)), encoding="utf-8")
        else:
            figure.savefig(path, dpi=160, facecolor="white")


def table_data(ticks: Ticks, name: str) -> dict[str, Any]:
    """The data in an SVG of a table: the schedule's name, and the fields of `Ticks` as numbers and lists."""
    return {"schedule": name, **{key: np.asarray(value).tolist() for key, value in ticks._asdict().items()}}


def _colour(kind: str, chunk: int, chunks: int) -> str:
    """From dark, the first chunk, to light, the last; between the two for a single one."""
    from matplotlib.colors import to_hex, to_rgb

    part = chunk / (chunks - 1) if chunks > 1 else 0.3
    dark, light = to_rgb(_DARK[kind]), to_rgb(_LIGHT[kind])
    red, green, blue = (a + (b - a) * part for a, b in zip(dark, light, strict=True))
    return to_hex((red, green, blue))


def _ink(colour: str) -> str:
    """Black or white, whichever is easier to read on the colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.6 else _INK


def _rectangle(axes: "Axes", left: float, top: float, width: float, **style: Any) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((left, top), width, style.pop("height", _BAR), **style))


def _title(line: Timeline, ticks: Ticks, name: str, blocks: Sequence[int]) -> str:
    stages = f"{ticks.stages} ({' + '.join(map(str, blocks))} blocks)" if blocks else ticks.stages
    chunks = f", chunks {ticks.chunks}" if ticks.chunks > 1 else ""
    return f"{name}: stages {stages}, microbatches {ticks.microbatches}{chunks}; bubble {line.bubble:.1%}"


def _waits(axes: "Axes", line: Timeline, ticks: Ticks, inches: float) -> None:
    """Draw what is under the bars: hatched rows, each with its name and what it keeps; the ticks, numbered."""
    scale, bottom = inches / line.total, _TOP + ticks.stages * _ROW - (_ROW - _BAR)
    right = _LEFT + inches + 0.12
    text: dict[str, Any] = {"va": "center", "fontsize": 8, "color": _MUTED}
    axes.text(right, _TOP - 0.22, "kept at\nmost", linespacing=1.1, **text)
    axes.text(_LEFT - 0.1, _TOP - 0.13, "tick", ha="right", **text)
    for stage in range(ticks.stages):
        top = _TOP + stage * _ROW
        _rectangle(axes, _LEFT, top, inches, facecolor=_IDLE, edgecolor=_HATCH, hatch="////", lw=0)
        axes.text(_LEFT - 0.1, top + _BAR / 2, f"stage {stage}", ha="right", va="center_baseline")
        axes.text(right, top + _BAR / 2, str(line.most_live[stage]), va="center_baseline")
    shown = 0.0  # where the last number ended: short ticks are not all numbered
    for tick, (start, length) in enumerate(zip(line.starts * scale, line.lengths * scale, strict=True)):
        axes.plot([_LEFT + start] * 2, [_TOP - 0.05, bottom + 0.05], color=_LINE, lw=0.6, zorder=1.5)
        if start + length / 2 - 0.08 >= shown:
            axes.text(_LEFT + start + length / 2, _TOP - 0.13, str(tick), ha="center", **text)
            shown = start + length / 2 + 0.1
    axes.plot([_LEFT + inches] * 2, [_TOP - 0.05, bottom + 0.05], color=_LINE, lw=0.6)


def _bars(axes: "Axes", line: Timeline, ticks: Ticks, inches: float) -> None:
    scale = inches / line.total
    digits = len(str(ticks.microbatches - 1))
    for work in line.work:
        left, width = _LEFT + work.start * scale, (work.end - work.start) * scale
        top, colour = _TOP + work.stage * _ROW, _colour(work.kind, work.chunk, ticks.chunks)
        _rectangle(axes, left, top, width, facecolor=colour, edgecolor="white", lw=0.6, zorder=2)
        size = min(8.5, 72 * width / (0.68 * digits + 0.15))
        if size >= 4:  # points; smaller ones cannot be read
            axes.text(
                left + width / 2,
                top + _BAR / 2,
                str(work.microbatch),
                ha="center",
                va="center_baseline",
                fontsize=size,
                color=_ink(colour),
                zorder=3,
            )


def _legend(axes: "Axes", ticks: Ticks, costs: WorkCosts, height: float, *, mean: bool) -> None:
    names, each = {"F": "forward", "B": "backward"}, f"B {costs.backward + costs.weights:g}"
    if ticks.weights.shape[2]:
        names |= {"B": "gradient of the input", "W": "gradient of the parameters"}
        each = f"B {costs.backward:g}, W {costs.weights:g}"
    left, middle = _LEFT, height - 0.58
    for kind, name in names.items():
        for chunk in range(ticks.chunks):
            colour = _colour(kind, chunk, ticks.chunks)
            _rectangle(axes, left, middle - 0.09, 0.2, height=0.18, facecolor=colour, edgecolor="white", lw=0.6)
            left += 0.2
        axes.text(left + 0.07, middle, name, va="center", fontsize=8.5)
        left += 0.07 + 0.07 * len(name) + 0.25
    _rectangle(axes, left, middle - 0.09, 0.3, height=0.18, facecolor=_IDLE, edgecolor=_HATCH, hatch="////", lw=0)
    axes.text(left + 0.37, middle, "waits", va="center", fontsize=8.5)
    paler = " Paler: later chunks." if ticks.chunks > 1 else ""
    of = "chunks of microbatches" if ticks.chunks > 1 else "microbatches"
    note = f"Numbers: microbatches.{paler} Time of one on a{'n average' * mean} stage: F {costs.forward:g}, {each}.\n"
    note += f"Kept: {of} whose forward has been done and whose last gradient has not."
    axes.text(_LEFT, height - 0.24, note, va="center", fontsize=8, linespacing=1.4, color=_MUTED)
