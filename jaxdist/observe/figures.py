"""Pictures of a run as inline SVG, drawn with matplotlib without a display and without its global state of figures.

A picture takes its colours from the page: matplotlib draws in stand-in colours, and `_svg` replaces each by a CSS
variable, so that one picture serves a light and a dark page. Text is drawn as outlines: it has the size matplotlib
measured, whatever fonts the reader has.
"""

import functools
import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from jaxdist.observe.metrics import Curve, decimate, smooth
from jaxdist.specs import format_bytes

INK, MUTED, GRID, TRAIN, EVAL, BASELINE, WHOLE = (f"#0a0b0{i}" for i in range(1, 8))
_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    TRAIN: "--train",
    EVAL: "--eval",
    BASELINE: "--baseline",
    WHOLE: "--whole",
}
_STYLE: Any = {
    "svg.fonttype": "path", "svg.hashsalt": "jaxdist", "font.family": "DejaVu Sans", "font.size": 9.5,
    "axes.edgecolor": MUTED, "axes.labelcolor": INK, "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "grid.color": GRID, "grid.linewidth": 0.8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "figure.facecolor": "none",
    "axes.facecolor": "none", "lines.solid_capstyle": "round", "lines.solid_joinstyle": "round",
    "path.simplify_threshold": 0.4, "text.parse_math": False,
}  # fmt: skip
_MAX_UNITS = 16
short_bytes = functools.partial(format_bytes, digits=".4g")
# Pastels with dark text on them, for light and dark pages alike: one per coordinate of the outermost axis.
_CELLS = ("#a9c9f0", "#f3c99a", "#aadcb6", "#e9b3c6", "#cdbdf0", "#e6dd92", "#9fdbdd", "#d2c2b2")
_CELL_INK = "#14181f"
_WIDTH = 9.9  # inches; the page scales it


def _svg(figure: Figure, name: str, label: str) -> str:
    """The figure as an <svg> element: ids made unique by `name`, colours from the page, `label` for screen readers."""
    buffer = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a user's name in another script: boxes will do
        figure.savefig(buffer, format="svg", bbox_inches="tight", pad_inches=0.05, metadata=metadata)
    text = buffer.getvalue()
    width, height = (float(v) for v in re.findall(r'<svg[^>]*? viewBox="0 0 ([\d.]+) ([\d.]+)"', text)[0])
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", body, flags=re.DOTALL).replace("xlink:href", "href")
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'href="#', f'href="#{name}-', body).replace("url(#", f"url(#{name}-")
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    label = label.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    size = f'viewBox="0 0 {width:g} {height:g}" style="max-width:{width * 4 / 3:.0f}px"'
    return f'<svg role="img" aria-label="{label}" {size}>{body}'


def _canvas(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.add_subplot()


def _spread(positions: Sequence[float], gap: float) -> list[float]:
    """Positions moved apart to at least `gap`, as little as that takes and in the same order."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    placed = [positions[i] for i in order]
    for _ in range(100):
        for i in range(len(placed) - 1):
            push = max(0.0, gap - (placed[i + 1] - placed[i])) / 2
            placed[i] -= push
            placed[i + 1] += push
    for i in range(len(placed) - 1):  # what is left of the last rounds
        placed[i + 1] = max(placed[i + 1], placed[i] + gap)
    result = [0.0] * len(positions)
    for i, value in zip(order, placed, strict=True):
        result[i] = value
    return result


def _empty(name: str, text: str) -> str:
    figure, axes = _canvas(0.9)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED)
    axes.set_axis_off()
    return _svg(figure, name, text)


def _step_axis(axes: Axes, steps: np.ndarray) -> None:
    first, last = int(steps.min()), int(steps.max())
    pad = max((last - first) * 0.01, 0.5)
    axes.set_xlim(first - pad, last + pad)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True) if last > first else FixedLocator([first]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    axes.set_xlabel("step")
    axes.grid(True)


def loss_range(train: Curve, evaluation: Curve, baselines: Mapping[str, float]) -> tuple[float, float]:
    """Range of the loss axis: the first step, every baseline, and all losses but the highest half percent (spikes)."""
    values = np.concatenate([train.values, evaluation.values])
    values = values[np.isfinite(values)]
    first = train.values[np.isfinite(train.values)][:1]
    ends = [*first, *(b for b in baselines.values() if math.isfinite(b)), np.quantile(values, 0.995)]
    low, high = min(float(values.min()), *ends), max(ends)
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return float(low - pad), float(high + pad)


def loss_figure(train: Curve, evaluation: Curve, *, baselines: Mapping[str, float], unit: str) -> str:
    """Training loss (each step, and smoothed), evaluations, and baselines as dashed lines; all in `unit`.

    Steps whose loss is NaN or infinite are ticks at the lower edge.
    """
    with matplotlib.rc_context(_STYLE):
        steps = np.concatenate([train.steps, evaluation.steps])
        if not np.isfinite(np.concatenate([train.values, evaluation.values])).any():
            return _empty("loss", "No finite loss was recorded." if steps.size else "No steps were recorded.")
        figure, axes = _canvas(4.2)
        _step_axis(axes, steps)
        low, high = loss_range(train, evaluation, baselines)
        axes.set(ylabel=f"loss ({unit})", ylim=(low, high))
        few: dict[str, Any] = {"marker": "o", "markersize": 4} if len(train.steps) < 30 else {}
        thin = decimate(train)
        axes.plot(thin.steps, thin.values, color=TRAIN, linewidth=0.9, alpha=0.4, label="training, each step", **few)
        if len(train.steps) >= 30:
            mean = decimate(Curve(train.steps, smooth(train.values)), 600)
            axes.plot(mean.steps, mean.values, color=TRAIN, linewidth=2, label="training, smoothed")
        if evaluation.steps.size:
            style: dict[str, Any] = {"marker": "o", "markersize": 5.5, "linewidth": 1.2, "markeredgewidth": 0}
            axes.plot(evaluation.steps, evaluation.values, color=EVAL, label="evaluation, held out", **style)
        bad = train.steps[~np.isfinite(train.values)]
        if bad.size:
            _at_edge(axes, bad, marker="|", color=EVAL, label="loss not finite")
        _draw_baselines(axes, baselines, gap=0.06 * (high - low))
        _legend(axes)
        counts = f"{len(train.steps)} training and {len(evaluation.steps)} evaluation points"
        return _svg(figure, "loss", f"Loss over steps in {unit}: {counts}.")


def _at_edge(axes: Axes, steps: np.ndarray, *, marker: str, color: str, label: str) -> None:
    """Marks at the lower edge for steps without a place on the axis; at most about 500."""
    steps = steps[:: 1 + len(steps) // 500]
    height = np.full(len(steps), 0.025)
    style: dict[str, Any] = {"marker": marker, "linestyle": "none", "markersize": 7, "color": color, "clip_on": False}
    axes.plot(steps, height, transform=axes.get_xaxis_transform(), label=label, **style)


def _legend(axes: Axes) -> None:
    style: dict[str, Any] = {"frameon": False, "borderaxespad": 0.2, "handlelength": 1.6}
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, **style)


def _draw_baselines(axes: Axes, baselines: Mapping[str, float], *, gap: float) -> None:
    """Dashed lines, named to the right of the axes; names keep `gap` apart and a thin line leads to each."""
    drawn = {name: value for name, value in baselines.items() if math.isfinite(value)}
    where = ("axes fraction", "data")
    leader: dict[str, Any] = {"arrowstyle": "-", "color": BASELINE, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 0}
    for (name, value), position in zip(drawn.items(), _spread(list(drawn.values()), gap), strict=True):
        axes.axhline(value, color=BASELINE, linewidth=1.2, linestyle=(0, (5, 3)))
        text = f"{name if len(name) <= 28 else name[:27] + '…'}  {value:.3f}"
        style: dict[str, Any] = {"va": "center", "fontsize": 9, "annotation_clip": False, "arrowprops": leader}
        axes.annotate(text, xy=(1, value), xycoords=where, xytext=(1.035, position), textcoords=where, **style)


def throughput_figure(line: Curve, *, median: float, low: np.ndarray, unit: str = "tokens") -> str:
    """Tokens, or what `unit` says, per second of each step, and their median. Steps marked in `low` are off the scale,
    at the lower edge."""
    shown = Curve(line.steps, np.where(low, np.nan, line.values))
    finite = shown.values[np.isfinite(shown.values)]
    with matplotlib.rc_context(_STYLE):
        if not finite.size:
            return _empty("throughput", "No throughput was recorded.")
        figure, axes = _canvas(2.9)
        _step_axis(axes, line.steps)
        pad = max(0.08 * float(finite.max() - finite.min()), 0.05 * abs(median), 1e-9)
        axes.set(ylabel=f"{unit}/s", ylim=(max(0.0, float(finite.min()) - pad), float(finite.max()) + pad))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if median >= 100 else f"{v:,.3g}"))
        few: dict[str, Any] = {"marker": "o", "markersize": 4} if len(line.steps) < 30 else {}
        thin = decimate(shown)
        axes.plot(thin.steps, thin.values, color=TRAIN, linewidth=1, alpha=0.75, label="each step", **few)
        dashed: dict[str, Any] = {"color": EVAL, "linewidth": 1.6, "linestyle": (0, (5, 3))}
        axes.axhline(median, label=f"median {median:,.0f}", **dashed)
        if low.any():
            _at_edge(axes, line.steps[low], marker="v", color=BASELINE, label="below the axis (see text)")
        _legend(axes)
        return _svg(figure, "throughput", f"{unit.capitalize()} per second over steps, median {median:,.0f}.")


def draws_devices(mesh_axes: Mapping[str, int]) -> bool:
    """Whether `mesh_figure` draws every device; else one strip an axis. At most 64 devices, 16 in a row or column."""
    active = [size for size in mesh_axes.values() if size > 1]
    return math.prod(active) <= 64 and (len(active) < 2 or max(active[-2:]) <= 16)


def mesh_figure(mesh_axes: Mapping[str, int], names: Sequence[str]) -> str:
    """The devices as a grid: columns are the innermost axis of size > 1, rows the next, panels all others.

    `names` label the devices in mesh order (row-major, outermost axis first) where they differ and fit; numbers
    otherwise. A mesh too large for that is drawn as one strip an axis, see `draws_devices`.
    """
    active = {axis: size for axis, size in mesh_axes.items() if size > 1}
    sizes = ", ".join(f"{axis} {size}" for axis, size in active.items()) or "one device"
    with matplotlib.rc_context(_STYLE):
        figure = Figure()
        FigureCanvasSVG(figure)
        if draws_devices(mesh_axes):
            _draw_grid(figure, active, names)
        else:
            _draw_strips(figure, active)
        return _svg(figure, "mesh", f"Mesh of {math.prod(active.values())} devices: {sizes}.")


class _Frame(NamedTuple):
    """A bare drawing surface: axes in drawing units, y downwards, and the font size that suits the scale."""

    axes: Axes
    scale: float  # inches a unit
    font: float  # points


def _frame(figure: Figure, width: float, height: float, *, largest: float = 0.62) -> _Frame:
    scale = min(largest, _WIDTH / width, 8.0 / height)
    figure.set_size_inches(width * scale, height * scale)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    return _Frame(axes, scale, max(5.0, 9.5 * scale / 0.62))


def _cell(frame: _Frame, x: float, y: float, width: float, *, colour: str, text: str) -> None:
    style = "round,pad=0,rounding_size=0.09"
    patch = FancyBboxPatch((x, y), width, 0.88, boxstyle=style, facecolor=colour, edgecolor="none")
    frame.axes.add_patch(patch)
    frame.axes.text(x + width / 2, y + 0.45, text, ha="center", va="center", fontsize=frame.font, color=_CELL_INK)


def _pale(colour: str, amount: float) -> str:
    """`colour` moved towards white by `amount`, 0 to 1."""
    red, green, blue = (1 - (1 - part) * (1 - amount) for part in to_rgb(colour))
    return to_hex((red, green, blue))


def _colour(outer: int, outer_size: int, inner: int, inner_size: int) -> str:
    """Hue by the outermost coordinate, paler along the innermost; a long outermost axis is one hue, paler along it."""
    if outer_size > len(_CELLS):
        outer, inner, inner_size = 0, outer, outer_size
    return _pale(_CELLS[outer], 0.55 * inner / (inner_size - 1) if inner_size > 1 else 0.0)


class _Grid(NamedTuple):
    """Rows and columns of one panel, width of a column in drawing units, and the axes of size > 1, outermost first."""

    names: list[str]
    sizes: list[int]
    rows: int
    columns: int
    pitch: float


def _draw_grid(figure: Figure, active: Mapping[str, int], names: Sequence[str]) -> None:
    sizes = list(active.values())
    columns, rows, outer = (sizes or [1])[-1], (sizes[-2] if len(sizes) > 1 else 1), sizes[:-2]
    if len(sizes) == 1 and columns > 16:  # one long axis reads like text, in lines of 16
        columns, rows = 16, math.ceil(columns / 16)
    grid = _Grid(list(active), sizes, rows, columns, pitch=1.6 if columns <= 8 else 1.0)
    left = 1.5 if len(sizes) > 1 else 0.05
    top = 0.05 + 0.6 * bool(outer) + 0.5 * bool(sizes)
    panels, panel_w, panel_h = math.prod(outer), left + columns * grid.pitch, top + rows
    across = max(1, min(panels, int(18 // panel_w)))
    frame = _frame(figure, across * (panel_w + 0.5) - 0.4, math.ceil(panels / across) * (panel_h + 0.35) - 0.3)
    total = math.prod(sizes)
    fits = max(map(len, names), default=99) * frame.font * 0.65 / 72 < grid.pitch * frame.scale * 0.9
    labels = list(names) if len(set(names)) == len(names) == total and fits else [str(i) for i in range(total)]
    for panel, coordinates in enumerate(np.ndindex(*outer)):
        x, y = left + panel % across * (panel_w + 0.5), top + panel // across * (panel_h + 0.35)
        if outer:
            title = "   ".join(f"{name} {value}" for name, value in zip(grid.names, coordinates, strict=False))
            frame.axes.text(x, y - 0.8, title, fontweight="bold", va="center", fontsize=frame.font)
        _draw_headings(frame, grid, x, y)
        start = panel * rows * columns
        _draw_cells(frame, grid, x, y, hue=coordinates[0] if outer else None, start=start, labels=labels)


def _draw_cells(
    frame: _Frame, grid: _Grid, x: float, y: float, *, hue: int | None, start: int, labels: Sequence[str]
) -> None:
    """The devices of one panel, `start` the first; `hue` is their outermost coordinate where that is not the row."""
    for place, label in enumerate(labels[start : start + grid.rows * grid.columns]):
        row, column = divmod(place, grid.columns)
        if len(grid.sizes) < 2:
            colour = _colour(place, len(labels), 0, 1)
        else:
            colour = _colour(row if hue is None else hue, grid.sizes[0], column, grid.columns)
        _cell(frame, x + column * grid.pitch, y + row, grid.pitch - 0.12, colour=colour, text=label)


def _draw_headings(frame: _Frame, grid: _Grid, x: float, y: float) -> None:
    """Coordinates along the columns and rows of one panel, whose first cell is at (x, y)."""
    names, columns = grid.names, grid.columns
    text: dict[str, Any] = {"va": "center", "fontsize": frame.font}
    if len(names) == 1 and columns > 8:
        frame.axes.text(x, y - 0.3, f"{names[0]} 0, 1, 2 ...", **text)
        return
    if columns > 8:
        frame.axes.text(x - 0.15, y - 0.3, names[-1], ha="right", **text)
    for column in range(columns if names else 0):
        label = f"{names[-1]} {column}" if columns <= 8 else str(column)
        frame.axes.text(x + column * grid.pitch + (grid.pitch - 0.12) / 2, y - 0.3, label, ha="center", **text)
    for row in range(grid.rows if len(names) > 1 else 0):
        frame.axes.text(x - 0.15, y + row + 0.45, f"{names[-2]} {row}", ha="right", **text)


def _draw_strips(figure: Figure, active: Mapping[str, int]) -> None:
    """For many devices: one strip an axis, outermost first, with its stride in devices."""
    frame = _frame(figure, 19.0, 1.2 * len(active), largest=0.5)._replace(font=8.5)
    stride = math.prod(active.values())
    text: dict[str, Any] = {"va": "center", "fontsize": 9.5}
    for row, (name, size) in enumerate(active.items()):
        y = row * 1.2 + 0.1
        stride //= size
        labels = list(map(str, range(size)))
        labels = labels if size <= 12 else [*labels[:8], "…", *labels[-2:]]
        frame.axes.text(2.4, y + 0.45, f"{name} {size}", ha="right", fontweight="bold", **text)
        for place, label in enumerate(labels):
            colour = _pale(_CELLS[row % len(_CELLS)], 0.5 * place / len(labels))
            _cell(frame, 2.65 + place, y, 0.9, colour=colour, text=label)
        note = f"{stride:,} devices apart" if stride > 1 else "neighbours"
        frame.axes.text(2.85 + len(labels), y + 0.45, note, **text)


def _largest_units(units: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """The largest units in the order of the model; what is left of a long model as one."""
    if len(units) <= _MAX_UNITS:
        return dict(units)
    small = sorted(units, key=lambda name: units[name][1])[: len(units) - _MAX_UNITS + 1]
    rest = (sum(units[name][0] for name in small), sum(units[name][1] for name in small))
    return {name: both for name, both in units.items() if name not in small} | {f"{len(small)} others": rest}


def layout_figure(units: Mapping[str, tuple[int, int]]) -> str:
    """Bars for each top-level unit of the model, (bytes per device, whole bytes): the part one device holds."""
    shown = _largest_units(units)
    parts, wholes = ([both[i] for both in shown.values()] for i in (0, 1))
    with matplotlib.rc_context(_STYLE):
        if not shown:
            return _empty("layout", "No parameters were given.")
        figure, axes = _canvas(0.9 + 0.36 * max(2, len(shown)))
        largest = max(*wholes, 1)
        power = min(4, int(math.log(largest, 1024)))
        scale, unit = 1024**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
        rows = range(len(shown))
        axes.barh(rows, [whole / scale for whole in wholes], height=0.62, color=WHOLE, label="whole")
        axes.barh(rows, [part / scale for part in parts], height=0.62, color=TRAIN, label="on one device")
        style: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        for row, part, whole in zip(rows, parts, wholes, strict=True):
            share = f"{part / whole:.1%}" if whole else "-"
            axes.annotate(f"{short_bytes(part)} of {short_bytes(whole)}  ({share})", (whole / scale, row), **style)
        axes.set_yticks(list(rows), [name if len(name) <= 30 else name[:29] + "…" for name in shown])
        axes.set(xlim=(0, largest / scale * 1.42), ylim=(len(shown) - 0.4, -0.6), xlabel=f"parameters ({unit})")
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="x")
        _legend(axes)
        return _svg(figure, "layout", f"Bytes on one device and in all, for {len(units)} parts of the model.")
