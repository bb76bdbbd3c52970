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
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxdist.plan.traced.rounds import Message, Round, received, sent

INK, MUTED, LINE = "#1b1f24", "#5c6670", "#c3cad1"
STYLE: Any = {
    "svg.fonttype": "path", "svg.hashsalt": "jaxdist", "font.family": "DejaVu Sans", "font.size": 9,
    "text.color": INK, "text.parse_math": False, "hatch.linewidth": 0.6, "axes.linewidth": 0,
    "xtick.major.size": 0, "ytick.major.size": 0, "savefig.facecolor": "white",
}  # fmt: skip
_ARROW, _SWAP, _SHADE = "#1f5fa8", "#c2410c", "#edf2f7"
_LANE, _GAP = 0.19, 0.15  # inches: of a row of arrows, between rounds
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
    """The arrows in rows, in each of which none overlap: as few rows as a single pass over the arrows finds."""
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
    heights = np.array([len(lane_rows) * _LANE + _GAP for lane_rows in rows])
    ends = np.cumsum(heights)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.0, ends[-1] + 1.2), layout="constrained")
        axes = figure.add_subplot(xlim=(-0.5, n - 0.5), ylim=(ends[-1], 0))
        axes.set_title(title, loc="left", fontsize=10)
        if any(both for lane_rows in rows for lane in lane_rows for *_, both in lane):
            axes.set_title("two heads: an exchange", loc="right", fontsize=8, color=_SWAP)
        _label(axes, rounds, n, whole, ends - heights / 2)
        axes.vlines(range(n), 0, ends[-1], color=LINE, lw=1.2)
        axes.hlines(ends, -0.5, n - 0.5, color=LINE, lw=0.5)
        if inner:
            for start in range(0, n, inner):
                axes.axvspan(start - 0.46, start + inner - 1 + 0.46, color=_SHADE, lw=0)
        for top, lane_rows in zip(ends - heights, rows, strict=True):
            for k, lane in enumerate(lane_rows):
                for arrow in lane:
                    _arrow(axes, top + _GAP / 2 + (k + 0.5) * _LANE, arrow)
        data = {"N": whole, "rounds": [[[m.source, m.target, m.nbytes] for m in messages] for messages in rounds]}
        return svg_text(figure, title=title, data=data)


def _label(axes: Axes, rounds: Sequence[Round], n: int, whole: int, middles: np.ndarray) -> None:
    """Name the ranks and the rounds, and say what each sends. middles: of the rounds, on the y axis."""
    axes.xaxis.tick_top()
    axes.set_xticks(range(n), [f"rank {rank}" for rank in range(n)])
    axes.set_yticks(middles, [f"round {number}" for number in range(1, len(rounds) + 1)], color=MUTED)
    messages = []
    for each in rounds:
        sizes = [message.nbytes for message in each]
        smallest_and_largest = [share(size, whole) for size in sorted({min(sizes), max(sizes)})]
        messages.append(f"{len(each)} × {', '.join(smallest_and_largest)}")
    right = axes.secondary_yaxis("right")
    right.set_yticks(middles, messages)
    right.set_ylabel("messages", color=MUTED)
    ends = zip(sent(rounds, n), received(rounds, n), strict=True)
    totals = [f"sends {share(out, whole)}\nreceives {share(into, whole)}" for out, into in ends]
    axes.secondary_xaxis("bottom").set_xticks(range(n), totals, fontsize=8, linespacing=1.3, color=MUTED)


def _arrow(axes: Axes, y: float, arrow: Arrow) -> None:
    source, target, both = arrow
    style = {"arrowstyle": "<|-|>" if both else "-|>", "color": _SWAP if both else _ARROW, "lw": 1.3}
    style |= {"shrinkA": 1.5, "shrinkB": 1.5, "mutation_scale": 9}
    axes.annotate("", (target, y), (source, y), arrowprops=style)


def svg_text(figure: Figure, *, title: str, data: dict[str, Any]) -> str:
    """The figure as a small SVG file that is the same every time, with `data` in it: see `data_of`."""
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    buffer = io.StringIO()
    text: dict[str, Any] = {**metadata, "Title": title, "Description": json.dumps(data, separators=(",", ":"))}
    figure.savefig(buffer, format="svg", metadata=text)
    body = re.sub(r"<!--.*?-->", "", buffer.getvalue(), flags=re.DOTALL)
    body = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), body)
    return "\n".join(line.strip() for line in body.splitlines() if line.strip()) + "\n"


def data_of(svg: str) -> dict[str, Any]:
    """The data in a picture; of `draw_rounds`: {"N": bytes, "rounds": [[[source, target, bytes], ...], ...]}."""
    description = next(ElementTree.fromstring(svg).iter(_DC)).text
    data: dict[str, Any] = json.loads(description or "{}")
    return data
