"""Microbatches: the rules for the size of a batch, its cut into microbatches, and the dropout keys of its rows."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.collectives import rank, to_varying, varying_axes
from jaxdist.config.rules.batch import check_rows
from jaxdist.errors import UserError
from jaxdist.mesh import BATCH_AXES, AnyMesh
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.schedule import Program
from jaxdist.specs import PyTree


def check_batch_shape(batch: PyTree, mesh: AnyMesh, options: StepOptions, *, named: bool = False) -> None:
    """Raise `UserError` unless all leaves have the same number of rows, and the parts of the batch divide it.

    options: as a step runs them on this mesh (`StepOptions.on`). named: whether it must be a dict.
    """
    if named and not isinstance(batch, dict):
        raise UserError("batch: is no dict; allowed for a ModelDef: a dict of arrays, such as {'x': x, 'y': y}")
    shapes = [leaf.shape for leaf in jax.tree.leaves(batch)]
    if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
        allowed = "arrays with the same dim 0, of rows; give np.asarray of nested lists"
        raise UserError(f"batch: has leaves of shapes {shapes!s:.200}; allowed: {allowed}")
    parts = {axis: mesh.shape[axis] for axis in BATCH_AXES} | {"microbatches": options.microbatches}
    if options.grad_sync.deterministic:  # its microbatches are the virtual shards of a device
        parts = {"grad_sync.virtual_shards": options.grad_sync.virtual_shards}
    check_rows(shapes[0][0], parts, "batch")


def check_global(batch: PyTree) -> None:
    """Raise `UserError` if one of several processes passes local arrays: most of their rows would be lost silently."""
    if jax.process_count() > 1 and any(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(batch)):
        raise UserError(
            "batch: holds arrays of one process; make global ones with "
            "jax.make_array_from_process_local_data(NamedSharding(mesh, jaxdist.BATCH_SPEC), rows)"
        )


def split_microbatches(batch: PyTree, count: int) -> PyTree:
    """The batch with its leaves [b, ...] as [count, b / count, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:]), batch)


def with_seed(program: Program, parts: PyTree, seed: jax.Array | float) -> PyTree:
    """Microbatches with the leaf `loss_seed` of each sample, if the program reads it (`ModelDef.weighs_rows`)."""
    rows = jax.tree.leaves(parts)[0]
    own = {"loss_seed": to_varying(jnp.full(rows.shape[:2], seed), varying_axes(rows))}
    return {**parts, **own} if program.weighs_rows else parts


def sample_keys(seed: int, step: jax.Array, rows: int) -> jax.Array:
    """Dropout keys [rows] of this device's rows (`keys_from`)."""
    return keys_from(rank(BATCH_AXES) * rows, seed, step, rows)


def keys_from(first: Any, seed: int, step: Any, rows: int) -> jax.Array:
    """Dropout keys [rows]. Each folds seed, step and the row's number in the global batch, which begins at `first`."""
    # By name: with other generators that jax may be set to, a vmap over keys draws other numbers than each key alone.
    stem = jax.random.key(seed, impl="threefry2x32")
    key = jax.random.fold_in(stem, step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, first + jnp.arange(rows, dtype=jnp.int32))
