"""The parameters of a configuration as a step sends them."""

import math
from dataclasses import asdict
from typing import Any, NamedTuple

import jax

from jaxdist.config.schema import Config
from jaxdist.optim.patterns import fitting
from jaxdist.parallel.wrappers.keep_fp32 import as_received
from jaxdist.plan.closed.leaves import Known
from jaxdist.precision.policy import precision_of
from jaxdist.specs import STACKED, claimed_axes, dim_of, shard_of, spec_axes


class Share(NamedTuple):
    """A parameter as a step sends it.

    elements: of its shard on one device, all rows of blocks together; what is sharded over `pipe` is gathered over it.
    rows: of blocks on a stage; else 1.
    dim, axes: how the strategy has split it (`specs.Shard`); None and () where it has not.
    parts: the number of shards. stages: those over which it is sharded, too; else 1.
    rest: axes over which its gradient is still to be summed. tensor: whether it is split over `tensor`.
    stored, received: the dtype at rest, and that in which layers get it.
    trained: whether it has a gradient.
    """

    unit: str
    name: str
    elements: int
    rows: int
    dim: int | None
    axes: tuple[str, ...]
    parts: int
    stages: int
    rest: tuple[str, ...]
    tensor: bool
    stored: Any
    received: Any
    trained: bool


def shares_of(config: Config, known: Known) -> tuple[Share, ...]:
    """The parameters of a configuration, in the order of its tree."""

    leaves = known.leaves(config)

    def make() -> tuple[Share, ...]:
        model, sizes = known.model(config), asdict(config.mesh)
        precision, frozen = precision_of(config.precision), config.optimizer.frozen
        received = jax.eval_shape(lambda params: as_received(params, precision), model.shapes)
        fits = fitting(model.shapes, frozen, key="optimizer.freeze")
        found = []
        for leaf, like, out in zip(leaves, *map(jax.tree.leaves, (received, fits)), strict=True):
            shard = shard_of(leaf.spec)
            axes = () if shard is None else tuple(axis for axis in shard.axes if sizes[axis] > 1)
            over_pipe = leaf.unit != STACKED and dim_of(leaf.spec, "pipe") is not None
            stages = sizes["pipe"] if over_pipe else 1
            found.append(
                Share(
                    leaf.unit,
                    leaf.name,
                    leaf.elements * stages,
                    leaf.shape.shape[0] // sizes["pipe"] if leaf.unit == STACKED else 1,
                    shard.dim if shard is not None and axes else None,
                    axes,
                    math.prod(sizes[axis] for axis in axes),
                    stages,
                    tuple(axis for axis in claimed_axes(leaf.spec) if sizes[axis] > 1),
                    "tensor" in spec_axes(leaf.spec) and sizes["tensor"] > 1,
                    leaf.shape.dtype,
                    like.dtype,
                    not out,
                )
            )
        return tuple(found)

    return known.get(("shares", id(leaves), config.optimizer.frozen), make)
