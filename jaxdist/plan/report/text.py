"""An explanation as text and as a picture."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxdist.plan.explain import MEASURED, NOT_HERE, Explanation
from jaxdist.plan.traced.activations import BETWEEN_STAGES
from jaxdist.plan.traced.sharding import aligned, rows_as_text
from jaxdist.specs import format_bytes


def explanation_text(
    explanation: Explanation, *, rows: int = 24, parameters: bool = False, activations: bool = False
) -> str:
    """The report of an explanation: collectives, totals by axes, memory of a device.

    rows: how many collectives and saved arrays, the largest first; 0: all
    parameters: add the sharding table
    activations: add the arrays saved for the backward pass
    """
    rows = rows or max(len(explanation.ledger.collectives), len(explanation.activations))
    text = explanation.ledger.lines(rows, rest="--rows 0 shows all")
    if explanation.every:
        text[0] = text[0].replace("one step", "one inner step")
        if not explanation.ledger.collectives:
            text = ["Inner step: it has no collective, each replica trains by itself"]
        text += _outer_steps(explanation, rows)
    if explanation.added is not None:
        extra = format_bytes(sum(each.wire_bytes for each in explanation.added))
        text.append(f"Added by the compiler around the optimizer: {len(explanation.added)} collectives, {extra}")
    text += _comparison(explanation)
    text += ["", *memory_text(explanation)]
    text += _saved_arrays(explanation, rows) if activations else []
    text += ["", rows_as_text(explanation.parameters)] if parameters else []
    return "\n".join(text)


def _outer_steps(explanation: Explanation, rows: int) -> list[str]:
    """The tables of outer steps, and what a step sends in the mean."""
    text, inner = [], explanation.ledger.wire_bytes
    for number, each in enumerate(explanation.outer):
        part = f" of fragment {number}" if len(explanation.outer) > 1 else ""
        lines = each.lines(rows, rest="--rows 0 shows all")
        text += ["", f"Outer step{part}, once in {explanation.every} steps:", *lines[1:-1]]
        text.append(lines[-1].replace(" a step", " in it", 1))
    mean = inner + sum(each.wire_bytes for each in explanation.outer) / explanation.every
    return [*text, f"With its share of the outer steps, a device sends {format_bytes(mean)} a step"]


def memory_text(explanation: Explanation) -> list[str]:
    """The lines of the memory table of a device, and what its estimate is worth."""
    text = memory_table(explanation.memory)
    if NOT_HERE in explanation.memory:
        least, median, most = MEASURED
        text += [
            "Estimated: the most that is there at one time of the traced program, gradients and activations among it.",
            "Not in this table: arrays in other layouts, gaps between arrays. Compiled for CPU devices, the peak was",
            f"{least:.2f} to {most:.2f} times the estimate in 8 of 10 random configurations, {median:.2f} in the median"
            " (docs/plan.md). --compile measures it.",
        ]
    elif explanation.added is None:
        text.append("Estimated: of a loss a lower bound, not measured (docs/plan.md). --compile measures the peak.")
    kernel, why = explanation.attention
    if why is not None:
        text.append(
            f"Traced with {kernel}'s attention, which has a block's scores in memory; cuDNN's, which has none, is not"
            f" used: {why}"
        )
    if explanation.empty_rows:
        text.append(
            f"parallel.stages: {explanation.empty_rows} rows of every parameter of the blocks hold no block;"
            " they are zeros, and all figures count them."
        )
    return text


def memory_table(memory: Mapping[str, int]) -> list[str]:
    """The lines of a table of {purpose: bytes of one device}."""
    rows = [(f"  {name}", format_bytes(size), f"{size:,}") for name, size in memory.items()]
    return ["Memory of a device:", *aligned(rows, right=(1, 2))]


def _comparison(explanation: Explanation) -> list[str]:
    """The lines that compare the ledger with the compiled program, by op; none if nothing was compiled."""
    if not explanation.compiled:
        return []
    lines: list[tuple[str, ...]] = [("op", "ledger", "compiled", "calls: ledger", "compiled", "")]
    for op, each in explanation.compiled.items():
        figures = [f"{figure:,.0f}" for figure in each]  # in the order of the columns
        lines.append((op, *figures, "" if each.agrees else "differs"))
    title = "Beside the ledger, what is compiled for simulated devices: elements that a device sends a step, and calls:"
    text = ["", title, *aligned(lines, right=(1, 2, 3, 4))]
    if differing := [op for op, each in explanation.compiled.items() if not each.agrees]:
        text.append(f"differs: this compiler merged, dropped or repeated some of {', '.join(differing)}")
    return text


def _saved_arrays(explanation: Explanation, rows: int) -> list[str]:
    """The lines of the largest saved arrays, equal ones in one line."""
    counted = Counter(explanation.activations)
    kept = sorted(counted.items(), key=lambda item: -item[0].bytes_per_device * item[1])
    lines: list[tuple[object, ...]] = [("what", "kind", "shape", "dtype", "arrays", "bytes", "source")]
    for each, count in kept[:rows]:
        shape = "x".join(map(str, each.shape)) or "scalar"
        size = format_bytes(each.bytes_per_device * count)
        lines.append((each.what, each.kind, shape, each.dtype, count, size, each.source))
    pipeline = any(each.kind == BETWEEN_STAGES for each in explanation.activations)
    whose = "passes of all microbatches that a stage has begun" if pipeline else "pass of one microbatch"
    text = ["", f"Kept for the backward {whose}, on one device:", *aligned(lines, right=(4, 5))]
    if rest := kept[rows:]:
        left = sum(each.bytes_per_device * count for each, count in rest)
        text.append(f"... and {len(rest)} more, {format_bytes(left)}")
    return text


def draw_explanation(explanation: Explanation, path: Path, *, bars: int = 16) -> None:
    """Draw two bar charts: what a device sends in a step, by purpose, coloured by axes; and its memory.

    bars: how many purposes, the largest first
    """
    from matplotlib.figure import Figure  # half a second, which those who want no picture need not wait

    figure = Figure(figsize=(11, 5), layout="constrained")
    sent, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    totals = explanation.ledger.total("purpose")
    names = list(totals)[:bars]
    left = np.zeros(len(names))
    for i, axes in enumerate(explanation.ledger.total("axes")):
        over = [each for each in explanation.ledger.collectives if each.axes == axes]
        mib = np.array([sum(each.wire_bytes for each in over if each.purpose == name) for name in names]) / 2**20
        sent.barh(names, mib, left=left, color=f"C{i}", label="+".join(axes))
        left += mib
    more = f", the {bars} largest of {len(totals)}" if len(totals) > bars else ""
    sent.set(xlabel="MiB a step", title=f"sent by one device, by purpose{more}")
    if names:
        sent.legend(title="over", fontsize=8)
    labels = [name.replace(", ", ",\n") for name in explanation.memory]
    memory.barh(labels, [size / 2**20 for size in explanation.memory.values()], color="0.5")
    memory.set(xlabel="MiB", title="memory of one device")
    for chart in (sent, memory):
        chart.invert_yaxis()
        chart.tick_params(axis="y", labelsize=8)
    figure.savefig(path)
