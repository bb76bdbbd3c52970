"""The picture of a mesh: boxes inside boxes, one colour an axis, and the parts of the model that one device holds."""

import math
import re
from collections.abc import Mapping, Sequence

from jaxdist.observe.console import printable
from jaxdist.observe.report.elements import Markup, chip, figure, page_section, rows_table, sentence, short_bytes, text
from jaxdist.observe.report.record import LayoutRow, Prediction, RunRecord

_MOST_DEVICES, _MOST_UNITS = 64, 16


def draws_devices(mesh_axes: Mapping[str, int]) -> bool:
    """Whether the picture shows every device; else it has one row an axis."""
    return math.prod(mesh_axes.values()) <= _MOST_DEVICES


def _boxes(axes: Sequence[tuple[str, int]], first: int) -> str:
    """The devices from number `first` on, axis by axis, the outermost first."""
    if not axes:
        return f'<span class="device">{first}</span>'
    (axis, size), *inner = axes
    stride = math.prod(each for _, each in inner)
    boxes = (
        f'<div class="box axis-{text(axis)}"><b>{text(axis)} {i}</b>'
        f'<div class="inside">{_boxes(inner, first + i * stride)}</div></div>'
        for i in range(size)
    )
    return "".join(boxes)


def _strips(axes: Sequence[tuple[str, int]]) -> str:
    stride, made = math.prod(size for _, size in axes), []
    for axis, size in axes:
        stride //= size
        apart = f"{stride:,} devices apart" if stride > 1 else "neighbours"
        made.append(f"<p>{chip(f'{axis} {size}', axis)} {apart}</p>")
    return "".join(made)


def mesh_section(record: RunRecord) -> tuple[str, Markup]:
    """The devices and the axes that they lie on."""
    mesh = record.mesh
    active = [(axis, size) for axis, size in mesh.items() if size > 1]
    count = math.prod(mesh.values())
    named = " × ".join(f"{axis} {size}" for axis, size in active) or "every axis has size 1"
    kinds = [(kind if kind != "cpu" else "simulated CPU", n) for kind, n in record.devices.items()]
    devices = ", ".join(f"{n:,} × {kind}" for kind, n in kinds[:4]) + (" ..." if len(kinds) > 4 else "")
    drawn = draws_devices(mesh)
    picture = f'<div class="mesh">{_boxes(active, 0)}</div>' if drawn else _strips(active)
    label = f"Mesh of {count:,} {'device' if count == 1 else 'devices'}: {named}."
    caption = f"{label} Devices: {devices or 'not recorded'}."
    if not drawn:
        caption += " Each row is one axis, outermost first, with the distance between neighbours along it."
    return page_section("Mesh", figure(picture, label=label, caption=caption))


def split_shape(row: LayoutRow) -> Markup:
    """The shape of a parameter, a chip for each dim that is split: 128 ÷ fsdp."""
    dims = [
        chip(f"{size:,} ÷ {' ÷ '.join(axes)}", axes[0]) if axes else f"{size:,}"
        for size, axes in zip(row.shape, row.spec, strict=True)
    ]
    return Markup(" × ".join(map(text, dims)) or "scalar")


def layout_section(prediction: Prediction | str) -> tuple[str, Markup]:
    """How each parameter is split, and the part that one device holds."""
    if isinstance(prediction, str):
        return page_section("Layout", sentence("The layout of the parameters is not known. ", prediction))
    layout = prediction.layout
    units: dict[str, tuple[int, int]] = {}
    for row in layout:
        unit = re.split(r"[/.]", printable(row.path))[0]
        part, whole = units.get(unit, (0, 0))
        units[unit] = (part + row.bytes_per_device, whole + row.bytes_total)
    part, whole = sum(row.bytes_per_device for row in layout), sum(row.bytes_total for row in layout)
    said = f"One device holds {short_bytes(part)} of the {short_bytes(whole)} of all parameters."
    rows = [
        (
            row.path,
            split_shape(row),
            row.dtype,
            f"1 of {row.shards:,}" if row.shards > 1 else "whole",
            short_bytes(row.bytes_per_device),
            short_bytes(row.bytes_total),
        )
        for row in layout
    ]
    head = ["parameter", "shape ÷ mesh axes", "type", "a device has", "on one device", "in all"]
    picture = figure(_unit_bars(units), label=f"{said} By part: {_units_text(units)}", caption="The bar is the whole.")
    return page_section("Layout", sentence(said), picture, rows_table(head, rows, right=[4, 5]))


def _units_text(units: Mapping[str, tuple[int, int]]) -> str:
    shown = [f"{name} {short_bytes(part)} of {short_bytes(whole)}" for name, (part, whole) in largest(units).items()]
    return "; ".join(shown)


def largest(units: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """The largest units in the order of the model; what is left of a long model as one."""
    if len(units) <= _MOST_UNITS:
        return dict(units)
    small = sorted(units, key=lambda name: units[name][1])[: len(units) - _MOST_UNITS + 1]
    rest = (sum(units[name][0] for name in small), sum(units[name][1] for name in small))
    return {name: both for name, both in units.items() if name not in small} | {f"{len(small)} others": rest}


def _unit_bars(units: Mapping[str, tuple[int, int]]) -> str:
    most = max((whole for _, whole in units.values()), default=0) or 1
    made = []
    for name, (part, whole) in largest(units).items():
        wide, held = max(0.5, 100 * whole / most), 100 * part / (whole or 1)
        made.append(
            f'<span class="lane-name">{text(name)}</span><div class="lane">'
            f'<i class="fill-whole" style="width:{wide:.2f}%">'
            f'<i class="fill-device" style="width:{held:.2f}%"></i></i></div>'
            f'<span class="lane-value">{short_bytes(part)} of {short_bytes(whole)}</span>'
        )
    return f'<div class="lanes three">{"".join(made)}</div>'
