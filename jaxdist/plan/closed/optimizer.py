"""What the optimizer sends: Muon's exchanges, which are in the step's own program, and what the compiler adds."""

import math
from collections import Counter

import jax
import jax.numpy as jnp

from jaxdist.config.schema import Config
from jaxdist.mesh import AXES
from jaxdist.optim.muon import muon_dims
from jaxdist.optim.per_block import FACTORED, counted_dims
from jaxdist.plan.closed.calls import AxisSizes
from jaxdist.plan.closed.leaves import Known, mesh_sizes
from jaxdist.plan.closed.sent import Transfer
from jaxdist.plan.traced.ledger import wire_bytes
from jaxdist.specs import STACKED, axes_by_dim, fitting, is_model, spec_axes


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


def added_by_compiler(config: Config, known: Known) -> list[Transfer]:
    """An estimate of what the compiler adds in the global region, where the optimizer works on whole arrays.

    These are sums of numbers over the shards of a parameter: for the norm of the gradients, which metrics and clipping
    need, and for Adafactor's means. Elementwise optimizers need none, and Muon's own exchanges are no additions.

    Tiny models in three layouts, compiled for CPUs, sent 180, 192 and 296 bytes for norms where this says 156, 192 and
    206. Adafactor sent 660 and 696 where this says 432 and 528, and with matrices large enough to be factored 18,616
    and 18,664 where this says 58,032 and 29,432: of that optimizer it tells the order of magnitude.
    """
    sizes, optimizer = dict(zip(AXES, mesh_sizes(config), strict=True)), config.optimizer
    frozen = jax.tree.leaves(fitting(known.model(config).shapes, optimizer.frozen, key="optimizer.freeze"))
    numbers = Counter[tuple[str, ...]]()  # elements that are summed, by the axes
    for leaf, out in zip(known.leaves(config), frozen, strict=True):
        axes = axes_by_dim(leaf.spec, len(leaf.shape.shape))
        local = [n // math.prod(sizes[axis] for axis in each) for n, each in zip(leaf.shape.shape, axes, strict=True)]
        lead = int(leaf.unit == STACKED)
        whole, rows = tuple(axis for axis in spec_axes(leaf.spec) if sizes[axis] > 1), math.prod(local[:lead])
        numbers[whole] += 0 if out else 1 + bool(optimizer.clip_norm)
        if out or optimizer.name != "adafactor":
            continue
        inside = tuple(axis for each in axes[lead:] for axis in each if sizes[axis] > 1)
        numbers[inside] += 2 * rows  # the root mean squares of update and parameter, block by block
        if len(local) - lead >= 2 and min(leaf.shape.shape[lead], math.prod(leaf.shape.shape[lead + 1 :])) >= FACTORED:
            for dim, each in enumerate(axes[lead:], lead):
                numbers[tuple(axis for axis in each if sizes[axis] > 1)] += math.prod(local) // local[dim]
    found = []
    for spread, count in numbers.items():
        axes_of = tuple(sorted(spread, key=AXES.index))
        n = math.prod(sizes[axis] for axis in axes_of)
        if n > 1 and count:
            wire = wire_bytes("psum", count * jnp.dtype(jnp.float32).itemsize, n)
            found.append(Transfer("psum", axes_of, n, wire, (1,), "once a step", "optimizer"))
    return found
