"""Charts as inline SVG between labels of HTML: the picture stretches to any width, and its text keeps its size."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from jaxdist.observe.report.elements import Markup, bar, figure, legend, text

_BUCKETS = 500  # a longer line keeps the lowest and the highest value of each
_WIDTH, _HEIGHT = 1000.0, 400.0  # of the coordinates inside a chart, whatever its size on the page
_SHADES = 10  # of each colour of a heat map


class Line(NamedTuple):
    """A line of a chart.

    - kind: its colour, by the name of a class of the style sheet.
    - style: "line", "thin" or "dots".
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    kind: str
    style: str = "line"


class Axis(NamedTuple):
    """An axis of a chart, from `low` to `high`. times: values are seconds, shown as times. whole: they are numbers of
    things."""

    low: float
    high: float
    name: str = ""
    times: bool = False
    whole: bool = False

    def place(self, values: np.ndarray | float) -> np.ndarray:
        """The values as fractions of the axis."""
        return (np.asarray(values, float) - self.low) / ((self.high - self.low) or 1.0)

    def ticks(self, count: int = 5) -> list[float]:
        """About `count` round values on the axis."""
        span = self.high - self.low
        if not (math.isfinite(span) and span > 0):
            return [self.low] if math.isfinite(self.low) else []
        if self.times:
            steps = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400]
            step = next(
                (float(each) for each in steps if span / each <= count), math.ceil(span / count / 86400) * 86400.0
            )
        else:
            power = 10.0 ** math.floor(math.log10(span / count))
            step = next((each * power for each in (1.0, 2.0, 5.0) if span / (each * power) <= count), 10 * power)
            step = max(1.0, step) if self.whole else step
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [index * step for index in range(first, min(last, first + 2 * count) + 1)]

    def words(self, value: float) -> str:
        """A value as it stands beside the axis."""
        if self.times:
            minutes, seconds = divmod(round(value), 60)
            hours, minutes = divmod(minutes, 60)
            return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= max(size, 1e4):
                return f"{value / size:.4g}{unit}"
        return f"{value:.4g}"


class Picture(Protocol):
    """What a figure shows."""

    def html(self) -> str:
        """The picture for a page."""


class Figure(NamedTuple):
    """A picture and its words.

    - name: where figures are told apart by names.
    - label: the text alternative. caption: what stands below it.
    - key: the legend, {kind: name}.
    """

    name: str
    picture: Picture
    label: str
    caption: object = ""
    key: Mapping[str, str] = MappingProxyType({})

    def html(self) -> Markup:
        """The figure for a page."""
        key = legend(self.key) if self.key else None
        return figure(self.picture.html(), label=self.label, caption=self.caption, key=key)


class Chart(NamedTuple):
    """Lines over two axes. levels: dashed lines across, (name, value); each has its name on it."""

    lines: Sequence[Line]
    x: Axis
    y: Axis
    levels: Sequence[tuple[str, float]] = ()
    small: bool = False

    def html(self) -> str:
        """The picture for a page."""
        x, y, small = self.x, self.y, self.small
        inside: list[str] = []
        for value in y.ticks(3 if small else 5):
            inside.append(_path([(0.0, value), (1.0, value)], y, "grid"))
        levels = [(name, value) for name, value in self.levels if y.low <= value <= y.high]
        for _, value in levels:
            inside.append(_path([(0.0, value), (1.0, value)], y, "level"))
        for line in self.lines:
            inside.append(_line(line, x, y))
        named = "".join(
            f'<span class="level" style="top:{100 - 100 * float(y.place(value)):.2f}%">{text(name)}</span>'
            for name, value in levels
        )
        return _framed("".join(inside), x, y, named, small=small)


def _framed(inside: str, x: Axis, y: Axis | None, over: str = "", *, small: bool = False, kind: str = "") -> str:
    """The SVG with labels left of it and below it."""
    left = (
        ""
        if y is None
        else "".join(
            f'<span style="top:{100 - 100 * float(y.place(value)):.2f}%">{y.words(value)}</span>'
            for value in y.ticks(3 if small else 5)
        )
    )
    below = "".join(
        f'<span style="left:{100 * float(x.place(value)):.2f}%">{x.words(value)}</span>'
        for value in x.ticks(5 if small else 6)
    )
    svg = f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" preserveAspectRatio="none" aria-hidden="true">{inside}</svg>'
    kind = " ".join(["plot", "small" if small else "", kind, "" if y is None else "with-y"]).strip()
    name = f'<div class="x-name">{text(x.name)}</div>' if x.name else ""
    area = f'<div class="ys">{left}</div><div class="area">{svg}{over}</div><div class="xs">{below}</div>'
    return f'<div class="{kind}">{area}{name}</div>'


def _path(points: Sequence[tuple[float, float]], y: Axis, kind: str) -> str:
    """A path through points whose x are fractions; y is broken where a value is not finite."""
    made, drawing = [], False
    for across, value in points:
        if not (math.isfinite(value) and math.isfinite(across)):
            drawing = False
            continue
        up = min(1.05, max(-0.05, float(y.place(value))))
        made.append(f"{'L' if drawing else 'M'}{_WIDTH * across:.1f} {_HEIGHT * (1 - up):.1f}")
        drawing = True
    return f'<path class="{kind}" d="{"".join(made)}"/>' if made else ""


def _line(line: Line, x: Axis, y: Axis) -> str:
    across, values = _thinned(x.place(line.x), line.y)
    if line.style == "dots" or np.isfinite(values).sum() == 1:  # a path of no length with round ends is a dot
        fine = np.isfinite(values)
        points = zip(across[fine], y.place(values[fine]), strict=True)
        moves = "".join(f"M{_WIDTH * a:.1f} {_HEIGHT * (1 - min(1.0, max(0.0, b))):.1f}h0" for a, b in points)
        return f'<path class="dots stroke-{line.kind}" d="{moves}"/>'
    return _path(list(zip(across.tolist(), values.tolist(), strict=True)), y, f"{line.style} stroke-{line.kind}")


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A long line with the lowest and the highest value of each bucket only; values that are not finite stay."""
    if len(x) <= 4 * _BUCKETS:
        return x, y
    kept: set[int] = set()
    for piece in np.array_split(np.arange(len(x)), _BUCKETS):
        values = y[piece]
        if (bad := np.flatnonzero(~np.isfinite(values))).size:
            kept.add(int(piece[bad[0]]))
        if np.isfinite(values).any():
            kept |= {int(piece[np.nanargmin(np.where(np.isfinite(values), values, np.nan))])}
            kept |= {int(piece[np.nanargmax(np.where(np.isfinite(values), values, np.nan))])}
    order = np.array(sorted(kept))
    return x[order], y[order]


def range_of(values: np.ndarray, *others: float, spikes: float = 0.995) -> tuple[float, float]:
    """A range for an axis: these values but for the highest (spikes), and the others, with some room."""
    finite = values[np.isfinite(values)]
    ends = [value for value in others if math.isfinite(value)]
    if finite.size:
        ends += [float(finite.min()), float(np.quantile(finite, spikes))]
    if not ends:
        return 0.0, 1.0
    low, high = min(ends), max(ends)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


class Bar(NamedTuple):
    """Parts of a whole beside each other: {kind: size}."""

    parts: Mapping[str, float]

    def html(self) -> str:
        """The picture for a page."""
        return bar(self.parts)


class Shares(NamedTuple):
    """Columns of stacked shares of 1 over an axis, in the order of `kinds`."""

    columns: Sequence[Mapping[str, float]]
    kinds: Sequence[str]
    x: Axis

    def html(self) -> str:
        """The picture for a page."""
        width, inside = _WIDTH / max(1, len(self.columns)), []
        for column, parts in enumerate(self.columns):
            top, left = _HEIGHT, column * width
            for kind in self.kinds:
                if (height := _HEIGHT * parts.get(kind, 0.0)) > 0.05:
                    top -= height
                    where = f'x="{left:.2f}" y="{max(0.0, top):.1f}" width="{width + 0.3:.2f}" height="{height:.1f}"'
                    inside.append(f'<rect class="fill-{kind}" {where}/>')
        return _framed("".join(inside), self.x, None, kind="shares")


class TimeLine(NamedTuple):
    """Rows of bars and marks over time: (name, [(begin, end)], kind). What has no length is a mark."""

    rows: Sequence[tuple[str, Sequence[tuple[float, float]], str]]
    x: Axis

    def html(self) -> str:
        """The picture for a page."""
        x, made = self.x, []
        for name, pieces, kind in self.rows:
            bars = []
            for begin, end in pieces[:2000]:
                left, right = float(x.place(begin)), float(x.place(end))
                wide = f"width:{100 * max(0.0, right - left):.3f}%" if end > begin else ""
                style = f"left:{100 * min(1.0, max(0.0, left)):.3f}%;{wide}"
                bars.append(f'<i class="fill-{kind}{"" if wide else " mark"}" style="{style}"></i>')
            made.append(f'<span class="lane-name">{text(name)}</span><div class="lane">{"".join(bars)}</div>')
        below = "".join(f'<span style="left:{100 * float(x.place(v)):.2f}%">{x.words(v)}</span>' for v in x.ticks(6))
        return Markup(f'<div class="lanes">{"".join(made)}<span></span><div class="xs">{below}</div></div>')


class HeatMap(NamedTuple):
    """Numbers [rows, columns] around a middle of 1, as cells: one colour below it and one above, the stronger the
    further away, up to 0 and 2. Row 0 is at the bottom."""

    values: np.ndarray
    x: Axis
    y: Axis

    def html(self) -> str:
        """The picture for a page."""
        rows, columns = self.values.shape
        width, height = _WIDTH / columns, _HEIGHT / rows
        strength = np.rint(_SHADES * np.clip(np.nan_to_num(self.values, nan=1.0) - 1, -1, 1)).astype(int)
        inside = []
        for shade in np.unique(strength[strength != 0]).tolist():
            cells = "".join(
                f"M{width * column:.1f} {height * (rows - 1 - row):.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"
                for row, column in np.argwhere(strength == shade).tolist()
            )
            kind = f'class="cell fill-{"over" if shade > 0 else "under"}"'
            inside.append(f'<path {kind} fill-opacity="{abs(shade) / _SHADES:.2g}" d="{cells}"/>')
        return _framed("".join(inside), self.x, self.y, kind="heat")
