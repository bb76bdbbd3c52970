"""The picture of a plan: the seconds of layouts by part, as bars."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from jaxdist.plan.report.draw_rounds import INK, MUTED, STYLE
from jaxdist.plan.search.choose import Predicted
from jaxdist.plan.search.reasons import Other, duration

_COLOURS = {"computing": "#1f5fa8", "bubble": "#c3cad1", "optimizer": "#6b8e23", "host memory": "#8a6d3b"}
_WAITS = ("#c2410c", "#e07b39", "#f2b134", "#a23b72", "#7a4fa3", "#d98880")
_BARS = 12


def draw_plan(ties: Sequence[Predicted], others: Sequence[Other], path: Path) -> None:
    """Draw the choice, its ties and the layouts that lost to an SVG or PNG."""
    shown = [*ties[: _BARS // 2], *(each.candidate for each in others if "does not fit" not in each.why)][:_BARS]
    parts = list(dict.fromkeys(name for each in shown for name in each.seconds.parts()))
    waits = [name for name in parts if name not in _COLOURS]
    colours = _COLOURS | {name: _WAITS[i % len(_WAITS)] for i, name in enumerate(waits)}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 0.9 + 0.32 * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        for row, each in enumerate(shown):
            left, found = 0.0, each.seconds.parts()
            for name in parts:
                axes.barh(row, found.get(name, 0.0), left=left, color=colours[name], height=0.68)
                left += found.get(name, 0.0)
            axes.text(left, row, f" {duration(left)}", va="center", color=MUTED)
        axes.set_yticks(range(len(shown)), [each.layout.name() for each in shown], color=INK)
        axes.get_yticklabels()[0].set_fontweight("bold")
        axes.invert_yaxis()
        axes.set_xlabel("predicted seconds of a step; the first is the choice", color=MUTED)
        handles = [matplotlib.patches.Patch(color=colours[name], label=name) for name in parts]
        axes.legend(handles=handles, loc="lower right", frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
