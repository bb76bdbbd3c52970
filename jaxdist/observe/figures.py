"""Figures of a report, drawn with matplotlib without a display: each is an <img> element that holds an SVG.

Text is drawn as outlines, so that it looks the same whatever fonts the reader has. Long curves are drawn as pixels
inside the SVG: its size does not grow with the number of steps.
"""

import base64
import functools
import html
import io
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from jaxdist.observe.metrics import Curve, smooth
from jaxdist.specs import format_bytes

TRAIN, EVAL, _MUTED, WHOLE, GRID = "#2563b8", "#c2410c", "#6b7280", "#cfdbec", "#e4e8ee"
DASHES = ("--", ":", "-.", (0, (6, 1)))  # of baselines
_STYLE: Any = {
    "svg.fonttype": "path", "svg.hashsalt": "jaxdist", "font.family": "DejaVu Sans", "font.size": 9.5,
    "axes.edgecolor": _MUTED, "xtick.color": _MUTED, "ytick.color": _MUTED, "xtick.labelcolor": "black",
    "ytick.labelcolor": "black", "grid.color": GRID, "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "savefig.transparent": True, "savefig.dpi": 200, "legend.frameon": False,
    "text.parse_math": False, "figure.constrained_layout.use": True,
}  # fmt: skip
short_bytes = functools.partial(format_bytes, digits=".4g")
_STYLED = matplotlib.rc_context(_STYLE)  # of the functions below; matplotlib's global settings stay as they are
_WIDTH = 9.9  # inches; the page scales it
_MAX_UNITS = 16
_FEW, _MANY = 30, 2000  # points: fewer are marked, more are drawn as pixels


def _image(figure: Figure, label: str) -> str:
    """The figure as an <img> element. label: for screen readers."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a user's name in another script: boxes will do
        figure.savefig(buffer, format="svg", bbox_inches="tight", pad_inches=0.05, metadata={"Date": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(label)}" src="data:image/svg+xml;base64,{data}">'


def _empty(text: str) -> str:
    figure = Figure(figsize=(_WIDTH, 0.9))
    figure.text(0.5, 0.5, text, ha="center", va="center", color=_MUTED)
    return _image(figure, text)


def _step_axes(height: float, steps: np.ndarray) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height))
    axes = figure.add_subplot()
    first, last = int(steps.min()), int(steps.max())
    pad = max((last - first) * 0.01, 0.5)
    axes.set_xlim(first - pad, last + pad)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True) if last > first else FixedLocator([first]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    axes.set_xlabel("step")
    axes.grid(True)
    return figure, axes


def _draw_curve(axes: Axes, curve: Curve, **style: Any) -> None:
    marks: dict[str, Any] = {"marker": "o", "markersize": 4} if len(curve.steps) < _FEW else {}
    axes.plot(curve.steps, curve.values, **marks | style, rasterized=len(curve.steps) > _MANY)


def _draw_marks(axes: Axes, steps: np.ndarray, **style: Any) -> None:
    """Marks at the lower edge, for steps without a place on the axis."""
    heights, on_edge = np.full(len(steps), 0.025), axes.get_xaxis_transform()
    style |= {"linestyle": "none", "markersize": 7, "clip_on": False, "rasterized": len(steps) > _MANY}
    axes.plot(steps, heights, transform=on_edge, **style)


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0.2, handlelength=2.2)


def loss_range(train: Curve, evaluation: Curve, baselines: Mapping[str, float]) -> tuple[float, float]:
    """Range of the loss axis: the first step, every baseline, and all losses but the highest half percent (spikes)."""
    values = np.concatenate([train.values, evaluation.values])
    values = values[np.isfinite(values)]
    first = train.values[np.isfinite(train.values)][:1]
    ends = [*first, *(b for b in baselines.values() if math.isfinite(b)), np.quantile(values, 0.995)]
    low, high = min(float(values.min()), *ends), max(ends)
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return float(low - pad), float(high + pad)


@_STYLED
def loss_figure(train: Curve, evaluation: Curve, *, baselines: Mapping[str, float], unit: str) -> str:
    """Training loss (each step, and smoothed), evaluations, and baselines as dashed lines; all in `unit`.

    Steps whose loss is NaN or infinite are ticks at the lower edge.
    """
    steps = np.concatenate([train.steps, evaluation.steps])
    if not np.isfinite(np.concatenate([train.values, evaluation.values])).any():
        return _empty("No finite loss was recorded." if steps.size else "No steps were recorded.")
    figure, axes = _step_axes(4.2, steps)
    axes.set(ylabel=f"loss ({unit})", ylim=loss_range(train, evaluation, baselines))
    _draw_curve(axes, train, color=TRAIN, linewidth=0.9, alpha=0.4, label="training, each step")
    if len(train.steps) >= _FEW:
        smoothed = Curve(train.steps, smooth(train.values))
        _draw_curve(axes, smoothed, color=TRAIN, linewidth=2, label="training, smoothed")
    if evaluation.steps.size:
        _draw_curve(axes, evaluation, color=EVAL, marker="o", markersize=5.5, label="evaluation, held out")
    bad = train.steps[~np.isfinite(train.values)]
    if bad.size:
        _draw_marks(axes, bad, marker="|", color=EVAL, label="loss not finite")
    for (name, value), dashes in zip(baselines.items(), itertools.cycle(DASHES), strict=False):
        if math.isfinite(value):
            label = f"{name if len(name) <= 28 else name[:27] + '…'} {value:.3f}"
            axes.axhline(value, color=_MUTED, linewidth=1.2, linestyle=dashes, label=label)
    _legend(axes)
    counts = f"{len(train.steps)} training and {len(evaluation.steps)} evaluation points"
    return _image(figure, f"Loss over steps in {unit}: {counts}.")


@_STYLED
def throughput_figure(line: Curve, *, median: float, low: np.ndarray, unit: str = "tokens") -> str:
    """Tokens per second (or samples, as `unit` says) of each step, and their median. The steps in the mask `low` are
    below the axis, as marks at its lower edge."""
    shown = Curve(line.steps, np.where(low, np.nan, line.values))
    finite = shown.values[np.isfinite(shown.values)]
    if not finite.size:
        return _empty("No throughput was recorded.")
    figure, axes = _step_axes(2.9, line.steps)
    pad = max(0.08 * float(finite.max() - finite.min()), 0.05 * abs(median), 1e-9)
    axes.set(ylabel=f"{unit}/s", ylim=(max(0.0, float(finite.min()) - pad), float(finite.max()) + pad))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if median >= 100 else f"{v:,.3g}"))
    _draw_curve(axes, shown, color=TRAIN, linewidth=1, alpha=0.75, label="each step")
    axes.axhline(median, color=EVAL, linewidth=1.6, linestyle="--", label=f"median {median:,.0f}")
    if low.any():
        _draw_marks(axes, line.steps[low], marker="v", color=_MUTED, label="below the axis (see text)")
    _legend(axes)
    return _image(figure, f"{unit.capitalize()} per second over steps, median {median:,.0f}.")


def draws_devices(mesh_axes: Mapping[str, int]) -> bool:
    """Whether `mesh_figure` draws every device; else one strip an axis. At most 64 devices, 16 in a row or column."""
    active = [size for size in mesh_axes.values() if size > 1]
    return math.prod(active) <= 64 and (len(active) < 2 or max(active[-2:]) <= 16)


@_STYLED
def mesh_figure(mesh_axes: Mapping[str, int], names: Sequence[str]) -> str:
    """The devices as tables: columns are the innermost axis of size > 1, rows the next, and there is a table for each
    coordinate on the others. The colour is the coordinate on the outermost axis.

    `names` label the devices in mesh order (row-major, outermost axis first) where they differ and are short; numbers
    otherwise. A mesh too large for that is drawn as one strip an axis, see `draws_devices`.
    """
    active = {axis: size for axis, size in mesh_axes.items() if size > 1}
    sizes, total = list(active.values()) or [1], math.prod(active.values())
    label = f"Mesh of {total} devices: {', '.join(f'{axis} {size}' for axis, size in active.items()) or 'one device'}."
    if not draws_devices(mesh_axes):
        return _image(_strips(active), label)
    columns = sizes[-1] if len(sizes) > 1 else min(total, 16)  # one long axis reads like text, in lines of 16
    rows = sizes[-2] if len(sizes) > 1 else -(-total // columns)
    tables = math.prod(sizes[:-2])
    named = len(set(names)) == total and max(map(len, names)) <= 8
    texts, hues = np.full((tables, rows, columns), "", object), np.full((tables, rows, columns), np.nan)
    texts.flat[:total] = list(names) if named else range(total)
    hues.flat[:total] = np.arange(total) * sizes[0] // total / sizes[0]
    across = max(1, min(tables, 8 // columns))
    down = -(-tables // across)
    figure = Figure(figsize=(min(_WIDTH, 0.9 + 1.1 * columns * across), down * (0.4 + 0.4 * (rows + 1))))
    grid = figure.subplots(down, across, squeeze=False).flat
    for axes in grid[tables:]:
        axes.set_axis_off()
    for axes, place, *cells in zip(grid, np.ndindex(*sizes[:-2]), texts, hues, strict=False):
        title = [f"{axis} {i}" for axis, i in zip(active, place, strict=False)]
        _draw_cells(axes, *cells)
        if len(active) == 1 and rows > 1:
            title = [f"{next(iter(active))} 0, 1, 2 ..."]
        elif active:
            *_, inner = active
            axes.set_xticks(np.arange(columns) + 0.5, [f"{inner} {i}" for i in range(columns)])
        if len(active) > 1:
            axes.set_yticks(np.arange(rows) + 0.5, [f"{list(active)[-2]} {i}" for i in range(rows)])
        axes.set_title("   ".join(title), fontweight="bold")
    return _image(figure, label)


def _draw_cells(axes: Axes, texts: np.ndarray, hues: np.ndarray) -> None:
    """Cells with texts in pastel colours. hues: of the cells, 0 to 1; NaN where there is none."""
    axes.pcolormesh(hues, cmap="rainbow", vmin=0, vmax=1, alpha=0.4, edgecolors="white")
    for (row, column), text in np.ndenumerate(texts):
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center")
    axes.set(xticks=[], yticks=[], ylim=(len(hues), 0))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)


def _strips(active: Mapping[str, int]) -> Figure:
    """The figure of a large mesh: one strip an axis, outermost first, with its stride in devices."""
    stride = math.prod(active.values())
    figure = Figure(figsize=(_WIDTH, 0.6 * len(active)))
    for axes, (name, size) in zip(figure.subplots(len(active), squeeze=False).flat, active.items(), strict=True):
        stride //= size
        labels = [*range(size)] if size <= 12 else [*range(8), "…", size - 2, size - 1]
        note = f"{stride:,} devices apart" if stride > 1 else "neighbours"
        axes.set_title(f"{name} {size}: {note}", loc="left")
        _draw_cells(axes, np.array([labels], object), np.linspace([0], [1], len(labels)).T)
    return figure


def _largest_units(units: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """The largest units in the order of the model; what is left of a long model as one."""
    if len(units) <= _MAX_UNITS:
        return dict(units)
    small = sorted(units, key=lambda name: units[name][1])[: len(units) - _MAX_UNITS + 1]
    rest = (sum(units[name][0] for name in small), sum(units[name][1] for name in small))
    return {name: both for name, both in units.items() if name not in small} | {f"{len(small)} others": rest}


@_STYLED
def layout_figure(units: Mapping[str, tuple[int, int]]) -> str:
    """Bars for each top-level unit of the model, (bytes per device, whole bytes): the part one device holds."""
    shown = _largest_units(units)
    if not shown:
        return _empty("No parameters were given.")
    largest = max(1, *(whole for _, whole in shown.values()))
    power = min(4, int(math.log(largest, 1024)))
    scale, unit = 1024**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
    parts, wholes = np.array(list(shown.values())).T / scale
    rows = range(len(shown))
    figure = Figure(figsize=(_WIDTH, 0.9 + 0.36 * max(2, len(shown))))
    axes = figure.add_subplot()
    names = [name if len(name) <= 30 else name[:29] + "…" for name in shown]
    bars = axes.barh(rows, wholes, 0.62, color=WHOLE, label="whole")
    axes.barh(rows, parts, 0.62, color=TRAIN, label="on one device")
    shares = [
        f"{short_bytes(part)} of {short_bytes(whole)}  ({f'{part / whole:.1%}' if whole else '-'})"
        for part, whole in shown.values()
    ]
    axes.bar_label(bars, shares, padding=6, fontsize=9)
    axes.set_yticks(rows, names)
    axes.set(xlim=(0, largest / scale * 1.42), ylim=(len(shown) - 0.4, -0.6), xlabel=f"parameters ({unit})")
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x")
    _legend(axes)
    return _image(figure, f"Bytes on one device and in all, for {len(units)} parts of the model.")
