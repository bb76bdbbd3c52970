"""Arrays in their final layout from pieces on the host. A process keeps the parts of its own devices only."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import jax
import numpy as np


class ParameterPiece(NamedTuple):
    """A part of a parameter.

    - name: of the parameter, such as "blocks.mlp.up.kernel".
    - block: the number of the block that it belongs to; None: it is the whole parameter.
    - array: its numbers, without the dim of the blocks.
    """

    name: str
    block: int | None
    array: np.ndarray


def placed(
    pieces: Iterable[ParameterPiece], target: Mapping[str, jax.ShapeDtypeStruct], order: np.ndarray | None = None
) -> Iterator[tuple[str, jax.Array]]:
    """(name, array) of each parameter. On the host are this process's parts of one parameter, and one piece.

    pieces: those of a parameter are neighbours.
    target: all parameters, with shardings.
    order: the block in each row of stacked blocks, -1 for none (`order_of_blocks`); None: the model's order.
    """
    for name, group in groupby(pieces, lambda piece: piece.name):
        like = target[name]
        where = like.sharding.addressable_devices_indices_map(like.shape)
        parts: dict[Any, np.ndarray] = {}
        for index in where.values():
            bounds = _bounds(index, like.shape)
            if bounds not in parts:
                parts[bounds] = np.zeros([stop - start for start, stop in bounds], like.dtype)
        for piece in group:
            for bounds in parts:
                _put(piece, parts[bounds], bounds, order)
        arrays = _on_devices(parts, where, like.shape)
        made = jax.make_array_from_single_device_arrays(like.shape, like.sharding, arrays)
        del arrays
        yield name, made


def _on_devices(
    parts: dict[Any, np.ndarray], where: Mapping[Any, tuple[slice, ...]], shape: tuple[int, ...]
) -> list[jax.Array]:
    """The parts on the devices that keep them. Each leaves `parts`, and the host, before the next one goes."""
    devices = dict[Any, list[Any]]()
    for device, index in where.items():
        devices.setdefault(_bounds(index, shape), []).append(device)
    arrays = list[jax.Array]()
    for bounds, same in devices.items():
        part = parts.pop(bounds)
        arrays += [jax.block_until_ready(jax.device_put(part, device)) for device in same]
    return arrays


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _put(
    piece: ParameterPiece, part: np.ndarray, bounds: tuple[tuple[int, int], ...], order: np.ndarray | None
) -> None:
    """Write into a part of a parameter, which has these bounds in it, what the piece has of it."""
    if piece.block is None:
        part[...] = piece.array[tuple(slice(*each) for each in bounds)]
        return
    rows = [piece.block] if order is None else np.flatnonzero(order == piece.block).tolist()
    (first, stop), *others = bounds
    inside = piece.array[tuple(slice(*each) for each in others)]
    for row in rows:
        if first <= row < stop:
            part[row - first] = inside
