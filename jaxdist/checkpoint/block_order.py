"""The order of stacked blocks. A checkpoint holds them in the order of the model, a run in that of pipeline stages.

To reorder a leaf, an all-to-all moves `pipe` to another dim of it; then each device picks its rows by itself. So no
device ever holds a whole leaf.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxdist.checkpoint.background import own_copy
from jaxdist.checkpoint.checksums import MODEL_ORDER, RECORD
from jaxdist.errors import UserError
from jaxdist.mesh import HOST, has_host_memory
from jaxdist.model import BlockOrder
from jaxdist.parallel.pipeline.stages import order_of_blocks, rows_of_blocks, take_rows
from jaxdist.specs import STACKED, axes_by_dim, from_entries, leaves_by_name, path_name, split_over
from jaxdist.state import TrainState

NONE = -1  # in place of a dim
_OTHER_LAYERS = "model.layers: {}, but the checkpoint holds {} blocks; set it back"


def settings_of_run(meta: dict[str, Any]) -> dict[str, Any]:
    """The record of a checkpoint that `scripts/train.py` saved; {} of another one. `fit` writes no model there, and a
    loop of the user's own what it likes, under the same names too."""
    sections = [meta.get(name) for name in ("model", "data", "train", "optimizer")]
    sections += [meta[name] for name in ("precision", "parallel", "mesh", "config") if name in meta]
    return meta if all(isinstance(each, dict) for each in sections) else {}


def saved_order(meta: dict[str, Any]) -> np.ndarray | None:
    """The block that each row of a checkpoint holds; None for the model's order. Only older versions saved another one.

    meta: the record saved with the checkpoint, with that of this package.
    """
    own = meta.get(RECORD)
    if isinstance(own, dict) and own.get("blocks") == MODEL_ORDER:
        return None
    parallel = settings_of_run(meta).get("parallel") or {}
    chunks, blocks = parallel.get("chunks", 1), parallel.get("stages", [])
    if chunks == 1 and not blocks:
        return None
    stages = len(blocks) // chunks if blocks else meta["mesh"]["pipe"]
    return order_of_blocks(meta["model"]["layers"], stages=stages, chunks=chunks, blocks=blocks)


def order_of(state: TrainState) -> np.ndarray | None:
    """The block in each row of a state's stacked blocks, as of `order_of_blocks`; None for the model's order."""
    found = state.model_state
    return np.asarray(found.rows) if isinstance(found, BlockOrder) and found.rows else None


def between(saved: np.ndarray | None, wanted: np.ndarray | None) -> np.ndarray | None:
    """For each row of `wanted`, the row of `saved` with the same block, or -1 for none. None: nothing moves.

    saved, wanted: orders as of `order_of_blocks`; None is the model's. Raises `UserError` where the numbers of blocks
    differ.
    """
    saved, wanted = (
        None if order is None or np.array_equal(order, np.arange(order.size)) else order for order in (saved, wanted)
    )
    if saved is None or wanted is None:
        return wanted if saved is None else rows_of_blocks(saved)
    if saved.max() != wanted.max():
        raise UserError(_OTHER_LAYERS.format(wanted.max() + 1, saved.max() + 1))
    return None if np.array_equal(saved, wanted) else np.where(wanted >= 0, rows_of_blocks(saved)[wanted], -1)


def stacked_dims(state: TrainState) -> TrainState:
    """The dim of each leaf that blocks are stacked along, `NONE` where there is none.

    A leaf belongs to the parameter that the end of its path names. It has the parameter's dims, or these after others
    (a residual), or a dim of blocks before dims of its own (Adafactor's factors). Leaves need a shape.
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in leaves_by_name(state.params).items()}

    def one(path: tuple[Any, ...], leaf: Any) -> int:
        names = (path_name(path[start:]) for start in range(len(path)))
        name = next((name for name in names if name in shapes), "")
        if not name.startswith(STACKED + "."):
            return NONE
        own, whole = tuple(leaf.shape), shapes[name]
        before = len(own) - len(whole)
        if before >= 0 and own[before:] == whole:
            return before
        return 0 if own[:1] == whole[:1] else NONE

    return jax.tree_util.tree_map_with_path(one, state)


def _aside(sharding: NamedSharding, shape: tuple[int, ...], dim: int) -> NamedSharding:
    """The sharding with `dim` whole. If `pipe` split it, `pipe` splits another dim that it divides."""
    entries = axes_by_dim(sharding.spec, len(shape))
    own = entries.pop(dim)
    spec = from_entries(entries)
    if "pipe" in own:
        others = jax.ShapeDtypeStruct(shape[:dim] + shape[dim + 1 :], np.float32)
        spec = split_over(spec, others, axes=("pipe",), mesh=sharding.mesh, min_bytes=0)
    entries = axes_by_dim(spec, len(shape) - 1)
    return NamedSharding(sharding.mesh, from_entries([*entries[:dim], (), *entries[dim:]]))


def _take(leaf: jax.Array, *, rows: tuple[int, ...], dim: int, aside: NamedSharding) -> jax.Array:
    near = jax.device_put(leaf, jax.memory.Space.Device)  # an offloaded leaf is in host memory
    near = jax.lax.with_sharding_constraint(near, aside)
    return jax.lax.with_sharding_constraint(take_rows(near, np.asarray(rows), dim=dim), aside)


def _taken(leaf: jax.Array, rows: np.ndarray, *, dim: int, aside: NamedSharding, out: NamedSharding) -> jax.Array:
    """A leaf with other rows. Waits for it: on GPUs the next leaf would take memory meanwhile, and on simulated devices
    the collectives of two leaves could wait for each other's threads for ever."""
    # `_take` is one function, so that jit compiles it once for leaves that are alike.
    make = jax.jit(_take, static_argnames=("rows", "dim", "aside"), out_shardings=out)
    return jax.block_until_ready(make(leaf, rows=tuple(rows.tolist()), dim=dim, aside=aside))


def in_model_order(state: TrainState, order: np.ndarray) -> TrainState:
    """The state with its blocks in the model's order, to be saved. order: that of the blocks in `state`.

    Leaves that change go to host memory, if there is one, one after the other: no device holds a second copy. The other
    leaves are copied by `own_copy`.
    """
    rows = rows_of_blocks(order)

    def moved(leaf: jax.Array, dim: int) -> jax.Array:
        sharding = leaf.sharding
        if not isinstance(sharding, NamedSharding):  # made without a mesh
            return take_rows(leaf, rows, dim=dim)
        aside = _aside(sharding, leaf.shape, dim)
        out = aside.with_memory_kind(HOST) if has_host_memory(sharding.mesh) else aside
        return _taken(leaf, rows, dim=dim, aside=aside, out=out)

    leaves, treedef = jax.tree.flatten(state)
    dims = jax.tree.leaves(stacked_dims(state))
    others = iter(own_copy([leaf for leaf, dim in zip(leaves, dims, strict=True) if dim == NONE]))  # by one program
    placed = [next(others) if dim == NONE else moved(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)]
    return jax.tree.unflatten(treedef, placed)


def as_saved(target: TrainState, rows: np.ndarray, saved: np.ndarray | None) -> TrainState:
    """The state to ask a checkpoint for, before `in_order_of` reorders its blocks: ShapeDtypeStructs with shardings.

    - target: the state after that, ShapeDtypeStructs with shardings.
    - rows: of `between`.
    - saved: the checkpoint's order.

    Raises `UserError` where the numbers of blocks differ.
    """
    count = int((rows >= 0).sum()) if saved is None else saved.size

    def one(leaf: jax.ShapeDtypeStruct, dim: int) -> jax.ShapeDtypeStruct:
        if dim == NONE:
            return leaf
        if leaf.shape[dim] != rows.size:
            raise UserError(_OTHER_LAYERS.format(leaf.shape[dim], rows.size))
        shape = (*leaf.shape[:dim], count, *leaf.shape[dim + 1 :])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=_aside(leaf.sharding, leaf.shape, dim))

    return jax.tree.map(one, target, stacked_dims(target))


def in_order_of(target: TrainState, saved: TrainState, rows: np.ndarray) -> TrainState:
    """A restored state, in the order and layout of `target`.

    - saved: the state, as `as_saved` asks for it. Its leaves are freed one by one, if the caller keeps no reference.
    - rows: of `between`.
    """
    leaves, treedef = jax.tree.flatten(saved)
    del saved
    dims, asked = jax.tree.leaves(stacked_dims(target)), jax.tree.leaves(target)
    for i, (dim, leaf) in enumerate(zip(dims, asked, strict=True)):
        if dim != NONE:
            aside = _aside(leaf.sharding, leaf.shape, dim)
            leaves[i] = _taken(leaves[i], rows, dim=dim, aside=aside, out=leaf.sharding)
    return jax.tree.unflatten(treedef, leaves)
