"""What a mixture of experts did: how many tokens each expert got, and whether they are balanced."""

from typing import Any

import numpy as np

from jaxdist.observe.metrics import ARRAYS, curve
from jaxdist.observe.report.charts import Axis, Figure, HeatMap
from jaxdist.observe.report.elements import Markup, folded, page_section, rows_table, sentence
from jaxdist.observe.report.record import MetricLines, RunRecord, mapping
from jaxdist.observe.report.sections.learning import small_figure

LOAD, MAX_LOAD, DROPPED = "experts/load", "experts/max_load", "experts/dropped"
# Key of metrics.jsonl: (title, what it is).
_CURVES = {
    MAX_LOAD: ("Largest load", "tokens of the busiest expert over the mean of its block"),
    DROPPED: ("Dropped", "share of choices for which an expert had no place"),
    "experts/entropy": ("Entropy of the router", "1: it prefers no expert"),
    "experts/balance_loss": ("Balance loss", "without its weight; 1: equal"),
}


def last_load(metrics: MetricLines) -> tuple[int, np.ndarray] | None:
    """(step, [blocks, experts]: tokens of each expert over the mean) of the last line that has it; None without one."""
    for line in reversed(metrics):
        load = np.array(mapping(line.get(ARRAYS)).get(LOAD, ()), float)
        if load.ndim == 2 and load.size:
            return int(line["step"]), load
    return None


def experts_line(metrics: MetricLines) -> str:
    """The balance of the last step in a few words, for the console; "" without experts."""
    found: dict[str, Any] = dict(metrics[-1]) if metrics else {}
    if MAX_LOAD not in found:
        return ""
    dropped = f", {100 * found[DROPPED]:.3g}% of choices dropped" if found.get(DROPPED) else ""
    return f"experts: the busiest got {found[MAX_LOAD]:.3g} times the mean{dropped}"


def experts_figures(record: RunRecord) -> list[Figure]:
    """The load of each expert at the end, and the curves of their balance, as far as they are recorded."""
    made = [load_figure(record, *found)] if (found := last_load(record.metrics)) else []
    for key, (title, what) in _CURVES.items():
        steps, values = curve(record.metrics, key)
        fine = values[np.isfinite(values)]
        if fine.size and not (key == DROPPED and (fine == 0).all()):
            name = key.replace("/", "_")
            made.append(small_figure(name, title, what, steps, values, "train", f"{fine[-1]:.4g} at the end"))
    return made


def load_figure(record: RunRecord, step: int, load: np.ndarray) -> Figure:
    """The heat map of a load [blocks, experts]."""
    (blocks, experts), first = load.shape, first_block(record)
    x = Axis(-0.5, experts - 0.5, "expert", whole=True)
    y = Axis(first - 0.5, first + blocks - 0.5, "block", whole=True)
    fine = load[np.isfinite(load)]
    most = f"{fine.max():.3g}" if fine.size else "none"
    idle = f"{int((load == 0).sum()):,}"
    label = (
        f"Load of {blocks:,} blocks of {experts:,} experts at step {step:,}, tokens over the mean: at most {most};"
        f" experts without a token: {idle}."
    )
    caption = (
        f"Experts across, blocks from the bottom up, at step {step:,}. The largest load is {most} times the mean;"
        f" experts without a token: {idle}."
    )
    key = {"under": "fewer tokens than the mean, down to none", "over": "more, up to twice the mean or beyond"}
    return Figure("experts_load", HeatMap(load, x, y), label, caption, key)


def first_block(record: RunRecord) -> int:
    """The number of the first block with experts, from 0: those before it have one MLP."""
    dense = mapping(mapping(record.settings.get("model")).get("moe")).get("dense")
    return dense if type(dense) is int else 0


def experts_section(record: RunRecord) -> list[tuple[str, Markup]]:
    """The section, or none for a run without experts."""
    figures = experts_figures(record)
    if not figures:
        return []
    found = last_load(record.metrics)
    parts = [sentence("The load of an expert is its number of tokens over the mean of its block: 1 is balanced.")]
    if found:
        parts += [figures.pop(0).html(), _table(*found, first_block(record))]
    parts.append(Markup(f'<div class="two">{"".join(each.html() for each in figures)}</div>'))
    return [page_section("Experts", *parts)]


def _table(step: int, load: np.ndarray, first: int) -> Markup:
    rows = []
    for number, each in enumerate(load, start=first):
        few, many = int(each.argmin()), int(each.argmax())
        every = " ".join(f"{value:.2f}" for value in each)
        rows.append((number, f"{each[many]:.3g} (expert {many})", f"{each[few]:.3g} (expert {few})", every))
    made = rows_table(["block", "largest", "smallest", "experts from 0"], rows, right=[1, 2])
    return folded(f"Load of every expert at step {step:,}", made)
