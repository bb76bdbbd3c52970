"""Checkpoints through orbax: asynchronous, atomic (a step's folder appears when complete), the newest `keep` kept.

What is saved is whole arrays under the names of the `TrainState`'s leaves, whatever the mesh and strategy; they are
restored straight into the layout of the state that asks. Next to them lies a record of what the run was (`meta`).
"""

from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.errors import UserError
from jaxdist.guard import fresh_guard, tree_is_finite
from jaxdist.specs import path_name
from jaxdist.state import TrainState


def _lasting(state: TrainState) -> dict[str, Any]:
    """What a checkpoint must hold to go on in any layout; a residual belongs to one, and is an item of its own."""
    return {name: part for name, part in state._asdict().items() if name != "residual"}


class Checkpoints:
    """The folder `checkpoints/` of a run. Every process must make the same calls. Close it, or use it as a context:
    a failed asynchronous save surfaces in the next call or in `close`, never silently."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{str(folder)!r} is a file where checkpoints belong; move it, or use another --run-dir")
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, cleanup_tmp_directories=True, enable_async_checkpointing=True
        )
        # Handlers given up front: without them a manager that has not saved yet cannot tell what a checkpoint holds.
        standard = ocp.StandardCheckpointHandler
        handlers = {"state": standard(), "residual": standard(), "meta": ocp.JsonCheckpointHandler()}
        self._is_finite = jax.jit(tree_is_finite)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handlers)

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, meta: dict[str, Any]) -> None:
        """Start saving; returns when the state has been copied from the devices, so that its buffers may be donated.

        Raises FloatingPointError, and writes nothing, where parameters or optimizer state are not finite.
        """
        if not self._is_finite((state.params, state.opt_state)):
            raise FloatingPointError(f"the state after step {step} is not finite, though loss and gradients were")
        items = {"state": ocp.args.StandardSave(_lasting(state)), "meta": ocp.args.JsonSave(meta)}
        if jax.tree.leaves(state.residual):
            items["residual"] = ocp.args.StandardSave(state.residual)
        saved = self._manager.save(step, args=ocp.args.Composite(**items))
        assert saved, f"orbax declined to save step {step}"

    def meta(self, step: int) -> dict[str, Any]:
        """The record saved with a step."""
        return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def restore(self, step: int, target: TrainState) -> TrainState:
        """The state of a step, laid out like `target` (ShapeDtypeStructs with shardings).

        Raises `UserError` when the checkpoint is of another model or optimizer: orbax would cast dtypes silently.
        """
        unguarded = not self._manager.item_metadata(step)["state"].tree.get("guard")  # saved before there was one
        asked = target._replace(guard=()) if unguarded else target
        self._check(step, asked)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(_lasting(asked)))
        state = self._manager.restore(step, args=items)["state"]
        if unguarded and target.guard:
            layout = jax.tree.map(lambda leaf: leaf.sharding, target.guard)
            state["guard"] = jax.jit(fresh_guard, out_shardings=layout)()
        return TrainState(**state, residual=self._residual(step, target.residual))

    def _residual(self, step: int, target: Any) -> Any:
        """What lossy gradient sums had not sent yet, in the layout of `target`; zeros where none was saved.

        It is a summand on each device, so that on another number of devices the first one gets the sum of all.
        """
        if not jax.tree.leaves(target):
            return ()
        saved = self._manager.item_metadata(step).get("residual")
        if saved is None:
            zeros = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), target)  # noqa: E731
            return jax.jit(zeros, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, target))()

        def ask(leaf: jax.ShapeDtypeStruct, found: Any) -> jax.ShapeDtypeStruct:
            sharding = leaf.sharding
            if tuple(found.shape) != leaf.shape:  # all copies, each cut as the parameter is
                rest = sharding.spec[1:] if len(found.shape) == len(leaf.shape) else ()
                sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *rest))
            return jax.ShapeDtypeStruct(tuple(found.shape), leaf.dtype, sharding=sharding)

        def fit(leaf: jax.ShapeDtypeStruct, found: jax.Array) -> jax.Array:
            if found.shape == leaf.shape:
                return found
            total = lambda x: jnp.zeros(leaf.shape, leaf.dtype).at[:1].set(x.sum(0, keepdims=True))  # noqa: E731
            none = 1 in (leaf.shape[0], found.shape[0])  # a parameter that had, or has, no copies
            make = (lambda x: jnp.zeros(leaf.shape, leaf.dtype)) if none else total
            return jax.jit(make, out_shardings=leaf.sharding)(found)

        leaves, treedef = jax.tree.flatten(target)
        asked = jax.tree.unflatten(jax.tree.structure(saved.tree), map(ask, leaves, jax.tree.leaves(saved.tree)))
        restored = self._manager.restore(step, args=ocp.args.Composite(residual=ocp.args.StandardRestore(asked)))
        return jax.tree.unflatten(treedef, map(fit, leaves, jax.tree.leaves(restored["residual"])))

    def _check(self, step: int, target: TrainState) -> None:
        found = self._manager.item_metadata(step)["state"].tree
        saved = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(found)}
        lasting = target._replace(residual=())
        asked = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(lasting)}
        where = f"checkpoint of step {step}"
        if only := sorted(saved.keys() ^ asked.keys()):
            side = "the checkpoint" if only[0] in saved else "this configuration"
            raise UserError(f"{where}: {only[0]} is only in {side}; model and optimizer must be the checkpoint's")
        for name, leaf in asked.items():
            if tuple(saved[name].shape) != tuple(leaf.shape) or saved[name].dtype != leaf.dtype:
                raise UserError(
                    f"{where}: {name} is {saved[name].dtype}{list(saved[name].shape)}, this configuration makes it "
                    f"{leaf.dtype}{list(leaf.shape)}; use the configuration of the checkpoint, or another --run-dir"
                )

    def wait(self) -> None:
        """Wait for a save under way and raise what went wrong in it."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """`wait`, then let go of everything."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
