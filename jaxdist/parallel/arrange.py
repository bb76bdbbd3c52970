"""In which order blocks rest, for stages whose blocks lie apart.

The rows of stacked blocks are cut over `pipe` in equal, neighbouring parts. With v chunks, chunk c of stage s is
virtual stage c S + s, so that a stage's rows are blocks from v places of the model.
"""

from typing import Any

import jax
import numpy as np

from jaxdist.errors import UserError
from jaxdist.nn import ModelDef
from jaxdist.specs import STACKED

PyTree = Any


def order_of_blocks(layers: int, *, stages: int, chunks: int) -> np.ndarray:
    """The block that each row holds: [layers]. Raises `UserError` unless stages * chunks divides layers."""
    if layers % (stages * chunks):
        raise UserError(f"parallel.chunks: {chunks} chunks of {stages} stages do not divide {layers} blocks; allowed:"
                        " chunks that do, or another number of layers")  # fmt: skip
    return np.arange(layers).reshape(chunks, stages, -1).swapaxes(0, 1).ravel()


def arrange(model: ModelDef, *, stages: int, chunks: int) -> ModelDef:
    """The model with its blocks in the order in which `stages` stages of `chunks` chunks need them: for the schedule
    `interleaved`. The function that it computes is the same."""
    order = order_of_blocks(model.layers, stages=stages, chunks=chunks)

    def init(key: jax.Array) -> PyTree:
        params = model.init(key)
        return {**params, STACKED: jax.tree.map(lambda leaf: leaf[order], params[STACKED])}

    return model._replace(init=init, chunks=chunks)
