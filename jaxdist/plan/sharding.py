"""How every parameter rests: a table to read before anything is allocated."""

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxdist.specs import bytes_per_device, entry_axes, path_name, shard_count, spec_leaves

PyTree = Any


class Row(NamedTuple):
    """One parameter. shard: its shape on one device. copies: on how many devices each part lies."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: P
    shard: tuple[int, ...]
    copies: int
    bytes_per_device: int


def sharding_rows(params: PyTree, specs: PyTree, mesh: Mesh | AbstractMesh) -> list[Row]:
    """A row for every leaf of `params` (arrays or ShapeDtypeStructs), in tree order."""
    rows = []
    for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(params), spec_leaves(specs), strict=True):
        entries = [entry_axes(entry) for entry in spec] + [()] * (leaf.ndim - len(spec))
        parts = [math.prod(mesh.shape[axis] for axis in axes) for axes in entries]
        shard = tuple(size // n for size, n in zip(leaf.shape, parts, strict=True))
        shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        copies, nbytes = mesh.size // shard_count(spec, mesh), bytes_per_device(shape, spec, mesh)
        rows.append(Row(path_name(path), leaf.shape, str(leaf.dtype), spec, shard, copies, nbytes))
    return rows


def sharding_table(params: PyTree, specs: PyTree, mesh: Mesh | AbstractMesh) -> str:
    """The rows as text, with totals: what rests where, and what stays whole."""
    rows = sharding_rows(params, specs, mesh)
    lines = [("parameter", "shape", "dtype", "split by", "on a device", "copies", "bytes a device")]
    for row in rows:
        named = ", ".join("+".join(entry_axes(entry)) or "-" for entry in row.spec) if any(row.spec) else "whole"
        shapes = ("x".join(map(str, shape)) or "scalar" for shape in (row.shape, row.shard))
        whole, shard = shapes
        lines.append((row.path, whole, row.dtype, named, shard, str(row.copies), f"{row.bytes_per_device:,}"))
    count = sum(math.prod(row.shape) for row in rows)
    total = sum(row.bytes_per_device for row in rows)
    lines.append(("all", f"{count:,} elements", "", "", "", "", f"{total:,}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ["  ".join([*map(str.ljust, line[:5], widths), *map(str.rjust, line[5:], widths[5:])]) for line in lines]
    return "\n".join(line.rstrip() for line in aligned)
