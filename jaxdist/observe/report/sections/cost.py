"""What a step costs: memory predicted beside measured, what is sent by axis and purpose, and what would free memory."""

import math

from jaxdist.observe.environment import flat
from jaxdist.observe.metrics import curve
from jaxdist.observe.report.charts import Bar, Figure
from jaxdist.observe.report.elements import (
    Markup,
    chips,
    page_section,
    rows_table,
    seconds_text,
    sentence,
    short_bytes,
    timing,
)
from jaxdist.observe.report.record import Prediction, RunRecord, mapping
from jaxdist.observe.report.sections.settings import shown

# Settings that say how a run saves memory.
_SAVERS = ("parallel.strategy", "parallel.microbatches", "memory.remat", "memory.offload.optimizer", "precision.policy")
_KINDS = ("params", "optim", "batch", "temp", "other")  # colours of the parts of memory, in their order


def measured_peak(record: RunRecord) -> int | None:
    """The most memory of a device that the run has seen, in bytes; None where devices do not say."""
    values = [value for value in curve(record.metrics, "peak_memory_bytes").values if math.isfinite(value)]
    return int(max(values)) if values else None


def memory_section(record: RunRecord) -> tuple[str, Markup]:
    """The memory of a device: predicted, by part, beside what was measured."""
    prediction, peak = record.prediction, measured_peak(record)
    if isinstance(prediction, str):
        parts = [sentence("The memory was not predicted. ", prediction)]
        if peak is not None:
            parts.append(sentence(f"Measured peak of a device: {short_bytes(peak)}."))
        return page_section("Memory", *parts)
    held = {name: n for name, n in mapping(record.environment.get("state_bytes")).items() if type(n) is int}
    sums = prediction.memory
    said = f"A device is predicted to need {short_bytes(prediction.peak)} at the most"
    if peak is not None:
        said += f"; the devices report {short_bytes(peak)}, {peak / (prediction.peak or 1):.2f} times that"
    why = "" if peak is not None else " Simulated devices do not report a peak." if record.simulated else ""
    picture = memory_figure(prediction).html()
    compiled, head = prediction.compiled, ["part", "predicted", "measured"]
    rows: list[list[object]] = []
    for name, size in [*sums.items(), ("peak", prediction.peak)]:
        found = peak if name == "peak" else held.get(name)
        row: list[object] = [name, short_bytes(size), "-" if found is None else short_bytes(found)]
        rows.append(row + ([short_bytes(compiled[name]) if name in compiled else "-"] if compiled else []))
        for kind, inner in prediction.inside.items() if name == "temporary" else ():
            rows.append([f"within temporary: {kind}", short_bytes(inner), "-", *(["-"] if compiled else [])])
    note = (
        "Measured: the buffers of the state on the first device, counted when it was made; the peak as the device says."
    )
    note += " The kinds within temporary need not be there at the same time."
    right = range(1, 4 if compiled else 3)
    head = [*head, "compiled"] if compiled else head
    return page_section(
        "Memory", sentence(f"{said}.{why}"), picture, rows_table(head, rows, right=right), sentence(note)
    )


def memory_figure(prediction: Prediction) -> Figure:
    """The predicted memory of a device, by part."""
    sums = prediction.memory
    kinds = dict(zip(sums, (*_KINDS, *["other"] * len(sums)), strict=False))
    words = ", ".join(f"{name} {short_bytes(size)}" for name, size in sums.items())
    said, picture = "Predicted memory of a device at its peak", Bar({kinds[name]: size for name, size in sums.items()})
    return Figure("memory", picture, f"{said}: {words}.", f"{said}.", {kinds[name]: name for name in sums})


def sent_section(record: RunRecord) -> tuple[str, Markup]:
    """What a device sends in a step, by axis and purpose, beside the time of the step."""
    prediction = record.prediction
    if isinstance(prediction, str):
        return page_section("Communication", sentence("What is sent is not known. ", prediction))
    if not prediction.sent:
        return page_section("Communication", sentence("Nothing is sent: no axis of the mesh is longer than 1."))
    total = prediction.wire_bytes
    parts: list[object] = [f"A device sends {short_bytes(total)} in each step"]
    if math.isfinite(record.step_s) and record.step_s > 0:
        rate = f"{total / record.step_s / 1e9:.3g} GB/s"
        parts += ["; the median step takes ", timing(record, seconds_text(record.step_s))]
        parts += [", so that links carry ", timing(record, rate), " on average"]
    rows = [
        (
            chips(each.axes),
            each.what,
            each.op,
            ", ".join(each.phases),
            f"{each.calls:,}",
            short_bytes(each.nbytes),
            each.link,
        )
        for each in sorted(prediction.sent, key=lambda each: -each.nbytes)
    ]
    head = ["axis", "what", "collective", "when", "calls", "sent", "link"]
    return page_section(
        "Communication", sentence(*parts, "."), sent_figure(prediction).html(), rows_table(head, rows, right=[4, 5])
    )


def sent_figure(prediction: Prediction) -> Figure:
    """What a device sends in a step, by axis."""
    merged: dict[str, float] = {}
    named: dict[str, str] = {}
    by_axis = _by_axis(prediction)
    for name, size in by_axis.items():
        kind = f"axis-{name.split('+')[0]}"
        merged[kind] = merged.get(kind, 0.0) + size
        named[kind] = f"{named[kind]}, {name}" if kind in named else f"over {name}"
    words = ", ".join(f"over {name} {short_bytes(size)}" for name, size in by_axis.items())
    said = f"Bytes that a device sends in a step: {words}."
    return Figure("sent", Bar(merged), said, said, named)


def _by_axis(prediction: Prediction) -> dict[str, float]:
    sums: dict[str, float] = {}
    for each in prediction.sent:
        name = "+".join(each.axes)
        sums[name] = sums.get(name, 0.0) + each.nbytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def remedies_section(record: RunRecord) -> tuple[str, Markup]:
    """The changes that save memory: which the run uses, and what each other would free."""
    if not record.remedies:
        return page_section("Remedies", sentence("The settings of the run are not known, so nothing is proposed."))
    compiled = any(each.saves is not None for each in record.remedies)
    settings = flat(record.settings)
    said = ", ".join(f"{key} {shown(settings[key])}" for key in _SAVERS if key in settings)
    said = f"The run was made with {said}." if said else ""
    used = [each.name for each in record.remedies if each.state == "in use"]
    said += f" It uses {', '.join(used)}." if used else ""
    if not compiled:
        said += " What each other would free was not compiled: jaxdist report RUN --remedies does that."
    rows = []
    for each in record.remedies:
        frees = "-" if each.saves is None else short_bytes(each.saves)
        costs = [
            f"{value:.2f} × {name}"
            for value, name in ((each.flops, "FLOPs"), (each.sent, "bytes sent"))
            if value is not None and not 0.995 < value < 1.005
        ]
        rows.append((each.name, each.state, frees, ", ".join(costs) or "-", each.overrides or "-", each.why or "-"))
    head = ["remedy", "state", "would free", "would cost", "settings", "why not"]
    kept = rows if compiled else [(a, b, e, f) for a, b, _, _, e, f in rows]
    head = head if compiled else ["remedy", "state", "settings", "why not"]
    return page_section("Remedies", sentence(said), rows_table(head, kept, right=[2] if compiled else []))
