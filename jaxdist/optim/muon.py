"""Muon, with matrices that are whole where they are orthogonalised.

The orthogonalisation multiplies a matrix with itself, a dozen products one after the other. Left to the compiler, each
product of sharded matrices would be a collective, and the optimizer would send several times as much as the gradients.
Here one all-to-all brings each device whole matrices, of some blocks of the stack, and another brings the results back.
So all devices along the sharded axes share the work, and what is sent is in the ledger.

Legend: L blocks of a stack, l of them on one device.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding

from jaxdist.optim.per_block import counted_dims, has_stack
from jaxdist.specs import STACKED, PyTree, axes_by_dim, path_name

OPTIMIZER = "optimizer."  # the scope of what an optimizer sends, before the name of the parameter
Orthogonalise = Callable[[jax.Array], jax.Array]


def muon_dims(params: PyTree) -> PyTree:
    """The matrix dims of each parameter that Muon orthogonalises, and None for those that Adam updates.

    Muon gets the kernels of blocks, as matrices of the input dim by all output dims; stacked blocks, and the experts of
    each, are a batch of matrices. Adam gets embeddings, head and vectors (Jordan et al. 2024). In a tree that is not a
    `ModelDef`'s, Muon gets all 2-D leaves.
    """
    stacked = has_stack(params)

    def dims(path: tuple[Any, ...], leaf: Any) -> Any:
        if not stacked:
            return optax.contrib.MuonDimensionNumbers() if leaf.ndim == 2 else None
        if path[0].key != STACKED or path[-1].key != "kernel":
            return None
        return _dims_behind(1 + counted_dims(path), leaf.ndim)

    return jax.tree_util.tree_map_with_path(dims, params)


def _dims_behind(lead: int, ndim: int) -> optax.contrib.MuonDimensionNumbers:
    """Those of matrices [input, *outputs] behind `lead` dims that count matrices."""
    return optax.contrib.MuonDimensionNumbers(reduction_axis=lead, output_axis=tuple(range(lead + 1, ndim)))


def _splits(sharding: NamedSharding, ndim: int, first: int) -> Iterator[tuple[int, str]]:
    """(dim, mesh axis) of each cut of a matrix from dim `first` on; of one dim the axis that varies fastest first."""
    for dim, axes in enumerate(axes_by_dim(sharding.spec, ndim)):
        for axis in reversed(axes):
            if dim >= first and sharding.mesh.shape[axis] > 1:
                yield dim, axis


def on_whole_matrices(run: Orthogonalise, x: jax.Array, sharding: NamedSharding, *, lead: int) -> jax.Array:
    """run(x), of which every device computes whole matrices.

    run: works on each matrix of a stack [L, ...] by itself; it may get any number of them
    sharding: of x and of the result
    lead: how many first dims count matrices; 0: x is one, which every device gathers and computes
    """
    flat = max(lead - 1, 0)  # dims that become one
    cuts = [(dim - flat, axis) for dim, axis in _splits(sharding, x.ndim, lead)]
    if not cuts and not flat:
        return run(x)
    parts = math.prod(sharding.mesh.shape[axis] for _, axis in cuts)

    def exchange(x: jax.Array) -> jax.Array:  # [l, a device's part] -> [l / parts, whole], and back
        shape = x.shape
        x = x.reshape(-1, *shape[lead:])
        rows = x.shape[0]
        x = jnp.pad(x, [(0, -rows % parts), *[(0, 0)] * (x.ndim - 1)])
        for dim, axis in cuts:
            x = lax.all_to_all(x, axis, split_axis=0, concat_axis=dim, tiled=True)
        x = run(x)
        for dim, axis in reversed(cuts):
            x = lax.all_to_all(x, axis, split_axis=dim, concat_axis=0, tiled=True)
        return x[:rows].reshape(shape)

    def gather(x: jax.Array) -> jax.Array:
        for dim, axis in cuts:
            x = lax.all_gather(x, axis, axis=dim, tiled=True)
        x = run(x)
        for dim, axis in reversed(cuts):
            own = x.shape[dim] // lax.axis_size(axis)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * own, own, axis=dim)
        return x

    region = exchange if lead else gather
    return jax.shard_map(region, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec)(x)


def scale_by_muon(beta: float) -> optax.GradientTransformationExtraArgs:
    """`optax.contrib.scale_by_muon` with Nesterov momentum, and its state.

    The extra argument `shardings` of `update`, a NamedSharding for each parameter, says where whole matrices must be
    made. Without it the compiler decides.
    """
    stock = optax.contrib.scale_by_muon(beta=beta, weight_dimension_numbers=muon_dims)

    def orthogonal(x: jax.Array, dims: optax.contrib.MuonDimensionNumbers) -> jax.Array:
        # Without momentum an update of the stock transformation is its orthogonalisation.
        alone = optax.contrib.scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=dims)
        result: jax.Array = alone.update(x, alone.init(x))[0]
        return result

    def update(
        updates: PyTree, state: Any, params: PyTree = None, *, shardings: PyTree = None, **_: Any
    ) -> tuple[PyTree, Any]:
        if shardings is None:
            return stock.update(updates, state, params)
        known = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(shardings)}
        stacked, count = has_stack(updates), optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        old = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
        new = optax.tree.bias_correction(updates, beta, count)
        moved = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, old, new)

        def one(path: tuple[Any, ...], x: jax.Array, dims: optax.contrib.MuonDimensionNumbers) -> jax.Array:
            name, lead = path_name(path), (1 + counted_dims(path)) * stacked
            dims = _dims_behind(1, x.ndim + 1 - lead) if lead else dims
            with jax.named_scope(OPTIMIZER + name):
                return on_whole_matrices(functools.partial(orthogonal, dims=dims), x, known[name], lead=lead)

        return jax.tree_util.tree_map_with_path(one, moved, muon_dims(moved)), state._replace(count=count, mu=mu)

    return optax.GradientTransformationExtraArgs(stock.init, update)


def muon(
    rate: optax.Schedule,
    *,
    beta: float,
    adam_b1: float,
    adam_b2: float,
    adam_eps: float,
    weight_decay: float,
    mask: Any,
) -> optax.GradientTransformationExtraArgs:
    """`optax.contrib.muon` (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982) with this `scale_by_muon`.

    Its state is that of `optax.contrib.muon`. What is no matrix of a block is updated by AdamW.
    """

    def label(dims: Any) -> str:
        return "adam" if dims is None else "muon"

    def labels(params: PyTree) -> PyTree:
        is_dims = lambda x: x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)  # noqa: E731
        return jax.tree.map(label, muon_dims(params), is_leaf=is_dims)

    kernels = optax.chain(
        scale_by_muon(beta),
        optax.stateless(_consistent_rms),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(rate),
    )
    others = optax.adamw(rate, adam_b1, adam_b2, adam_eps, weight_decay=weight_decay, mask=mask, nesterov=True)
    return optax.partition({"muon": kernels, "adam": others}, labels)


def _consistent_rms(updates: PyTree, params: PyTree) -> PyTree:
    """The updates times 0.2 sqrt(max(inputs, outputs)): then their elements are as large as those of AdamW's updates,
    so that one learning rate serves both (Liu et al. 2025, section 2.2)."""
    stacked = has_stack(updates)

    def scaled(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        first = (1 + counted_dims(path)) * stacked
        inputs = x.shape[first]
        return x * (0.2 * math.sqrt(max(inputs, math.prod(x.shape[first + 1 :]))))

    return jax.tree_util.tree_map_with_path(scaled, updates)
