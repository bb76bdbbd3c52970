"""The table of remedies as text."""

from jaxdist.plan.remedies.table import Table
from jaxdist.plan.search.reasons import duration
from jaxdist.plan.traced.sharding import aligned
from jaxdist.specs import format_bytes


def remedies_text(table: Table, *, predicted_for: str = "") -> str:
    """The table of remedies: what each change saves on a device and what it costs, the best first.

    predicted_for: the devices of the column of seconds, as "8 x h200"; "": no column.
    """
    now = table.now
    lines = [("remedy", "peak", "saves", "", "FLOPs", "sent", "step")]
    compiled = [(each, each.cost) for each in table.remedies if each.cost is not None]
    for each, cost in compiled:
        saved, peak = table.saved(each), format_bytes(cost.memory.peak)
        flops = _growth(cost.flops, now.flops, f"{cost.flops:.3g}")
        sent = _growth(cost.wire_bytes, now.wire_bytes, format_bytes(cost.wire_bytes))
        step = "-" if cost.seconds is None else duration(cost.seconds)
        part = f"{saved / now.memory.peak:.1%}"
        lines.append((" ".join(each.overrides), peak, format_bytes(saved), part, flops, sent, step))
    text = [
        f"Remedies. As it is, a device needs {format_bytes(now.memory.peak)} at the peak of a step (state, batch, and "
        f"{format_bytes(now.memory.temporary)} temporary), computes {now.flops:.3g} FLOPs in matrix products, and "
        f"sends {format_bytes(now.wire_bytes)}:",
        *aligned([line if predicted_for else line[:-1] for line in lines], right=(1, 2, 3, 4, 5, 6)),
    ]
    if predicted_for and now.seconds is not None:
        text.append(
            f"step: predicted for {predicted_for}, not measured (docs/planner.md); as it is {duration(now.seconds)}"
        )
    elif predicted_for:
        text.append("step: nothing is predicted for a step like this one")
    for each, cost in compiled:
        if moved := cost.memory.host - now.memory.host:
            text.append(
                f"{' '.join(each.overrides)}: {format_bytes(moved)} a device is stored in host memory; each step"
                " fetches it and puts it back"
            )
    for each in table.remedies:
        if each.refused:
            text.append(f"left out: {' '.join(each.overrides) or each.name}: {each.refused}")
    return "\n".join(text)


def _growth(value: float, before: float, alone: str) -> str:
    """The growth of a figure in percent: "+12.5%"; `alone` if it was 0 before."""
    return f"{value / before - 1:+.1%}" if before else alone
