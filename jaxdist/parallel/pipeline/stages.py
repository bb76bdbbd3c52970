"""The assignment of blocks to pipeline stages: the order in which blocks are stored.

The rows of stacked blocks are sharded over `pipe` in equal, neighbouring parts. With v chunks, chunk c of stage s is
virtual stage c S + s, so that a stage stores blocks from v places of the model. If virtual stages have different
numbers of blocks, each of them has as many rows as the largest. Rows without a block contain zeros, and are never read.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config.rules.pipeline import check_stages, uneven
from jaxdist.errors import UserError
from jaxdist.model import BlockOrder, ModelDef
from jaxdist.specs import STACKED, PyTree


def order_of_blocks(layers: int, *, stages: int, chunks: int = 1, blocks: Sequence[int] = ()) -> np.ndarray:
    """The block in each row, -1 for none: [rows]. blocks: see `arrange`. Raises `UserError` as `check_stages` does."""
    check_stages(blocks, layers=layers, stages=stages, chunks=chunks)
    counts = np.asarray(blocks or [layers // (stages * chunks)] * (stages * chunks))
    first, row = np.cumsum(counts) - counts, np.arange(counts.max())
    rows = np.where(row < counts[:, None], first[:, None] + row, -1)  # [virtual stages, rows of each]
    return rows.reshape(chunks, stages, -1).swapaxes(0, 1).ravel()


def order_of_model(model: Any) -> np.ndarray:
    """The block in each row of a model's stacked blocks, as of `order_of_blocks`; empty for what is no `ModelDef`."""
    if not isinstance(model, ModelDef):
        return np.arange(0)
    return np.asarray(getattr(model.arranged, "rows", ()) or range(model.layers))


def rows_of_blocks(order: np.ndarray) -> np.ndarray:
    """The row of each block, [layers]: the inverse of `order_of_blocks`."""
    rows = np.flatnonzero(order >= 0)
    return rows[np.argsort(order[rows])]


def take_rows(leaf: jax.Array, which: np.ndarray, *, dim: int = 0) -> jax.Array:
    """Rows `which` of one dim, as `leaf.take` returns them; zeros where `which` is -1."""
    rows = leaf[(slice(None),) * dim + (which,)]
    if (which >= 0).all():
        return rows
    return jnp.where((which >= 0).reshape(-1, *[1] * (leaf.ndim - 1 - dim)), rows, jnp.zeros((), leaf.dtype))


def arrange_rows(blocks: PyTree, order: np.ndarray) -> PyTree:
    """Leaves [layers, ...], in the order of the model, in the order of storage: [rows, ...].

    order: from `order_of_blocks`.
    """
    return jax.tree.map(lambda leaf: take_rows(leaf, order), blocks)


def arrange(model: ModelDef, *, stages: int, chunks: int = 1, blocks: Sequence[int] = ()) -> ModelDef:
    """The model, which computes the same function, with its blocks in the order that a pipeline needs.

    chunks: above 1 for the schedule `interleaved`.
    blocks: the number of blocks of each stage, such as [7, 8, 8, 7]; with chunks, of each virtual stage, chunk 0 of all
        stages first. Equal numbers if left out.

    With unequal numbers the optimizer must leave a zero parameter with a zero gradient at zero, and take no means over
    all blocks (`jaxdist.optim.per_block`). `arrange_rows` reorders parameters that exist already.
    """
    order = order_of_blocks(model.layers, stages=stages, chunks=chunks, blocks=blocks)
    if model.arranged is not None:
        raise UserError(
            f"model: is arranged for {model.arranged.stages} stages already; give the one that it was made of"
        )
    if chunks == 1 and not uneven(blocks):
        return model

    def init(key: jax.Array) -> PyTree:
        params = model.init(key)
        return {**params, STACKED: arrange_rows(params[STACKED], order)}

    shapes = {**model.shapes, STACKED: jax.eval_shape(lambda rows: arrange_rows(rows, order), model.shapes[STACKED])}
    figures = model.figures and functools.partial(_figures_of_blocks, model.figures, order)
    moved = not np.array_equal(order, np.arange(order.size))
    arranged = BlockOrder(tuple(order.tolist()) if moved else (), stages)
    return model._replace(
        init=init, shapes=shapes, figures=figures, chunks=chunks, stages=uneven(blocks), arranged=arranged
    )


def _figures_of_blocks(
    figures: Callable[[PyTree], dict[str, jax.Array]], order: np.ndarray, grads: PyTree
) -> dict[str, jax.Array]:
    """`ModelDef.figures`, whose arrays go by rows, by blocks in the order of the model."""
    found, rows = figures(grads), rows_of_blocks(order)
    for name, value in found.items():
        if value.ndim and value.shape[0] != order.size:
            raise UserError(
                f"figures: {name!r} has the shape {list(value.shape)}; allowed in this pipeline: a number, or an array"
                f" whose first dim is that of the {order.size} rows of stacked blocks"
            )
    return {name: take_rows(value, rows) if value.ndim else value for name, value in found.items()}
