"""A picture of the phases of DataParallel and of its balanced form, from the closed forms, as SVG."""

from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxdist.lab.data_parallel import closed_forms as phases
from jaxdist.lab.data_parallel.closed_forms import Load, Sizes, loads
from jaxdist.plan.report.draw_rounds import INK, LINE, MUTED, STYLE, svg_text

DRAWN_DEVICES = 4
# Sizes that no two sums of which are alike, so that the picture's data tell which term is which.
SIZES = Sizes(parameters=4_000_000, state=0, inputs=40_000, labels=400, outputs=40_000_000, sums=4)
_BUSY, _IDLE, _ARROW = "#9cc3ea", "white", "#1f5fa8"


class Panel(NamedTuple):
    """One step of the picture: what is sent in `phase`, by its name in the closed forms, and who then computes.

    who: "all", "0" or "" for nobody.
    """

    title: str
    phase: str
    sent: str
    who: str
    computed: str


PLAIN = (
    Panel("1 replicate", phases.REPLICATE, "N", "", ""),
    Panel("2 scatter", phases.SCATTER, "X/P", "", ""),
    Panel("3 apply", "", "", "all", "forward"),
    Panel("4 gather", phases.GATHER, "O/P", "0", "loss of all outputs"),
    Panel("back: 2 and 3", phases.SCATTER_BACK, "O/P", "all", "backward"),
    Panel("5 update", phases.REDUCE, "N", "0", "sum, optimizer"),
)
BALANCED = (
    PLAIN[0],
    Panel("2 scatter", phases.SCATTER, "(X+Y)/P", "", ""),
    Panel("3 apply", "", "", "all", "forward, loss, backward"),
    Panel("4 gather", phases.GATHER, "8 bytes", "", ""),
    Panel("", "", "", "none", ""),
    PLAIN[5],
)
FORMS = {"DataParallel": (PLAIN, False), "balanced DataParallel": (BALANCED, True)}


def draw_phases() -> str:
    """The picture: a row of panels for each form, an arrow for each transfer between device 0 and another."""
    title = "DataParallel on 4 devices: N bytes of parameters, X of inputs, Y of labels, O of outputs"
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.6), layout="constrained")
        rows: Any = figure.subfigures(len(FORMS), 1)
        for row, (name, (panels, balanced)) in zip(rows, FORMS.items(), strict=True):
            row.suptitle(name, x=0.01, ha="left", fontsize=10)
            found = loads(SIZES, DRAWN_DEVICES, balanced=balanced)
            for axes, panel in zip(row.subplots(1, len(panels)), panels, strict=True):
                axes.set(xlim=(-0.6, 1.6), ylim=(3.6, -0.6), xticks=[], yticks=[])
                if panel.title:
                    _draw(axes, panel, found.get(panel.phase, Load()))
        data = {
            name: {k: list(v) for k, v in loads(SIZES, DRAWN_DEVICES, balanced=b).items()}
            for name, (_, b) in FORMS.items()
        }
        return svg_text(figure, title=title, data=data)


def _draw(axes: Axes, panel: Panel, load: Load) -> None:
    axes.set_title(panel.title, fontsize=9, color=INK)
    axes.set_xlabel(panel.computed or " ", fontsize=8, color=MUTED)
    root, others = (0.0, 1.5), [(1.0, y) for y in (0.3, 1.5, 2.7)]
    for number, (x, y) in enumerate([root, *others]):
        busy = panel.who == "all" or panel.who == str(number)
        circle = {"boxstyle": "circle,pad=0.35", "fc": _BUSY if busy else _IDLE, "ec": INK if busy else LINE}
        axes.text(x, y, str(number), ha="center", va="center", fontsize=9, bbox=circle)
    for other in others if any(load) else ():
        start, end = (root, other) if load.root_sends else (other, root)
        arrow: dict[str, str | float] = {
            "arrowstyle": "-|>",
            "color": _ARROW,
            "lw": 1.3,
            "shrinkA": 13,
            "shrinkB": 13,
            "mutation_scale": 9,
        }
        axes.annotate("", end, start, arrowprops=arrow)
    if any(load):
        axes.text(0.5, -0.35, f"{panel.sent} each", ha="center", va="center", fontsize=8, color=_ARROW)
