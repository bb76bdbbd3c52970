"""A picture of context parallelism as SVG: which positions a device has, and in which round of a ring what is computed.

Chunks and rounds are those of the layers' own functions, called on the numbers of chunks.
"""

from typing import Any

import jax.numpy as jnp
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from jaxdist.nn.context.positions import chunks_of
from jaxdist.nn.context.ring import keys_of_round, queries_of_round
from jaxdist.plan.report.draw_rounds import INK, LINE, MUTED, STYLE, svg_text

DRAWN = 4
_COLOURS = ("#9cc3ea", "#f3c690", "#a8d8b4", "#e3b1d3")


def rounds_of_tiles(devices: int) -> dict[tuple[int, int], tuple[int, int]]:
    """{(chunk of queries, chunk of keys): (the device that computes it, in which round)}. Round 0 is a device's own."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for device in range(devices):
        own = chunks_of(device, devices)
        found |= {(q, k): (device, 0) for q in own for k in own if k <= q}
        for i in range(1, devices):
            before = jnp.asarray(device >= i)
            queries = queries_of_round(before, jnp.asarray([own]))
            keys = keys_of_round(before, jnp.asarray([chunks_of((device - i) % devices, devices)]))
            found |= {(int(q.item()), int(k.item())): (device, i) for q, k in zip(queries, keys, strict=True)}
    return found


def draw_context(devices: int = DRAWN) -> str:
    """The picture: a strip of chunks, and below it the causal mask in tiles."""
    tiles, chunks = rounds_of_tiles(devices), 2 * devices
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 6.2), layout="constrained")
        top, mask = figure.subplots(2, 1, height_ratios=[1, chunks])
        owner = {chunk: device for device in range(devices) for chunk in chunks_of(device, devices)}
        for chunk in range(chunks):
            _cell(top, chunk, 0, _COLOURS[owner[chunk]], f"device {owner[chunk]}")
        _frame(top, chunks, 1, "positions of the sequence, in chunks")
        for query in range(chunks):
            for key in range(chunks):
                device, number = tiles.get((query, key), (None, None))
                colour = "white" if device is None else _COLOURS[device]
                _cell(mask, key, query, colour, "" if number is None else str(number))
        _frame(mask, chunks, chunks, "keys", "queries")
        mask.set_title("the round in which the device of the queries computes a tile", fontsize=9, color=INK)
        data = {f"{query},{key}": list(found) for (query, key), found in sorted(tiles.items())}
        return svg_text(figure, title=f"Context parallelism on {devices} devices: zigzag, and a ring", data=data)


def _cell(axes: Axes, x: int, y: int, colour: str, text: str) -> None:
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=LINE, linewidth=0.8))
    axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8, color=INK)


def _frame(axes: Axes, width: int, height: int, below: str, beside: str = "") -> None:
    labels: Any = {"fontsize": 8, "color": MUTED}
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    axes.set_xlabel(below, **labels)
    axes.set_ylabel(beside, **labels)
