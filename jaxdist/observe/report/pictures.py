"""The charts of a report as PNG images, for places that show no HTML: TensorBoard, Weights & Biases, MLflow."""

import html
import io
import re
import textwrap
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Canvas

from jaxdist.observe.report.account import PURPOSES, account_of
from jaxdist.observe.report.charts import Axis, Bar, Chart, Figure, HeatMap, Shares, TimeLine
from jaxdist.observe.report.record import RunRecord, losses_of
from jaxdist.observe.report.sections.cost import memory_figure, sent_figure
from jaxdist.observe.report.sections.experts import experts_figures
from jaxdist.observe.report.sections.learning import loss_figure, step_figures
from jaxdist.observe.report.sections.running import history_figure, time_figures
from jaxdist.observe.report.style import FILLS

_WIDTH, _DOTS = 8.0, 110  # inches, and dots an inch
_STYLES: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 1.8},
    "thin": {"linewidth": 0.8, "alpha": 0.5},
    "dots": {"linestyle": "", "marker": "o"},
}


@np.errstate(over="ignore", invalid="ignore")  # a damaged file may hold any numbers
def figures_of(record: RunRecord) -> list[Figure]:
    """The charts of a run's report, as far as its record has them."""
    loss, account, prediction = loss_figure(losses_of(record)), account_of(record.metrics), record.prediction
    found = [loss] if loss else []
    found += step_figures(record) + experts_figures(record)
    if account is not None:
        found += [*time_figures(record, account), history_figure(record, account)]
    if not isinstance(prediction, str):
        found += [memory_figure(prediction)] + ([sent_figure(prediction)] if prediction.sent else [])
    return found


def png_of(figure: Figure) -> bytes:
    """A chart as a PNG image, in the colours of the page on a light ground."""
    picture = figure.picture
    flat = isinstance(picture, (Bar, Shares, TimeLine))
    canvas = Canvas(figsize=(_WIDTH, 2.6 if flat else 4.0), dpi=_DOTS, layout="constrained")
    axes = canvas.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if isinstance(picture, Chart):
        _draw_chart(axes, picture, figure)
    elif isinstance(picture, Bar):
        _draw_bar(axes, picture, figure)
    elif isinstance(picture, Shares):
        _draw_shares(axes, picture)
    elif isinstance(picture, HeatMap):
        _draw_heat(axes, picture)
    else:
        assert isinstance(picture, TimeLine), picture
        _draw_time_line(axes, picture)
    said = figure.caption if isinstance(picture, Chart) else figure.label  # a bar has no figures beside it here
    words = html.unescape(re.sub(r"<[^>]*>", "", str(said)))
    axes.set_title(_plain(textwrap.fill(words, 105)), fontsize=9, loc="left")
    if (figure.key or isinstance(picture, Shares)) and not isinstance(picture, HeatMap):
        canvas.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    made = io.BytesIO()
    canvas.savefig(made, format="png")
    return made.getvalue()


def _plain(words: str) -> str:
    """Words that matplotlib shows as they are: "$" would begin a formula."""
    return words.replace("$", r"\$")


def _colour(kind: str) -> str:
    return FILLS[kind][0]


def _set_axis(axis: Any, given: Axis) -> None:
    """The range, the ticks and the name of one axis, as on the page."""
    ticks = [value for value in given.ticks() if given.low <= value <= given.high]
    axis.set_ticks(ticks, labels=[given.words(value) for value in ticks])
    axis.set_tick_params(labelsize=8)
    axis.set_label_text(_plain(given.name), fontsize=8)


def _draw_chart(axes: Any, picture: Chart, figure: Figure) -> None:
    said: set[str] = set()
    for line in picture.lines:
        name = figure.key.get(line.kind) if line.style == "line" or len(line.x) < 30 else None
        label = _plain(name) if name and line.kind not in said else None
        said |= {line.kind} if label else set()
        style = _STYLES["dots" if np.isfinite(line.y).sum() == 1 else line.style]
        axes.plot(line.x, line.y, color=_colour(line.kind), label=label, **style)
    for name, value in picture.levels:
        axes.axhline(value, color="#52606f", linewidth=0.9, linestyle="--")
        axes.text(picture.x.low, value, _plain(name), fontsize=8, va="bottom", color="#52606f")
    room = 0.5 if picture.x.low == picture.x.high else 0.0
    axes.set_xlim(picture.x.low - room, picture.x.high + room)
    axes.set_ylim(picture.y.low, picture.y.high)
    axes.grid(axis="y", color="#e6eaf0")
    _set_axis(axes.xaxis, picture.x)
    _set_axis(axes.yaxis, picture.y)


def _draw_bar(axes: Any, picture: Bar, figure: Figure) -> None:
    left, whole = 0.0, sum(picture.parts.values()) or 1.0
    for kind, size in picture.parts.items():
        axes.barh([0], [size / whole], left=left, color=_colour(kind), label=_plain(figure.key.get(kind, kind)))
        left += size / whole
    axes.set_xlim(0.0, 1.0)
    axes.set_axis_off()


def _draw_shares(axes: Any, picture: Shares) -> None:
    edges = np.linspace(picture.x.low, picture.x.high, len(picture.columns) + 1)
    below = np.zeros(len(picture.columns))
    for kind in picture.kinds:
        part = np.array([each.get(kind, 0.0) for each in picture.columns])
        axes.stairs(below + part, edges, baseline=below, fill=True, color=_colour(kind), label=PURPOSES.get(kind, kind))
        below += part
    axes.set_xlim(picture.x.low, picture.x.high)
    axes.set_ylim(0.0, 1.0)
    axes.set_yticks([])
    _set_axis(axes.xaxis, picture.x)


def _draw_heat(axes: Any, picture: HeatMap) -> None:
    colours = LinearSegmentedColormap.from_list("load", [_colour("under"), "#f5f7fa", _colour("over")])
    x, y = picture.x, picture.y
    place = {"origin": "lower", "aspect": "auto", "extent": (x.low, x.high, y.low, y.high)}
    image = axes.imshow(picture.values, cmap=colours, vmin=0.0, vmax=2.0, interpolation="nearest", **place)
    _set_axis(axes.xaxis, x)
    _set_axis(axes.yaxis, y)
    axes.figure.colorbar(image, ax=axes, extend="max").ax.tick_params(labelsize=8)


def _draw_time_line(axes: Any, picture: TimeLine) -> None:
    for row, (_, pieces, kind) in enumerate(picture.rows):
        wide = [(begin, end - begin) for begin, end in pieces[:2000] if end > begin]
        marks = [begin for begin, end in pieces[:2000] if not end > begin]
        axes.broken_barh(wide, (row - 0.3, 0.6), color=_colour(kind))
        axes.plot(marks, [row] * len(marks), linestyle="", marker="|", markersize=12, color=_colour(kind))
    names = [name for name, _, _ in picture.rows]
    axes.set_yticks(range(len(names)), labels=names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(picture.x.low, picture.x.high)
    _set_axis(axes.xaxis, picture.x)
