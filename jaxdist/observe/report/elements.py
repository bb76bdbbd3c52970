"""Elements of a page: tables, cards, chips, sections. Whatever comes from outside is escaped here."""

import functools
import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.mesh import AXES
from jaxdist.observe.console import format_duration, printable
from jaxdist.observe.environment import redact_urls
from jaxdist.observe.report.record import RunRecord
from jaxdist.specs import format_bytes

_LONG = 12  # lists with more entries, and tables with more than 5 times as many rows, are folded

short_bytes = functools.partial(format_bytes, digits=".4g")


class Markup(str):
    """HTML that is not to be escaped again."""


def text(value: object) -> str:
    """Anything as HTML: markup as it is; what comes from outside escaped, without control characters and passwords."""
    if isinstance(value, Markup):
        return value
    return html.escape(redact_urls(printable(str(value))))


def number_text(value: float, digits: int = 4) -> str:
    """A number with commas: 12,345.6789."""
    return f"{value:,.{digits}f}" if math.isfinite(value) else str(value)


def seconds_text(seconds: float) -> str:
    """A time in words that fit it: "12.5 ms", "3.21 s", "1:40"."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    return format_duration(seconds).removeprefix("0:").lstrip("0") or "0"


def timing(record: RunRecord, words: str) -> Markup:
    """A measured time or rate. On simulated devices it says so: it is that of a CPU, not of the layout."""
    return Markup(f'<span class="timing">{text(words)}{" <em>(simulated)</em>" if record.simulated else ""}</span>')


def sentence(*parts: object) -> Markup:
    """A paragraph of these parts."""
    return Markup(f"<p>{''.join(map(text, parts))}</p>")


def chip(words: str, axis: str = "") -> Markup:
    """A word on a coloured ground: that of a mesh axis, or grey."""
    kind = axis if axis in AXES else "none"
    return Markup(f'<span class="chip axis-{kind}">{text(words)}</span>')


def chips(axes: Sequence[str]) -> Markup:
    """The mesh axes as chips."""
    return Markup(" ".join(chip(axis, axis) for axis in axes) or text("-"))


def swatch(kind: str, words: str) -> Markup:
    """An entry of a legend: the colour of `kind`, and its name."""
    return Markup(f'<span class="key"><i class="fill-{kind}"></i>{text(words)}</span>')


def legend(entries: Mapping[str, str]) -> Markup:
    """The legend of a figure: {kind: name}."""
    return Markup(f'<div class="legend">{"".join(swatch(kind, words) for kind, words in entries.items())}</div>')


def rows_table(head: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> Markup:
    """A table; on a narrow page each row becomes a block with the heads in front. right: the columns of numbers. A long
    one is folded."""

    kinds = [' class="n"' if i in right else "" for i in range(len(head))]

    def row(cells: Sequence[object]) -> str:
        each = zip(kinds, head, cells, strict=True)
        made = (f'<td{kind} data-head="{text(name)}">{text(cell)}</td>' for kind, name, cell in each)
        return f"<tr>{''.join(made)}</tr>"

    top = "".join(f"<th{kind}>{text(name)}</th>" for kind, name in zip(kinds, head, strict=True))
    body = "\n".join(map(row, rows))
    made = Markup(f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>')
    return folded(f"{len(rows):,} rows", made) if len(rows) > 5 * _LONG else made


def folded(title: str, *content: Markup) -> Markup:
    """Content that is shown when its title is clicked, and in print."""
    return Markup(f"<details><summary>{text(title)}</summary>{''.join(content)}</details>")


def listed(values: Sequence[object]) -> Markup:
    """Values below each other; many are folded."""
    shown = Markup("<br>".join(map(text, values)))
    return shown if len(values) <= _LONG else folded(f"{len(values):,} entries", shown)


def values_table(values: Mapping[str, Any]) -> Markup:
    """A mapping as a table of names and values; mappings inside it as `name: value` lines."""
    rows = []
    for name, value in values.items():
        items = [f"{k}: {v}" for k, v in value.items()] if isinstance(value, Mapping) else value
        if items is None or items == []:
            cell: object = "-"
        elif isinstance(items, Sequence) and not isinstance(items, str):
            cell = listed(items)
        else:
            cell = f"{items:,}" if type(items) is int else items
        rows.append(f"<tr><th>{text(name)}</th><td>{text(cell)}</td></tr>")
    if not rows:
        return sentence("Nothing was recorded.")
    return Markup(f'<div class="scroll"><table class="values"><tbody>{"".join(rows)}</tbody></table></div>')


def figure(picture: str, *, label: str, caption: object = "", key: Markup | None = None) -> Markup:
    """A picture with a text alternative, a legend above it and a caption below it."""
    below = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    image = f'<div class="picture" role="img" aria-label="{text(label)}">{picture}</div>'
    return Markup(f"<figure>{key or ''}{image}{below}</figure>")


def cards(entries: Sequence[tuple[object, object, object]]) -> Markup:
    """A grid of (title, value, note)."""
    made = (f"<div><dt>{text(a)}</dt><dd>{text(b)}<small>{text(c)}</small></dd></div>" for a, b, c in entries)
    return Markup(f'<dl class="cards">{"".join(made)}</dl>')


def page_section(name: str, *parts: Markup) -> tuple[str, Markup]:
    """(name, section): a part of the page under a heading."""
    anchor = name.lower().replace(" ", "-")
    return name, Markup(f'<section id="{anchor}"><h2>{text(name)}</h2>{"".join(parts)}</section>')


def bar(parts: Mapping[str, float], *, of: float | None = None) -> Markup:
    """Parts of a whole beside each other: {kind: size}. of: the whole; the sum by default."""
    whole = of or math.fsum(parts.values()) or 1.0
    pieces = (f'<i class="fill-{kind}" style="width:{100 * size / whole:.3f}%"></i>' for kind, size in parts.items())
    return Markup(f'<div class="bar">{"".join(pieces)}</div>')
