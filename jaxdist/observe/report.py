"""report.html: one self-contained page about a run, without scripts and without anything loaded from elsewhere."""

import html
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.files.regular import replace_file
from jaxdist.observe import figures
from jaxdist.observe.console import format_duration, printable
from jaxdist.observe.environment import redact_urls
from jaxdist.observe.metrics import Curve, curve, work_unit

_LONG = 12  # lists with more entries, and tables with more than 5 times as many rows, are folded
_Record = Mapping[str, Any]  # a line of metrics.jsonl


class LayoutRow(NamedTuple):
    """The layout of one parameter, and its bytes: of the part that one device holds, and of the whole."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    shards: int
    bytes_per_device: int
    bytes_total: int


class _Losses(NamedTuple):
    """Losses and baselines in one unit."""

    train: Curve
    evaluation: Curve
    unit: str
    baselines: dict[str, float]

    @property
    def own(self) -> tuple[str, float]:
        """(name, value) of the loss that is compared with the baselines: the best evaluation or, without one, the last
        training loss; NaN without either."""
        finite = self.evaluation.values[np.isfinite(self.evaluation.values)]
        if finite.size:
            return "best evaluation", float(finite.min())
        return "final training loss", float(self.train.values[-1]) if self.train.steps.size else math.nan


def _losses(metrics: Sequence[_Record], baselines: Mapping[str, float], data_info: Mapping[str, Any]) -> _Losses:
    unit, nats, bits = "nats per token", 1.0, math.log(2)  # nats, bits: factors from these to the unit
    if "samples_per_step" in data_info:  # the unit of a user's own loss is not known, and there are no baselines
        unit = "the model's own unit"
    elif data_info.get("unit") == "bytes":
        unit, nats, bits = "bits per byte", 1 / math.log(2), 1.0
    train, evaluation = (curve(metrics, key, nats) for key in ("loss", "eval/loss"))
    return _Losses(train, evaluation, unit, {name: value * bits for name, value in baselines.items()})


def _median(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else math.nan


def _rates(metrics: Sequence[_Record]) -> tuple[Curve, float, np.ndarray]:
    """Tokens (or samples) per second, their median, and a mask of the steps that the median leaves out: those slower
    than half of it, because of compilation."""
    rates = curve(metrics, f"{work_unit(metrics)}_per_s")
    low = rates.values < _median(rates.values) / 2
    return rates, _median(rates.values[~low]), low


def _text(value: object) -> str:
    """Anything from outside as HTML text: escaped, without control characters and URL passwords."""
    return html.escape(redact_urls(printable(str(value))))


def _number(value: float, digits: int = 4) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> str:
    """A table of escaped cells; `right` are the columns of numbers. A long one is folded."""

    def cells(tag: str, row: Sequence[object]) -> str:
        marks = [' class="n"' if i in right else "" for i in range(len(row))]
        return "".join(f"<{tag}{mark}>{_text(cell)}</{tag}>" for mark, cell in zip(marks, row, strict=True))

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    top = f"<thead><tr>{cells('th', head)}</tr></thead>" if head else ""
    table = f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'
    return _folded(f"{len(rows)} rows", table) if len(rows) > 5 * _LONG else table


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{_text(title)}</summary>{content}</details>"


def _values(values: Mapping[str, Any]) -> str:
    """A mapping as a table of names and values; mappings inside it as `name value` pairs, long lists folded."""
    rows = []
    for name, value in values.items():
        items = [f"{k}: {v}" for k, v in value.items()] if isinstance(value, Mapping) else value
        if items is None or items == []:
            cell = "-"
        elif isinstance(items, Sequence) and not isinstance(items, str):
            shown = "<br>".join(map(_text, items))
            cell = shown if len(items) <= _LONG else _folded(f"{len(items)} entries", shown)
        else:
            cell = _text(f"{items:,}" if type(items) is int else items)
        rows.append(f"<tr><th>{_text(name)}</th><td>{cell}</td></tr>")
    if not rows:
        return "<p>Nothing recorded.</p>"
    return f'<div class="scroll"><table class="values"><tbody>{"".join(rows)}</tbody></table></div>'


def _section(name: str, *parts: str) -> str:
    return f'<section id="{name.lower()}"><h2>{_text(name)}</h2>{"".join(parts)}</section>'


def _figure(image: str, caption: str) -> str:
    return f"<figure>{image}<figcaption>{_text(caption)}</figcaption></figure>"


def _cards(metrics: Sequence[_Record], losses: _Losses, data_info: Mapping[str, Any]) -> str:
    """The summary at the top: (title, value, note) of each card."""
    train, evaluation, work, (rates, rate, _) = losses.train, losses.evaluation, work_unit(metrics), _rates(metrics)
    per_step = data_info.get(f"{work}_per_step") if metrics else None
    usable = rates.values[np.isfinite(rates.values) & (rates.values > 0)]
    seen, wall = ("-", "not recorded"), "-"
    if per_step:
        seen = f"{per_step * max(record['step'] for record in metrics):,.0f}", ""
        wall = format_duration(float((per_step / usable).sum())) if usable.size else "-"
    final, best = ("-", "no step recorded"), ("-", "no evaluation recorded")
    if train.steps.size:
        final = _number(train.values[-1]), f"{losses.unit}, step {train.steps[-1]:,}"
    if np.isfinite(evaluation.values).any():
        where = int(np.argmin(np.where(np.isfinite(evaluation.values), evaluation.values, np.inf)))
        best = _number(evaluation.values[where]), f"{losses.unit}, step {evaluation.steps[where]:,}"
    elif evaluation.steps.size:
        best = "-", "none is finite"
    cards = [
        ("Final training loss", *final),
        ("Best evaluation", *best),
        ("Baselines beaten", *_beaten(losses)),
        (f"{work.capitalize()} seen", *seen),
        ("Median throughput", f"{rate:,.0f}" if math.isfinite(rate) else "-", f"{work}/s"),
        ("Wall time", wall, "in training steps"),
    ]
    items = (f"<div><dt>{_text(a)}</dt><dd>{_text(b)}<small>{_text(c)}</small></dd></div>" for a, b, c in cards)
    return f'<dl class="cards">{"".join(items)}</dl>'


def _beaten(losses: _Losses) -> tuple[str, str]:
    """How many baselines the run beats, and the hardest of these."""
    name, own = losses.own
    if not losses.baselines or not math.isfinite(own):
        return "-", "nothing to compare"
    beaten = {key: value for key, value in losses.baselines.items() if value > own}
    hardest = min(beaten.items(), key=lambda item: item[1], default=None)
    note = f"by the {name}" if hardest is None else f"hardest: {hardest[0]}, {_number(hardest[1])}"
    return f"{len(beaten)} of {len(losses.baselines)}", note


def _baseline_table(losses: _Losses) -> str:
    if not losses.baselines:
        return "<p>No baselines were given.</p>"
    name, own = losses.own
    ordered = sorted(losses.baselines.items(), key=lambda item: -item[1])
    rows = [(key, _number(value), f"{value - own:+.4f}" if math.isfinite(own) else "-") for key, value in ordered]
    return _table(["baseline", losses.unit, f"minus the {name}"], rows, right=[1, 2])


def _loss_section(losses: _Losses) -> str:
    train, evaluation, unit, drawn = losses.train, losses.evaluation, losses.unit, losses.baselines
    image = figures.loss_figure(train, evaluation, baselines=drawn, unit=unit)
    bad = train.steps[~np.isfinite(train.values)]
    caption = f"Loss in {unit}" + (" (nats per byte divided by ln 2)." if unit == "bits per byte" else ".")
    if bad.size:
        caption += f" {bad.size:,} of {train.steps.size:,} steps had a loss that is not finite, first step {bad[0]:,}."
    if np.isfinite(train.values).any():
        _, high = figures.loss_range(train, evaluation, drawn)
        above = int((np.isfinite(train.values) & (train.values > high)).sum())
        caption += f" Steps above the axis: {above:,}." if above else ""
    rows = [(f"{step:,}", _number(value)) for step, value in zip(*evaluation, strict=True)]
    table = _folded(f"Evaluations ({len(rows)})", _table(["step", unit], rows, right=[0, 1])) if rows else ""
    return _section("Loss", _figure(image, caption), _baseline_table(losses), table)


def _throughput_section(metrics: Sequence[_Record]) -> str:
    (rates, median, low), unit = _rates(metrics), work_unit(metrics)
    image = figures.throughput_figure(rates, median=median, low=low, unit=unit)
    caption = f"{unit.capitalize()} per second, all devices together."
    if low.any():
        slow = rates.steps[low]
        named = ", ".join(f"{step:,}" for step in slow[:6]) + (" ..." if slow.size > 6 else "")
        caption += (
            f" Left out of the axis range and the median: {slow.size:,} of {rates.steps.size:,} steps, slower than half"
            f" the median (step {named}). The first step, and the first after a resume, include compilation."
        )
    return _section("Throughput", _figure(image, caption))


def _mesh_section(mesh_axes: Mapping[str, int], devices: Sequence[str]) -> str:
    count = math.prod(mesh_axes.values())
    active = " × ".join(f"{axis} {size}" for axis, size in mesh_axes.items() if size > 1) or "every axis has size 1"
    kinds = Counter(devices)
    named = ", ".join(f"{n:,} × {kind}" for kind, n in kinds.most_common())
    named = named if len(kinds) <= 4 else f"{devices[0]} ... {devices[-1]}"
    image = figures.mesh_figure(mesh_axes, [printable(device) for device in devices])
    caption = f"{count:,} {'device' if count == 1 else 'devices'}: {active}. Devices: {named or 'not recorded'}."
    if not figures.draws_devices(mesh_axes):
        caption += " Each strip is one axis, outermost first; its note is the distance between neighbours along it."
    return _section("Mesh", _figure(image, caption))


def _layout_section(layout: Sequence[LayoutRow]) -> str:
    units: dict[str, tuple[int, int]] = {}
    for row in layout:
        unit = re.split(r"[/.]", printable(row.path))[0]
        part, whole = units.get(unit, (0, 0))
        units[unit] = (part + row.bytes_per_device, whole + row.bytes_total)
    part, whole = sum(row.bytes_per_device for row in layout), sum(row.bytes_total for row in layout)
    held = f"Parameters: one device holds {figures.short_bytes(part)} of {figures.short_bytes(whole)}."
    size = lambda row: map(figures.short_bytes, (row.bytes_per_device, row.bytes_total))  # noqa: E731
    rows = [
        (row.path, " × ".join(map(str, row.shape)) or "scalar", row.dtype, row.spec, row.shards, *size(row))
        for row in layout
    ]
    table = _table(["parameter", "shape", "dtype", "spec", "shards", "per device", "whole"], rows, right=[4, 5, 6])
    return _section("Layout", _figure(figures.layout_figure(units), held if rows else ""), table if rows else "")


# The figures are drawn for a light page; on a dark one they are inverted, hues kept.
_CSS = """
:root { color-scheme: light dark; --panel: #f5f7fa; --line: #d8dee7; --muted: #5b6777; --link: #1d4f9c; }
@media (prefers-color-scheme: dark) { img { filter: invert(1) hue-rotate(180deg); }
  :root { --panel: #1a2029; --line: #323b48; --muted: #9aa7b8; --link: #8ab6f7; } }
* { box-sizing: border-box; }
body { margin: 0; font: 16px/1.55 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1, td { overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.75rem 0 .9rem; padding-bottom: .35rem; border-bottom: 1px solid var(--line); }
nav { display: flex; flex-wrap: wrap; gap: .1rem 1rem; }
a, summary { color: var(--link); cursor: pointer; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(16rem, 45%), 1fr)); gap: .75rem; }
.cards div, pre { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
.cards dd { margin: 0; font-size: 1.4rem; font-weight: 600; }
small { display: block; font-size: .78rem; font-weight: 400; }
small, dt, figcaption, p, thead, .values th { color: var(--muted); font-size: .87rem; }
figure { margin: 0 0 1.25rem; } img { width: 100%; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .87rem; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .34rem .8rem .34rem 0; border-bottom: 1px solid var(--line); }
.n, #layout td { white-space: nowrap; } .n { text-align: right; font-variant-numeric: tabular-nums; }
pre { font: .85rem/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def write_report(
    path: str | Path,
    *,
    title: str,
    config_yaml: str,
    environment: Mapping[str, Any],
    metrics: Sequence[_Record],
    layout: Sequence[LayoutRow],
    mesh_axes: Mapping[str, int],
    devices: Sequence[str],
    baselines: Mapping[str, float],
    samples: str,
    data_info: Mapping[str, Any],
) -> None:
    """Write the page at `path`, atomically. Everything may be empty; losses may be NaN.

    metrics: the records of `read_metrics`. "loss" and "eval/loss" are in nats per token, or in the unit of a user's own
        loss; with "tokens_per_s" or "samples_per_s"
    mesh_axes: the sizes of all axes, outermost first
    devices: kinds or names in mesh order
    baselines: in bits per token
    data_info: facts of the source, with "tokens_per_step" or "samples_per_step"; "unit" is "bytes" or "tokens"
    """
    losses = _losses(metrics, baselines, data_info)
    sample = f"<pre>{html.escape(printable(samples))}</pre>" if samples.strip() else "<p>No samples.</p>"
    shown_environment = {**environment, "command": " ".join(environment.get("command", []))}
    names = ["Loss", "Throughput", "Mesh", "Layout", "Samples", "Data", "Configuration", "Environment"]
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name in names)
    sections = [
        _loss_section(losses),
        _throughput_section(metrics),
        _mesh_section(mesh_axes, devices),
        _layout_section(layout),
        _section("Samples", sample),
        _section("Data", _values(data_info)),
        _section("Configuration", f"<pre>{_text(config_yaml)}</pre>"),
        _section("Environment", _values(shown_environment)),
    ]
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_CSS}</style></head>"
    )
    top = f"<h1>{_text(title)}</h1><nav>{links}</nav>{_cards(metrics, losses, data_info)}"
    page = f"{head}\n<body><main>{top}\n" + "\n".join(sections) + "</main></body></html>\n"
    replace_file(path, page.encode())
