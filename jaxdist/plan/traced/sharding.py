"""The sharding table: the layout of every parameter, before anything is allocated."""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.init import check_divisible
from jaxdist.mesh import AnyMesh
from jaxdist.model import ModelDef
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.options import StepOptions
from jaxdist.specs import PyTree, entry_axes, path_name, placed_specs, shard_count, spec_axes, spec_leaves, without_idle


class Row(NamedTuple):
    """One parameter. shard: its shape on one device. copies: how many devices hold each shard. why: see `why_split`."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: P
    shard: tuple[int, ...]
    copies: int
    bytes_per_device: int
    why: str = ""


class Text(str):
    """A text that a notebook shows as `print` does."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self)}</pre>"


def why_split(model: ModelDef, options: StepOptions, mesh: AnyMesh) -> list[str]:
    """Why each parameter of a model is split, or is whole, in tree order."""

    def placed(options: StepOptions) -> list[P]:
        specs = get_strategy(options).place(model.shapes, model.specs, mesh)
        return [without_idle(spec, mesh) for spec in spec_leaves(placed_specs(specs, mesh))]

    name = str(getattr(options.strategy, "__name__", options.strategy))
    small = f"below parallel.min_shard_bytes {options.min_shard_bytes:,}"
    own = [without_idle(spec, mesh) for spec in spec_leaves(placed_specs(model.specs, mesh))]
    found, no_limit = placed(options), placed(replace(options, min_shard_bytes=0))
    splits = any(_added(spec, layer) - {"pipe"} for spec, layer in zip(no_limit, own, strict=True))
    undivided = "" if mesh.size == 1 else "no dim divides" if splits else f"{name} splits none"
    reasons = []
    for layer, spec, unlimited in zip(own, found, no_limit, strict=True):
        added = _added(spec, layer)
        causes = {"layer": bool(spec_axes(layer)), "pipe": "pipe" in added, name: bool(added - {"pipe"})}
        whole = small if unlimited != spec else undivided
        reasons.append(" and ".join(cause for cause, holds in causes.items() if holds) or whole)
    return reasons


def _added(spec: P, layer: P) -> set[str]:
    """The axes that a spec has beside those of the layer itself."""
    return {*spec_axes(spec)} - {*spec_axes(layer)}


def sharding_rows(params: PyTree, specs: PyTree, mesh: AnyMesh) -> list[Row]:
    """A row for every leaf of `params` (arrays or ShapeDtypeStructs), in tree order."""
    rows = []
    for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(params), spec_leaves(specs), strict=True):
        spec = without_idle(spec, mesh)
        shard, copies = NamedSharding(mesh, spec).shard_shape(leaf.shape), mesh.size // shard_count(spec, mesh)
        nbytes = math.prod(shard) * leaf.dtype.itemsize
        rows.append(Row(path_name(path), leaf.shape, str(leaf.dtype), spec, shard, copies, nbytes))
    return rows


def sharding_table(params: PyTree, specs: PyTree, mesh: AnyMesh) -> Text:
    """The rows as text, with totals: of all parameters, and of those that every device holds whole. Raises `UserError`
    for a spec that does not divide a dim.

    >>> mesh, params = jaxdist.make_mesh(fsdp=8), {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32)}
    >>> print(jaxdist.sharding_table(params, {"w": jax.P("fsdp")}, mesh))
    parameter ...
    w          16x4 ...
    """
    check_divisible(params, specs, mesh)
    return Text(rows_as_text(sharding_rows(params, specs, mesh)))


def rows_as_text(rows: Sequence[Row]) -> str:
    """See `sharding_table`."""
    lines: list[tuple[object, ...]] = []
    for row in rows:
        split = ", ".join("+".join(entry_axes(entry)) or "-" for entry in row.spec) if spec_axes(row.spec) else "whole"
        whole, shard = ("x".join(map(str, shape)) or "scalar" for shape in (row.shape, row.shard))
        lines.append((row.path, whole, row.dtype, split, shard, row.copies, f"{row.bytes_per_device:,}", row.why))
    count, unsplit = sum(math.prod(row.shape) for row in rows), [row for row in rows if not spec_axes(row.spec)]
    for name, some in (("all", rows), ("whole", unsplit)):
        held = sum(row.bytes_per_device for row in some)
        share = f"{sum(math.prod(row.shape) for row in some) / max(1, count):.1%}"
        lines.append((name, f"{len(some)} parameters, {share}", "", "", "", "", f"{held:,}", ""))
    because = "why" if any(row.why for row in rows) else ""
    heads = ("parameter", "shape", "dtype", "split by", "on a device", "copies", "bytes a device", because)
    return "\n".join(aligned([heads, *lines], right=(5, 6)))


def aligned(rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> list[str]:
    """Rows of cells as lines, in columns of equal width; the columns numbered in `right` are flush right."""
    columns = []
    for i, column in enumerate(zip(*rows, strict=True)):
        texts = [str(cell) for cell in column]
        width = max(map(len, texts))
        columns.append([text.rjust(width) if i in right else text.ljust(width) for text in texts])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
