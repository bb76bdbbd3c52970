"""Arrays in their final layout from pieces on the host. A process keeps the parts of its own devices only."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import jax
import numpy as np


class Piece(NamedTuple):
    """A part of a parameter.

    - name: of the parameter, such as "blocks.mlp.up.kernel".
    - block: the number of the block that it belongs to; None: it is the whole parameter.
    - array: its numbers, without the dim of the blocks.
    """

    name: str
    block: int | None
    array: np.ndarray


def placed(
    pieces: Iterable[Piece], target: Mapping[str, jax.ShapeDtypeStruct], order: np.ndarray | None = None
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
            for bounds, part in parts.items():
                _put(piece, part, bounds, order)
        arrays = [jax.device_put(parts[_bounds(index, like.shape)], device) for device, index in where.items()]
        made = jax.make_array_from_single_device_arrays(like.shape, like.sharding, arrays)
        yield name, jax.block_until_ready(made)  # the parts may go now


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _put(piece: Piece, part: np.ndarray, bounds: tuple[tuple[int, int], ...], order: np.ndarray | None) -> None:
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
