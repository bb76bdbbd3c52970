"""How gradients are summed over devices: by which algorithm, in what order, in what format."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import (
    Link,
    active_axes,
    all_reduce,
    all_reduce_with_feedback,
    broadcast,
    check_wire,
    get_algorithm,
    in_buckets,
    make_link,
    psum,
    reduce_scatter,
    to_varying,
)
from jaxdist.errors import UserError
from jaxdist.mesh import BATCH_LIKE, AnyMesh, batch_shards
from jaxdist.optim import check_order
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.precision.reproducible import rounded
from jaxdist.specs import (
    UNITS,
    PyTree,
    claimed_axes,
    dim_of,
    map_named,
    map_specs,
    path_name,
    spec_leaves,
    without_idle,
)


class GradSync(NamedTuple):
    """algorithm: of `jaxdist.collectives`. bucket_mb: gradients are fused into flat buffers of at most this many MB; a
    larger leaf goes alone. wire_dtype: None, "bfloat16", or "int8" with error feedback (the state carries the residual;
    for all-reduces: reduce-scatters over fsdp, of zero1 to zero3, then send what they sum).
    link: what algorithms "auto" and "two_level" reckon with: "auto", a name, or a rate such as "200mbit".

    deterministic: the same bits on any number of devices. Gradients are computed for one virtual shard after the other,
    of which the global batch has `virtual_shards`, and summed in a fixed order. That and the number of batch shards
    must be powers of two.
    """

    algorithm: str = "native"
    bucket_mb: float = 25.0
    wire_dtype: str | None = None
    link: str = "auto"
    deterministic: bool = False
    virtual_shards: int = 8

    @property
    def reduction(self) -> dict[str, Any]:
        """Arguments of `all_reduce` and `reduce_scatter`."""
        if self.deterministic:
            return {"algorithm": "ordered"}
        wire = self.wire_dtype if self.wire_dtype != "int8" else None
        return {"algorithm": self.algorithm, "wire_dtype": wire, "link": link_of(self.link)}


def link_of(name: str) -> Link | None:
    """The link called `name`; None for "auto", which leaves it to the algorithm."""
    return None if name == "auto" else make_link(name)


def check_sync(sync: GradSync, reduce_dtype: Any) -> None:
    """Raise `UserError` for what does not go together."""
    if sync.bucket_mb <= 0:
        raise UserError(f"grad_sync.bucket_mb={sync.bucket_mb}: must be above 0")
    if sync.deterministic and jnp.dtype(reduce_dtype).itemsize < 4:
        raise UserError(
            f"grad_sync: deterministic sums in at least float32, not in {jnp.dtype(reduce_dtype)}; leave "
            "reduce_dtype out"
        )
    get_algorithm(sync.algorithm)  # an unknown name is an error now, not when a group first needs it
    link_of(sync.link)
    if sync.deterministic and (sync.algorithm not in ("native", "ordered") or sync.wire_dtype is not None):
        raise UserError(
            f"grad_sync: deterministic sums by 'ordered' in the gradients' own format; got {sync.algorithm!r} and "
            f"wire_dtype {sync.wire_dtype}; leave both out"
        )
    if sync.wire_dtype is not None:
        check_wire(sync.wire_dtype, sync.algorithm)


def order_of_work(sync: GradSync, mesh: AnyMesh, schedule: str, microbatches: int) -> tuple[str, int]:
    """(schedule, microbatches) that a step runs. A deterministic one runs virtual shard by virtual shard, summed
    pairwise, whatever number of microbatches is asked for."""
    if not sync.deterministic:
        return schedule, microbatches
    shards, virtual = batch_shards(mesh), sync.virtual_shards
    if other := [axis for axis in BATCH_LIKE if axis not in ("data", "fsdp") and mesh.shape[axis] > 1]:
        raise UserError(f"mesh.{other[0]}: deterministic sums over data and fsdp only; set {other[0]} to 1")
    for name, count in (("virtual_shards", virtual), ("data * fsdp", shards)):
        if count < 1 or count & (count - 1):
            raise UserError(f"grad_sync: deterministic needs powers of two, got {name} = {count}; allowed: 1, 2, 4, 8")
    if virtual % (shards * microbatches):
        raise UserError(
            f"grad_sync.virtual_shards={virtual}: not divisible by {shards} batch shards x {microbatches} microbatches;"
            " allowed: a multiple of their product, the same in all runs that are to agree"
        )
    if schedule not in ("accumulate", "pairwise"):
        raise UserError(f"grad_sync: deterministic runs the schedule 'pairwise', got {schedule!r}; leave it out")
    return "pairwise", virtual // shards


def residual_target(shapes: PyTree, specs: PyTree, mesh: AnyMesh, sync: GradSync) -> tuple[PyTree, PyTree]:
    """Shapes and specs of what each device's int8 encodings lost, a leaf a parameter; () where nothing is carried.

    A leading dim has an entry for each copy of the parameter. One without copies has nothing to sum: a zero, [1].
    """
    if sync.wire_dtype != "int8":
        return (), ()

    def copies(spec: P) -> int:
        return math.prod(mesh.shape[axis] for axis in claimed_axes(spec))

    def shape_of(spec: P, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((copies(spec), *leaf.shape) if copies(spec) > 1 else (1,), jnp.float32)

    def spec_of(spec: P) -> P:
        return without_idle(P(claimed_axes(spec), *spec), mesh) if copies(spec) > 1 else P()

    return map_specs(shape_of, specs, shapes), map_specs(spec_of, specs)


def check_update(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, residual: PyTree, *, sync: GradSync
) -> None:
    """Raise `UserError` when state or optimizer do not suit this way of summing."""
    with jax.numpy_dtype_promotion("standard"):
        wanted: Any = jax.tree.structure(jax.eval_shape(optimizer.init, params))
    if wanted != jax.tree.structure(opt_state):
        raise UserError(
            "state: its optimizer state is of another optimizer, or of other frozen parameters; give "
            "init_state and make_train_step the same optimizer and the same freeze"
        )
    if (sync.wire_dtype == "int8") != bool(jax.tree.leaves(residual)):
        raise UserError("state: int8 sums carry a residual in it; give init_state and make_train_step one grad_sync")
    if sync.deterministic:
        check_order(optimizer, params, opt_state)


def sum_totals(totals: jax.Array, sync: GradSync) -> jax.Array:
    """Loss and weight, [2], summed over all devices that see other samples, typed invariant."""
    totals = to_varying(totals, BATCH_LIKE)
    with jax.named_scope("loss_and_weight"):
        if not sync.deterministic:
            return psum(totals, BATCH_LIKE)
        # The broadcast adds zeros to the root's value: its bits, in a type that says that all devices have them.
        return broadcast(all_reduce(totals, BATCH_LIKE, algorithm="ordered"), BATCH_LIKE)


def divide(sums: PyTree, weight: jax.Array, dtype: Any, *, deterministic: bool) -> PyTree:
    """Means from sums, in `dtype`; zeros where nothing was weighed. deterministic: see `rounded`."""
    inverse = jnp.where(weight != 0, 1 / weight, jnp.zeros_like(weight))

    def scaled(leaf: jax.Array) -> jax.Array:
        wide = accumulation_dtype(leaf.dtype)
        mean = leaf.astype(wide) * inverse.astype(wide)
        return (rounded(mean) if deterministic else mean).astype(dtype)

    return jax.tree.map(scaled, sums)


def reduce_late(grads: PyTree, specs: PyTree, *, sync: GradSync, reduce_dtype: Any) -> PyTree:
    """Whole gradients of parameters that rest as shards over fsdp -> the gradients of the shards."""

    def one(spec: P, leaf: jax.Array) -> jax.Array:
        dim = dim_of(spec, "fsdp")
        return leaf if dim is None else reduce_scatter(leaf.astype(reduce_dtype), "fsdp", dim=dim, **sync.reduction)

    return map_named(one, specs, grads)


def finish(
    grads: PyTree, residual: PyTree, specs: PyTree, *, sync: GradSync, reduce_dtype: Any
) -> tuple[PyTree, PyTree]:
    """Sum each leaf over the batch-like axes that its spec does not name, in buckets, in the reduce dtype.

    Hybrid sharding, parameters kept whole, and tied embeddings across pipeline stages need no code of their own: what
    is missing is always the sum over the axes over which the leaf is a copy. Buckets are filled unit by unit as the
    backward pass reaches them: head, blocks, embedding. Returns (sums, new residual).
    """
    leaves, treedef = jax.tree.flatten(grads)
    lost = jax.tree.leaves(residual)
    units = [path_name(path[:1]) for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
    order = {unit: position for position, unit in enumerate(UNITS)}  # of use; the backward pass goes the other way
    backwards = sorted(range(len(leaves)), key=lambda i: (-order.get(units[i], 0), -i))
    axes_of = [active_axes(claimed_axes(spec)) for spec in spec_leaves(specs)]
    for axes in sorted(set(axes_of) - {()}):
        members = [i for i in backwards if axes_of[i] == axes]

        def total(flat: jax.Array, axes: tuple[str, ...] = axes) -> tuple[jax.Array]:
            return (all_reduce(flat, axes, **sync.reduction),)

        def total_and_lost(flat: jax.Array, before: jax.Array, axes: tuple[str, ...] = axes) -> Any:
            return all_reduce_with_feedback(flat, before, axes, algorithm=sync.algorithm)

        columns = [[to_varying(leaves[i].astype(reduce_dtype), axes) for i in members]]
        if sync.wire_dtype == "int8":
            columns.append([lost[i][0] for i in members])
        function = total if len(columns) == 1 else total_and_lost
        with jax.named_scope("gradients"):
            reduced = in_buckets(function, *columns, limit=int(sync.bucket_mb * 2**20))
        for position, i in enumerate(members):
            leaves[i] = reduced[0][position]
            if sync.wire_dtype == "int8":
                lost[i] = reduced[1][position][None]
    return jax.tree.unflatten(treedef, leaves), jax.tree.unflatten(jax.tree.structure(residual), lost)
