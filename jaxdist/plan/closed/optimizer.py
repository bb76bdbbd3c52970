"""What the optimizer sends: Muon's exchanges, which are in the step's own program.

What the compiler adds for norms and means is not counted: sums of numbers, some hundred bytes.
"""

import math

import jax

from jaxdist.config.schema import Config
from jaxdist.optim.muon import muon_dims
from jaxdist.optim.patterns import fitting
from jaxdist.optim.per_block import counted_dims
from jaxdist.plan.closed.calls import AxisSizes
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.closed.sent import Transfer
from jaxdist.plan.traced.ledger import wire_bytes
from jaxdist.specs import axes_by_dim, is_model


def sent_by_optimizer(config: Config, known: Known, sizes: AxisSizes) -> list[Transfer]:
    """What the optimizer sends by its own collectives (`jaxdist.optim.muon.on_whole_matrices`), before the compiler."""
    if config.optimizer.name != "muon":
        return []
    model, found = known.model(config), list[Transfer]()
    assert is_model(model.shapes)
    frozen = jax.tree.leaves(fitting(model.shapes, config.optimizer.frozen, key="optimizer.freeze"))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(model.shapes)]
    dims = jax.tree.leaves(muon_dims(model.shapes), is_leaf=lambda node: node is None or not isinstance(node, dict))
    for path, leaf, matrices, out in zip(paths, known.leaves(config), dims, frozen, strict=True):
        if matrices is None or out:
            continue
        lead, axes = 1 + counted_dims(path), axes_by_dim(leaf.spec, len(leaf.shape.shape))
        local = [n // math.prod(sizes[axis] for axis in each) for n, each in zip(leaf.shape.shape, axes, strict=True)]
        cuts = [axis for each in axes[lead:] for axis in each if sizes[axis] > 1]
        rows, parts = math.prod(local[:lead]), math.prod(sizes[axis] for axis in cuts)
        nbytes = (rows + -rows % parts) * math.prod(local[lead:]) * leaf.shape.dtype.itemsize
        for axis in cuts:  # there and back
            wire = wire_bytes("all_to_all", nbytes, sizes[axis])
            found.append(Transfer("all_to_all", (axis,), sizes[axis], wire, (2,), "once a step", "optimizer"))
    return found
