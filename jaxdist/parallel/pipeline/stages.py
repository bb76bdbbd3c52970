"""In which order blocks rest, for stages whose blocks lie apart or are not equally many.

The rows of stacked blocks are cut over `pipe` in equal, neighbouring parts. With v chunks, chunk c of stage s is
virtual stage c S + s, so that a stage's rows are blocks from v places of the model. Where virtual stages have different
numbers of blocks, each has as many rows as the largest; the rows that are left hold zeros, and are never read.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config.rules.pipeline import check_stages, uneven
from jaxdist.nn import ModelDef
from jaxdist.specs import STACKED, PyTree


def order_of_blocks(layers: int, *, stages: int, chunks: int = 1, blocks: Sequence[int] = ()) -> np.ndarray:
    """The block that each row holds, -1 for none: [rows]. blocks: see `arrange`. Raises `UserError`: see
    `check_stages`."""
    check_stages(blocks, layers=layers, stages=stages, chunks=chunks)
    counts = np.asarray(blocks or [layers // (stages * chunks)] * (stages * chunks))
    first, row = np.cumsum(counts) - counts, np.arange(counts.max())
    rows = np.where(row < counts[:, None], first[:, None] + row, -1)  # [virtual stages, rows of each]
    return rows.reshape(chunks, stages, -1).swapaxes(0, 1).ravel()


def rows_of_blocks(order: np.ndarray) -> np.ndarray:
    """The row that each block rests in, [layers]: the inverse of `order_of_blocks`."""
    rows = np.flatnonzero(order >= 0)
    return rows[np.argsort(order[rows])]


def take_rows(leaf: jax.Array, which: np.ndarray, *, dim: int = 0) -> jax.Array:
    """Rows `which` of one dim, as `leaf.take` has them; zeros where `which` is -1."""
    rows = leaf[(slice(None),) * dim + (which,)]
    if (which >= 0).all():
        return rows
    return jnp.where((which >= 0).reshape(-1, *[1] * (leaf.ndim - 1 - dim)), rows, jnp.zeros((), leaf.dtype))


def arrange_rows(blocks: PyTree, order: np.ndarray) -> PyTree:
    """Leaves [layers, ...], in the order of the model, as they rest: [rows, ...]. order: see `order_of_blocks`."""
    return jax.tree.map(lambda leaf: take_rows(leaf, order), blocks)


def arrange(model: ModelDef, *, stages: int, chunks: int = 1, blocks: Sequence[int] = ()) -> ModelDef:
    """The model with its blocks as `stages` stages of `chunks` chunks need them. The function that it computes is the
    same. chunks above 1 are for the schedule `interleaved`.

    blocks: how many each stage has, [7, 8, 8, 7]; with chunks each virtual stage, chunk 0 of all stages first. Without,
    equally many. Where they differ, the optimizer must leave a parameter that is zero, and whose gradient is, at zero,
    and must not reckon with means over whole leaves, as optax.adafactor does. Parameters that exist already are put
    into this order by `arrange_rows`.
    """
    order = order_of_blocks(model.layers, stages=stages, chunks=chunks, blocks=blocks)
    if chunks == 1 and not uneven(blocks):
        return model

    def init(key: jax.Array) -> PyTree:
        params = model.init(key)
        return {**params, STACKED: arrange_rows(params[STACKED], order)}

    shapes = jax.eval_shape(init, jax.random.key(0))
    return model._replace(init=init, shapes=shapes, chunks=chunks, stages=uneven(blocks))
