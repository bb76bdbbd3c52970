"""report.html: one self-contained page about a run, without scripts and without anything loaded from elsewhere."""

import html
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.observe.console import format_duration, printable
from jaxdist.observe.environment import redact_urls
from jaxdist.observe.metrics import Curve, curve, replace_file, work_unit

_LONG = 12  # lists with more entries, and tables with more than 5 times as many rows, are folded


class LayoutRow(NamedTuple):
    """One parameter: how it is cut, and the bytes one device holds against the bytes of the whole."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    shards: int
    bytes_per_device: int
    bytes_total: int


class _Unit(NamedTuple):
    """Unit of the losses shown; factors to it from nats and from bits per byte (None: it cannot be converted)."""

    name: str
    loss: float
    baseline: float | None


def _unit(data_info: Mapping[str, Any]) -> _Unit:
    if "samples_per_step" in data_info:  # a loss of somebody else's: what it is in is not known
        return _Unit("the model's own unit", 1.0, None)
    if data_info.get("unit") == "bytes":
        return _Unit("bits per byte", 1 / math.log(2), 1.0)
    per_token = data_info.get("bytes_per_token")
    return _Unit("nats per token", 1.0, None if per_token is None else math.log(2) * float(per_token))


def _median(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else math.nan


def _rates(metrics: Sequence[Mapping[str, Any]]) -> tuple[Curve, float, np.ndarray]:
    """Tokens (or samples) per second, their median, and which steps are left out of it: those slower than half
    (compilation)."""
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


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{_text(caption)}</figcaption></figure>"


def _section(name: str, *parts: str) -> str:
    return f'<section id="{name.lower()}"><h2>{_text(name)}</h2>{"".join(parts)}</section>'


def _wall_seconds(metrics: Sequence[Mapping[str, Any]], per_step: float | None) -> float | None:
    """Seconds of training: from "wall_s" where lines have it (0 again after a resume), else from the rates."""
    total = previous = 0.0
    seen = False
    for value in (float(record["wall_s"]) for record in metrics if record.get("wall_s") is not None):
        total += previous if value < previous else 0.0
        previous, seen = value, True
    if seen:
        return total + previous
    rates = curve(metrics, f"{work_unit(metrics)}_per_s").values
    rates = rates[np.isfinite(rates) & (rates > 0)]
    return float((per_step / rates).sum()) if per_step and rates.size else None


def _seen(metrics: Sequence[Mapping[str, Any]], per_step: float | None) -> float | None:
    recorded = [record["tokens"] for record in metrics if record.get("tokens") is not None]
    if recorded:
        return float(recorded[-1])
    return per_step * max(record["step"] for record in metrics) if per_step and metrics else None


def _summary(
    metrics: Sequence[Mapping[str, Any]], baselines: Mapping[str, float], data_info: Mapping[str, Any], unit: _Unit
) -> str:
    train, evaluation = curve(metrics, "loss", unit.loss), curve(metrics, "eval/loss", unit.loss)
    _, rate, _ = _rates(metrics)
    counted = work_unit(metrics)
    per_step = data_info.get(f"{counted}_per_step")
    seen, wall = _seen(metrics, per_step), _wall_seconds(metrics, per_step)
    finite = np.isfinite(evaluation.values)
    cards: list[tuple[str, str, str]] = []
    if train.steps.size:
        cards.append(("Final training loss", _number(train.values[-1]), f"{unit.name}, step {train.steps[-1]:,}"))
    else:
        cards.append(("Final training loss", "-", "no step recorded"))
    if finite.any():
        best = int(np.nanargmin(np.where(finite, evaluation.values, np.nan)))
        where = f"{unit.name}, step {evaluation.steps[best]:,}"
        cards.append(("Best evaluation", _number(evaluation.values[best]), where))
    else:
        cards.append(("Best evaluation", "-", "no evaluation recorded" if not finite.size else "none is finite"))
    cards.append(_baseline_card(baselines, _own_loss(metrics, unit), unit))
    title = f"{counted.capitalize()} seen"
    cards.append((title, "-", "not recorded") if seen is None else (title, f"{seen:,.0f}", ""))
    cards.append(("Median throughput", f"{rate:,.0f}" if math.isfinite(rate) else "-", f"{counted}/s"))
    cards.append(("Wall time", "-" if wall is None else format_duration(wall), "in training steps"))
    items = (f"<div><dt>{_text(a)}</dt><dd>{_text(b)}<small>{_text(c)}</small></dd></div>" for a, b, c in cards)
    return f'<dl class="cards">{"".join(items)}</dl>'


def _own_loss(metrics: Sequence[Mapping[str, Any]], unit: _Unit) -> tuple[str, float]:
    """What baselines are compared with: the best evaluation or, without one, the last training loss (NaN: neither)."""
    evaluation = curve(metrics, "eval/loss", unit.loss).values
    finite = evaluation[np.isfinite(evaluation)]
    if finite.size:
        return "best evaluation", float(finite.min())
    train = curve(metrics, "loss", unit.loss).values
    return "final training loss", float(train[-1]) if train.size else math.nan


def _baseline_card(baselines: Mapping[str, float], own: tuple[str, float], unit: _Unit) -> tuple[str, str, str]:
    if not baselines or unit.baseline is None or not math.isfinite(own[1]):
        return "Baselines beaten", "-", "nothing to compare"
    beaten = {name: value for name, value in baselines.items() if value * unit.baseline > own[1]}
    if not beaten:
        return "Baselines beaten", f"0 of {len(baselines)}", f"by the {own[0]}"
    hardest = min(beaten, key=lambda name: beaten[name])
    best = _number(beaten[hardest] * unit.baseline)
    return "Baselines beaten", f"{len(beaten)} of {len(baselines)}", f"hardest: {hardest}, {best}"


def _baseline_table(metrics: Sequence[Mapping[str, Any]], baselines: Mapping[str, float], unit: _Unit) -> str:
    if not baselines:
        return "<p>No baselines were given.</p>"
    if unit.baseline is None:
        rows: list[Sequence[object]] = [(key, _number(value)) for key, value in baselines.items()]
        note = "<p>The data are tokens of unknown length in bytes, so these do not compare with the losses above.</p>"
        return _table(["baseline", "bits per byte"], rows, right=[1]) + note
    name, own = _own_loss(metrics, unit)
    ordered = sorted(((key, value * unit.baseline) for key, value in baselines.items()), key=lambda item: -item[1])
    rows = [(key, _number(value), f"{value - own:+.4f}" if math.isfinite(own) else "-") for key, value in ordered]
    return _table(["baseline", unit.name, f"minus the {name}"], rows, right=[1, 2])


def _loss_section(metrics: Sequence[Mapping[str, Any]], baselines: Mapping[str, float], unit: _Unit) -> str:
    from jaxdist.observe import figures

    train, evaluation = curve(metrics, "loss", unit.loss), curve(metrics, "eval/loss", unit.loss)
    drawn = {} if unit.baseline is None else {name: value * unit.baseline for name, value in baselines.items()}
    svg = figures.loss_figure(train, evaluation, baselines=drawn, unit=unit.name)
    bad = train.steps[~np.isfinite(train.values)]
    caption = f"Loss in {unit.name}" + (" (nats per byte divided by ln 2)." if unit.name == "bits per byte" else ".")
    if bad.size:
        caption += f" {bad.size:,} of {train.steps.size:,} steps had a loss that is not finite, first step {bad[0]:,}."
    if np.isfinite(train.values).any():
        _, high = figures.loss_range(train, evaluation, drawn)
        above = int((np.isfinite(train.values) & (train.values > high)).sum())
        caption += f" Steps above the axis: {above:,}." if above else ""
    rows = [(f"{step:,}", _number(value)) for step, value in zip(*evaluation, strict=True)]
    table = _folded(f"Evaluations ({len(rows)})", _table(["step", unit.name], rows, right=[0, 1])) if rows else ""
    return _section("Loss", _figure(svg, caption), _baseline_table(metrics, baselines, unit), table)


def _throughput_section(metrics: Sequence[Mapping[str, Any]]) -> str:
    from jaxdist.observe import figures

    (rates, median, low), unit = _rates(metrics), work_unit(metrics)
    svg = figures.throughput_figure(rates, median=median, low=low, unit=unit)
    caption = f"{unit.capitalize()} per second, all devices together."
    if low.any():
        slow = rates.steps[low]
        named = ", ".join(f"{step:,}" for step in slow[:6]) + (" ..." if slow.size > 6 else "")
        caption += (
            f" Left out of the axis range and the median: {slow.size:,} of {rates.steps.size:,} steps, slower than half"
            f" the median (step {named}). The first step, and the first after a resume, include compilation."
        )
    return _section("Throughput", _figure(svg, caption))


def _mesh_section(mesh_axes: Mapping[str, int], devices: Sequence[str]) -> str:
    from jaxdist.observe import figures

    count = math.prod(mesh_axes.values())
    active = " × ".join(f"{axis} {size}" for axis, size in mesh_axes.items() if size > 1) or "every axis has size 1"
    kinds = Counter(devices)
    named = ", ".join(f"{n:,} × {kind}" for kind, n in kinds.most_common())
    named = named if len(kinds) <= 4 else f"{devices[0]} ... {devices[-1]}"
    svg = figures.mesh_figure(mesh_axes, [printable(device) for device in devices])
    caption = f"{count:,} {'device' if count == 1 else 'devices'}: {active}. Devices: {named or 'not recorded'}."
    if not figures.draws_devices(mesh_axes):
        caption += " Each strip is one axis, outermost first; its note is the distance between neighbours along it."
    return _section("Mesh", _figure(svg, caption))


def _layout_section(layout: Sequence[LayoutRow]) -> str:
    from jaxdist.observe import figures

    units: dict[str, tuple[int, int]] = {}
    for row in layout:
        unit = re.split(r"[/.]", printable(row.path))[0]
        part, whole = units.get(unit, (0, 0))
        units[unit] = (part + row.bytes_per_device, whole + row.bytes_total)
    part, whole = sum(row.bytes_per_device for row in layout), sum(row.bytes_total for row in layout)
    held = f"Parameters: one device holds {figures.short_bytes(part)} of {figures.short_bytes(whole)}."
    rows = [
        (
            row.path,
            " × ".join(map(str, row.shape)) or "scalar",
            row.dtype,
            row.spec,
            row.shards,
            figures.short_bytes(row.bytes_per_device),
            figures.short_bytes(row.bytes_total),
        )
        for row in layout
    ]
    table = _table(["parameter", "shape", "dtype", "spec", "shards", "per device", "whole"], rows, right=[4, 5, 6])
    return _section("Layout", _figure(figures.layout_figure(units), held if rows else ""), table if rows else "")


_CSS = """
:root { color-scheme: light dark; --page: #ffffff; --panel: #f5f7fa; --line: #d8dee7; --ink: #1b2430; --muted: #5b6777;
  --grid: #e4e8ee; --train: #2563b8; --eval: #c2410c; --baseline: #6b7280; --whole: #cfdbec; --link: #1d4f9c; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --panel: #1a2029; --line: #323b48; --ink: #e4e9f0;
  --muted: #9aa7b8; --grid: #29313c; --train: #6ea8f5; --eval: #f59a5b; --baseline: #98a3b3; --whole: #34465f;
  --link: #8ab6f7; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0 0 .35rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.75rem 0 .9rem; padding-bottom: .35rem; border-bottom: 1px solid var(--line); }
nav { display: flex; flex-wrap: wrap; gap: .1rem 1rem; }
nav a { color: var(--link); text-decoration: none; } nav a:hover { text-decoration: underline; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(16rem, 45%), 1fr)); gap: .75rem;
  margin: 1.5rem 0 0; }
.cards div { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
.cards dt { color: var(--muted); font-size: .82rem; }
.cards dd { margin: .1rem 0 0; font-size: 1.4rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.cards small { display: block; font-size: .78rem; font-weight: 400; color: var(--muted); }
figure { margin: 0 0 1.25rem; } figure svg { display: block; width: 100%; height: auto; }
figcaption, p { color: var(--muted); font-size: .9rem; margin: .6rem 0; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .87rem; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .34rem .8rem .34rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } thead th { color: var(--muted); white-space: nowrap; }
tbody tr:last-child > * { border-bottom: 0; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
#layout td { white-space: nowrap; }
#layout td:first-child, #layout td:nth-child(4) { font-family: ui-monospace, Menlo, Consolas, monospace; }
.values th { width: 11rem; color: var(--muted); font-weight: 500; } .values td { overflow-wrap: anywhere; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .9rem 1rem;
  overflow-x: auto; font: .85rem/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--link); }
"""


def write_report(
    path: str | Path,
    *,
    title: str,
    config_yaml: str,
    environment: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    layout: Sequence[LayoutRow],
    mesh_axes: Mapping[str, int],
    devices: Sequence[str],
    baselines: Mapping[str, float],
    samples: str,
    data_info: Mapping[str, Any],
) -> None:
    """Write the page at `path`, atomically. Everything may be empty; losses may be NaN.

    `metrics` are the records of `read_metrics`: "loss" and "eval/loss" in nats per token, "tokens_per_s"; optional
    "tokens" (seen so far) and "wall_s" (since this process began to train). `devices` are kinds or names in mesh order,
    `mesh_axes` the sizes of all axes, outermost first. `baselines` are in bits per byte. `data_info` is a source's
    info: "unit" is "bytes" or "tokens"; optional "tokens_per_step" gives tokens seen and wall time where the records do
    not say, and "bytes_per_token" makes baselines comparable with the losses of tokens. Of samples that are no ids the
    records have "samples_per_s", `data_info` "samples_per_step", and losses are in whatever unit they are.
    """
    unit = _unit(data_info)
    sample = f"<pre>{html.escape(printable(samples))}</pre>" if samples.strip() else "<p>No samples.</p>"
    shown_environment = {**environment, "command": " ".join(environment.get("command", []))}
    names = ["Loss", "Throughput", "Mesh", "Layout", "Samples", "Data", "Configuration", "Environment"]
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name in names)
    sections = [
        _loss_section(metrics, baselines, unit),
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
    top = f"<h1>{_text(title)}</h1><nav>{links}</nav>{_summary(metrics, baselines, data_info, unit)}"
    page = f"{head}\n<body><main>{top}\n" + "\n".join(sections) + "</main></body></html>\n"
    replace_file(path, page.encode())
