"""The page that compares runs: their results in one table, their settings that differ, their losses in one figure."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxdist.files.regular import replace_file
from jaxdist.observe.environment import flat
from jaxdist.observe.metrics import Curve, curve, smooth
from jaxdist.observe.report.account import Account, account_of
from jaxdist.observe.report.charts import Axis, Chart, Figure, Line, range_of
from jaxdist.observe.report.elements import (
    Markup,
    page_section,
    rows_table,
    seconds_text,
    sentence,
    short_bytes,
    swatch,
    text,
    timing,
)
from jaxdist.observe.report.page import page
from jaxdist.observe.report.record import Losses, RunRecord, losses_of, median
from jaxdist.observe.report.sections.cost import measured_peak
from jaxdist.observe.report.sections.learning import headline, wall_seconds
from jaxdist.observe.report.sections.running import loss_text, speed_of
from jaxdist.observe.report.sections.settings import shown

_COLOURS = 6
_OWN = ("observe.", "checkpoint.keep")  # settings that change no result


def _differences(records: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """(setting, its value in each run), where they are not all the same."""
    every = [flat(record.settings) for record in records]
    keys = dict.fromkeys(key for settings in every for key in settings)
    rows = [(key, [shown(settings[key]) if key in settings else "-" for settings in every]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1 and not key.startswith(_OWN)]


def _results(record: RunRecord, losses: Losses, account: Account | None) -> list[object]:
    kind, own, step = losses.own
    prediction, peak = record.prediction, measured_peak(record)
    mfu = median(curve(record.metrics, "mfu").values)
    computing = account.seconds.get("device", 0.0) / account.total if account else math.nan
    return [
        f"{record.last_step:,}",
        f"{loss_text(own)} {losses.unit}, {kind}, step {step:,}",
        loss_text(losses.train.values[-1]) if losses.train.steps.size else "-",
        timing(record, f"{record.rate:,.0f} {record.unit}/s") if math.isfinite(record.rate) else "-",
        timing(record, speed_of(record)),
        timing(record, seconds_text(wall_seconds(record, account))),
        f"{mfu:.1%}" if math.isfinite(mfu) else "-",
        f"{computing:.1%}" if math.isfinite(computing) else "-",
        "-" if isinstance(prediction, str) else short_bytes(prediction.peak),
        "-" if peak is None else short_bytes(peak),
        "-" if isinstance(prediction, str) else short_bytes(prediction.wire_bytes),
    ]


_RESULTS = (
    "steps",
    "best loss",
    "final training loss",
    "throughput, median",
    "time of a step, median",
    "wall time",
    "MFU, median",
    "computing",
    "memory of a device, predicted",
    "memory of a device, measured",
    "sent by a device a step",
)


def _curves(
    names: Sequence[str], curves: Sequence[Curve], x_of: Sequence[np.ndarray], x_name: str, unit: str
) -> Markup:
    lines, lows, highs = [], [], []
    for i, (name, found, x) in enumerate(zip(names, curves, x_of, strict=True)):
        values = smooth(found.values) if found.steps.size >= 30 else found.values
        if np.isfinite(values).any():
            lines.append(Line(name, x, values, f"run{i % _COLOURS}"))
            low, high = range_of(values)
            lows.append(low)
            highs.append(high)
    if not lines:
        return sentence("No loss was recorded.")
    every = np.concatenate([line.x for line in lines])
    axis = Axis(float(every.min()), float(every.max()), x_name, times=x_name.startswith("time"))
    key = {f"run{i % _COLOURS}": name for i, name in enumerate(names)}
    label = f"Training loss in {unit} over {x_name}, of {len(lines)} runs: {', '.join(names)}."
    caption = f"Training loss, smoothed, in {unit}, over {x_name}."
    picture = Chart(lines, axis, Axis(min(lows), max(highs), unit))
    return Figure("loss", picture, label, caption, key).html()


def _times(record: RunRecord, found: Curve) -> np.ndarray:
    """Seconds at each step of a curve: by the clock without stops, or else the sum of the steps before."""
    seconds = {each["step"]: each["step_s"] for each in record.metrics if each.get("step_s") is not None}
    if not seconds:
        rates = record.rates
        pairs = zip(rates.steps.tolist(), rates.values.tolist(), strict=True)
        seconds = {step: record.work / rate for step, rate in pairs if rate > 0 and math.isfinite(record.work)}
    return np.cumsum([seconds.get(step, 0.0) for step in found.steps.tolist()])


@np.errstate(over="ignore", invalid="ignore")  # a damaged file may hold any numbers
def comparison_page(records: Sequence[RunRecord]) -> str:
    """The page about several runs."""
    names = [record.title for record in records]
    names = [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, start=1)]
    every = [(losses_of(record), account_of(record.metrics)) for record in records]
    units = {losses.unit for losses, _ in every}
    own = [losses.own[1] if math.isfinite(losses.own[1]) else math.inf for losses, _ in every]
    best = [name for name, value in zip(names, own, strict=True) if value == min(own)]
    said = f"{len(records)} runs compared"
    kinds = {losses.own[0] for losses, _ in every}
    if len(units) == len(kinds) == 1 and math.isfinite(min(own)):
        kind = min(kinds).removeprefix("best ")
        said += f": the lowest {kind} is {loss_text(min(own))} {min(units)}, of {' and '.join(best)}"
    runs = [
        (swatch(f"run{i % _COLOURS}", name), headline(record, *both))
        for i, (name, record, both) in enumerate(zip(names, records, every, strict=True))
    ]
    different = _differences(records)
    settings = (
        rows_table(["setting", *names], [(key, *values) for key, values in different])
        if different
        else sentence("All settings are the same.")
    )
    columns = [_results(record, *both) for record, both in zip(records, every, strict=True)]
    rows = [(name, *(column[i] for column in columns)) for i, name in enumerate(_RESULTS)]
    curves, unit = [losses.train for losses, _ in every], " and ".join(sorted(units))
    note = " (simulated devices)" if any(record.simulated for record in records) else ""
    clocks = [_times(record, found) for record, found in zip(records, curves, strict=True)]
    figures = (
        _curves(names, curves, [found.steps for found in curves], "steps", unit),
        _curves(names, curves, clocks, f"time in steps{note}", unit),
    )
    top = f'<p class="run">{text(", ".join(names))}</p><h1>{text(said)}.</h1>'
    sections = [
        page_section("Runs", rows_table(["run", "what it was"], runs)),
        page_section("Results", rows_table(["", *names], rows)),
        page_section("Different settings", settings),
        page_section("Loss", *figures),
    ]
    return page(said, top, sections)


def write_comparison(path: str | Path, records: Sequence[RunRecord]) -> None:
    """Write the page that compares runs at `path`, atomically.

    >>> import tempfile
    >>> from jaxdist.observe.report import RunRecord, write_comparison
    >>> records = [RunRecord(name, metrics=[{"step": 1, "loss": 2.0}]) for name in ("a", "b")]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_comparison(Path(folder) / "both.html", records)
    ...     print((Path(folder) / "both.html").read_text()[:15])
    <!DOCTYPE html>
    """
    replace_file(path, comparison_page(records).encode())
