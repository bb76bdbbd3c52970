"""What the lessons share: simulated devices, and pictures as SVG text. Nothing about training is in it."""

import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import jax

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
WIDTH, LEFT, ROW = 680, 150, 30


def devices(count: int = 8) -> list[jax.Device]:
    """Eight simulated devices on any computer: each has its own memory and its own program, all share the processor."""
    if jax.config.jax_num_cpu_devices != count:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    return jax.devices()


def quickstart() -> Path:
    """The configuration of the quickstart, in the checkout that holds this file or the folder that you stand in."""
    folders = (*Path(__file__).resolve().parents, Path.cwd(), *Path.cwd().parents)
    return next(path for folder in folders if (path := folder / "configs" / "quickstart.yaml").exists())


class Picture(str):
    """SVG text, which a notebook shows."""

    def _repr_svg_(self) -> str:
        return str(self)


def show(svg: str) -> Picture:
    """The picture of a lesson. `python 04_ring.py --picture FILE` writes it; a notebook shows what is returned."""
    if "--picture" in sys.argv[1:-1]:
        Path(sys.argv[sys.argv.index("--picture") + 1]).write_text(svg, encoding="utf-8")
    return Picture(svg)


def bars(title: str, rows: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """Stacked horizontal bars: {row: {part: value}}, the sum behind each bar."""
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    colour = dict(zip(parts, COLOURS * 9, strict=False))
    scale = (WIDTH - LEFT - 110) / max(sum(row.values()) for row in rows.values())
    body = []
    for number, (name, row) in enumerate(rows.items()):
        x, y = float(LEFT), 70 + ROW * number
        body.append(_text(LEFT - 8, y + 16, name, anchor="end"))
        for part, value in row.items():
            body.append(_box(x, y, value * scale, ROW - 8, colour[part]))
            x += value * scale
        total = sum(row.values())
        body.append(_text(x + 6, y + 16, f"{total:,.0f} {unit}" if total >= 100 else f"{total:.2g} {unit}"))
    for number, part in enumerate(parts if len(parts) > 1 else []):
        x = 20 + (WIDTH - 40) / len(parts) * number
        body += [_box(x, 42, 12, 12, colour[part]), _text(x + 17, 52, part)]
    return _svg(title, 80 + ROW * len(rows), body)


def grid(title: str, rows: Mapping[str, Sequence[tuple[str, int]]]) -> str:
    """Rows of boxes: {row: [(text, number of its colour, or -1 for an empty box), ...]}."""
    wide = (WIDTH - LEFT - 20) / max(map(len, rows.values()))
    body = []
    for number, (name, row) in enumerate(rows.items()):
        y = 46 + ROW * number
        body.append(_text(LEFT - 8, y + 18, name, anchor="end"))
        for column, (text, group) in enumerate(row):
            x = LEFT + wide * column
            body.append(
                _box(x + 1, y + 1, wide - 2, ROW - 2, COLOURS[group % len(COLOURS)] if group >= 0 else "#eeeeee")
            )
            body.append(_text(x + wide / 2, y + 19, text, anchor="middle"))
    return _svg(title, 60 + ROW * len(rows), body)


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {where} rx="2" fill="{colour}" fill-opacity="0.75"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, height: float, body: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img"'
    style = 'font-family="sans-serif" font-size="12" fill="#222222"'
    back = f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>'
    top = f'<text x="20" y="24" font-size="14" font-weight="bold">{escape(title)}</text>'
    return "\n".join([f"{head} {style}>", f"<title>{escape(title)}</title>", back, top, *body, "</svg>", ""])
