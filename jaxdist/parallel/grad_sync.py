"""Sums of gradients over devices: their algorithm, order and format."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import (
    active_axes,
    all_reduce,
    all_reduce_with_feedback,
    broadcast,
    get_algorithm,
    in_buckets,
    psum,
    reduce_scatter,
    to_varying,
)
from jaxdist.config.rules.fields import check_section
from jaxdist.config.rules.grad_sync import GRAD_SYNC, check_shards
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.errors import UserError
from jaxdist.mesh import BATCH_LIKE, AnyMesh, batch_shards
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.precision.reproducible import rounded
from jaxdist.specs import UNITS, PyTree, ShardOf, claimed_axes, map_named, path_name, spec_leaves


def check_sync(sync: GradSync, reduce_dtype: Any) -> None:
    """Raise `UserError` for settings that exclude each other, or an unknown algorithm."""
    check_section(sync, GRAD_SYNC)
    get_algorithm(sync.chosen)
    sync.check(reduce_dtype=jnp.dtype(reduce_dtype).name)


def order_of_work(sync: GradSync, mesh: AnyMesh, schedule: Any, microbatches: int) -> tuple[Any, int]:
    """(schedule, microbatches) of a step. A deterministic step always runs one microbatch for each virtual shard, and
    sums their gradients pairwise. Raises `UserError` for a mesh that it cannot run on."""
    if not sync.deterministic:
        return schedule, microbatches
    check_shards(sync.virtual_shards, mesh.shape, microbatches=microbatches, schedule=schedule)
    return "pairwise", sync.virtual_shards // batch_shards(mesh)


def check_update(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, residual: PyTree, *, sync: GradSync
) -> None:
    """Raise `UserError` for a state of another optimizer or `GradSync`, or an optimizer that `sync` excludes."""
    with jax.numpy_dtype_promotion("standard"):
        wanted: Any = jax.tree.structure(jax.eval_shape(optimizer.init, params))
    if wanted != jax.tree.structure(getattr(opt_state, "bare", opt_state)):
        both = "give init_state and make_train_step the same optimizer and the same freeze"
        raise UserError(f"state: its optimizer state is of another optimizer, or of other frozen parameters; {both}")
    if (sync.wire_dtype == "int8") != bool(jax.tree.leaves(residual)):
        raise UserError("state: int8 sums carry a residual in it; give init_state and make_train_step one grad_sync")
    if sync.deterministic:
        from jaxdist.optim.order import check_order

        check_order(optimizer, params, opt_state)


def sum_totals(totals: PyTree, sync: GradSync) -> PyTree:
    """Numbers, such as loss and weight, summed over all devices with samples of their own. Typed invariant."""
    leaves, treedef = jax.tree.flatten(totals)
    stacked = to_varying(jnp.stack(leaves), BATCH_LIKE)
    with jax.named_scope("loss_and_weight"):
        if not sync.deterministic:
            summed = psum(stacked, BATCH_LIKE)
        else:
            # The broadcast adds zeros to the root's value: its bits, in a type that says that all devices have them.
            summed = broadcast(all_reduce(stacked, BATCH_LIKE, algorithm="ordered"), BATCH_LIKE)
    return jax.tree.unflatten(treedef, list(summed))


def divide(sums: PyTree, weight: jax.Array, dtype: Any, *, deterministic: bool) -> PyTree:
    """sums / weight, in `dtype`; zeros if the weight is 0. deterministic: whether products are `rounded`."""
    inverse = jnp.where(weight != 0, 1 / weight, jnp.zeros_like(weight))

    def scaled(leaf: jax.Array) -> jax.Array:
        wide = accumulation_dtype(leaf.dtype)
        mean = leaf.astype(wide) * inverse.astype(wide)
        return (rounded(mean) if deterministic else mean).astype(dtype)

    return jax.tree.map(scaled, sums)


def reduce_late(grads: PyTree, specs: PyTree, shard_of: ShardOf, *, sync: GradSync, reduce_dtype: Any) -> PyTree:
    """Gradients of shards (`shard_of`), from gradients of the whole parameters: a reduce-scatter of each leaf."""

    def one(spec: P, leaf: jax.Array) -> jax.Array:
        if (shard := shard_of(spec)) is None:
            return leaf
        return reduce_scatter(leaf.astype(reduce_dtype), shard.axes, dim=shard.dim, **sync.reduction)

    with jax.named_scope("gradient"):  # by which the ledger tells hand-written ones from gathers
        return map_named(one, specs, grads)


def finish(
    grads: PyTree, residual: PyTree, specs: PyTree, *, sync: GradSync, reduce_dtype: Any
) -> tuple[PyTree, PyTree]:
    """Sum each leaf over the batch-like axes that its spec does not name, in buckets, in the reduce dtype.

    Hybrid sharding, parameters that stay whole, and tied embeddings across pipeline stages need no code of their own:
    in each case the sum over the axes along which the leaf is a copy is still to be done. Buckets are filled in the
    order of the backward pass: head, blocks, embedding. Returns (sums, new residual).
    """
    leaves, treedef = jax.tree.flatten(grads)
    lost = jax.tree.leaves(residual)
    units = [path_name(path[:1]) for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
    order = {unit: position for position, unit in enumerate(UNITS)}  # of use; the backward pass goes the other way
    backwards = sorted(range(len(leaves)), key=lambda i: (-order.get(units[i], 0), -i))
    axes_of = [active_axes(claimed_axes(spec)) for spec in spec_leaves(specs)]
    for axes in sorted(set(axes_of) - {()}):
        members = [i for i in backwards if axes_of[i] == axes]

        def total(flat: jax.Array, *before: jax.Array, axes: tuple[str, ...] = axes) -> Any:
            if before:
                return all_reduce_with_feedback(flat, before[0], axes, algorithm=sync.chosen)
            return (all_reduce(flat, axes, **sync.reduction),)

        columns = [[to_varying(leaves[i].astype(reduce_dtype), axes) for i in members]]
        if sync.wire_dtype == "int8":
            columns.append([lost[i][0] for i in members])
        with jax.named_scope("gradients"):
            reduced = in_buckets(total, *columns, limit=int(sync.bucket_mb * 2**20))
        for position, i in enumerate(members):
            leaves[i] = reduced[0][position]
            if sync.wire_dtype == "int8":
                lost[i] = reduced[1][position][None]
    return jax.tree.unflatten(treedef, leaves), jax.tree.unflatten(jax.tree.structure(residual), lost)
