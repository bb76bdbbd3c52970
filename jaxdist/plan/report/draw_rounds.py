"""Pictures of rounds, as SVG: a column a rank, time downwards, an arrow a message.

The messages themselves are in the file too (its description, as JSON): a picture can be compared with a program.
"""

import io
import json
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from jaxdist.plan.traced.rounds import Message, Round, received, sent

_INK, _MUTED, _LINE, ARROW, SWAP, SHADE = "#1b1f24", "#5c6670", "#c3cad1", "#1f5fa8", "#c2410c", "#edf2f7"
_STYLE: Any = {
    "svg.fonttype": "path",
    "svg.hashsalt": "jaxdist",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": _INK,
    "text.parse_math": False,
}
_WIDTH, _LANE, _GAP = 7.0, 0.19, 0.15  # inches: of the picture, of a row of arrows, between rounds
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.85, 1.05, 0.78, 0.55  # inches around the columns
_DC = "{http://purl.org/dc/elements/1.1/}description"

Arrow = tuple[int, int, bool]  # source, target, whether the target sends to the source as well


def share(nbytes: int, whole: int) -> str:
    """Bytes as a fraction of N: "N/4", "3/2 N", "N", "0"."""
    part = Fraction(nbytes, whole)
    if part.numerator == 0:
        return "0"
    if part.denominator == 1:
        return "N" if part == 1 else f"{part.numerator} N"
    return f"N/{part.denominator}" if part.numerator == 1 else f"{part.numerator}/{part.denominator} N"


def arrows(messages: Sequence[Message]) -> list[Arrow]:
    """One arrow a message, but one with two heads for two ranks that send to each other in one ppermute."""
    ends = {(m.source, m.target, m.call) for m in messages}
    found = []
    for message in messages:
        both = (message.target, message.source, message.call) in ends
        if not both or message.source < message.target:
            found.append((message.source, message.target, both))
    return found


def lanes(found: Sequence[Arrow]) -> list[list[Arrow]]:
    """Arrows that do not overlap, in rows: as few as going through them once finds."""
    rows: list[list[Arrow]] = []
    for arrow in sorted(found, key=lambda a: (abs(a[0] - a[1]), a[0] > a[1], min(a[:2]))):
        low, high = sorted(arrow[:2])
        free = [row for row in rows if all(max(a[:2]) <= low or min(a[:2]) >= high for a in row)]
        free = [row for row in free if (row[0][0] < row[0][1]) == (arrow[0] < arrow[1])]  # one direction a row
        if free:
            free[0].append(arrow)
        else:
            rows.append([arrow])
    return rows


def draw_rounds(rounds: Sequence[Round], n: int, *, whole: int, title: str, inner: int | None = None) -> str:
    """SVG of the rounds of n ranks. whole: the bytes called N. inner: ranks in a row shaded as a neighbourhood."""
    rows = [lanes(arrows(messages)) for messages in rounds]
    height = _TOP + _BOTTOM + sum(len(lane) * _LANE + _GAP for lane in rows)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), facecolor="white")
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, _WIDTH)
        axes.set_ylim(height, 0)
        columns = [_LEFT + (_WIDTH - _LEFT - _RIGHT) * (rank + 0.5) / n for rank in range(n)]
        _frame(axes, columns, height, title, inner)
        if any(both for row in rows for lane in row for *_, both in lane):
            axes.text(_WIDTH - 0.1, 0.2, "two heads: an exchange", ha="right", va="center", fontsize=8, color=SWAP)
        y = _TOP
        for number, (messages, lane_rows) in enumerate(zip(rounds, rows, strict=True), start=1):
            middle = y + (len(lane_rows) * _LANE + _GAP) / 2
            axes.text(0.14, middle, f"round {number}", va="center", color=_MUTED)
            sizes = sorted({message.nbytes for message in messages})
            text = share(sizes[0], whole) if len(sizes) == 1 else f"{share(sizes[0], whole)}, {share(sizes[-1], whole)}"
            axes.text(_WIDTH - _RIGHT + 0.1, middle, f"{len(messages)} × {text}", va="center")
            for k, row in enumerate(lane_rows):
                for arrow in row:
                    _arrow(axes, columns, y + _GAP / 2 + (k + 0.5) * _LANE, arrow)
            y += len(lane_rows) * _LANE + _GAP
            axes.plot([0.14, _WIDTH - 0.1], [y, y], color=_LINE, lw=0.5)
        for rank, column in enumerate(columns):
            text = f"sends {share(sent(rounds, n)[rank], whole)}\nreceives {share(received(rounds, n)[rank], whole)}"
            axes.text(column, y + 0.08, text, ha="center", va="top", fontsize=8, linespacing=1.3, color=_MUTED)
        data = {"N": whole, "rounds": [[[m.source, m.target, m.nbytes] for m in messages] for messages in rounds]}
        return svg_text(figure, title=title, data=data)


def _frame(axes: Axes, columns: Sequence[float], height: float, title: str, inner: int | None) -> None:
    """Title, columns with their ranks, and neighbourhoods."""
    axes.text(0.14, 0.2, title, va="center", fontsize=10)
    axes.text(_WIDTH - _RIGHT + 0.1, _TOP - 0.2, "messages", va="center", color=_MUTED)
    width = columns[1] - columns[0]
    for start in range(0, len(columns), inner or len(columns)):
        if inner:
            left, right = columns[start] - 0.46 * width, columns[start + inner - 1] + 0.46 * width
            axes.fill_between([left, right], 0.42, height - 0.04, color=SHADE, lw=0)
    for rank, column in enumerate(columns):
        axes.plot([column, column], [_TOP - 0.08, height - _BOTTOM], color=_LINE, lw=1.2)
        axes.text(column, _TOP - 0.2, f"rank {rank}", ha="center", va="center")


def _arrow(axes: Axes, columns: Sequence[float], y: float, arrow: Arrow) -> None:
    source, target, both = arrow
    style = {"arrowstyle": "<|-|>" if both else "-|>", "color": SWAP if both else ARROW, "lw": 1.3}
    style |= {"shrinkA": 1.5, "shrinkB": 1.5, "mutation_scale": 9}
    axes.annotate("", (columns[target], y), (columns[source], y), arrowprops=style)


def svg_text(figure: Figure, *, title: str, data: dict[str, Any]) -> str:
    """The figure as a small SVG file that is the same every time, with `data` in it: see `data_of`."""
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    buffer = io.StringIO()
    text: dict[str, Any] = {**metadata, "Title": title, "Description": json.dumps(data, separators=(",", ":"))}
    figure.savefig(buffer, format="svg", metadata=text, facecolor="white")
    body = re.sub(r"<!--.*?-->", "", buffer.getvalue(), flags=re.DOTALL)
    body = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), body)
    return "\n".join(line.strip() for line in body.splitlines() if line.strip()) + "\n"


def data_of(svg: str) -> dict[str, Any]:
    """The data in a picture; of `draw_rounds`: {"N": bytes, "rounds": [[[source, target, bytes], ...], ...]}."""
    description = next(ElementTree.fromstring(svg).iter(_DC)).text
    data: dict[str, Any] = json.loads(description or "{}")
    return data
