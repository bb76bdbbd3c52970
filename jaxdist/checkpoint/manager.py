"""Checkpoints through orbax: asynchronous, atomic (a step's folder appears when complete), the newest `keep` kept.

What is saved is whole arrays under the names of the `TrainState`'s leaves, whatever the mesh and strategy; they are
restored straight into the layout of the state that asks. Next to them lies a record of what the run was (`meta`).
"""

from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxdist.errors import UserError
from jaxdist.specs import path_name
from jaxdist.state import TrainState


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
        handlers = {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handlers)

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, meta: dict[str, Any]) -> None:
        """Start saving; returns when the state has been copied from the devices, so that its buffers may be donated."""
        items = ocp.args.Composite(state=ocp.args.StandardSave(state._asdict()), meta=ocp.args.JsonSave(meta))
        saved = self._manager.save(step, args=items)
        assert saved, f"orbax declined to save step {step}"

    def meta(self, step: int) -> dict[str, Any]:
        """The record saved with a step."""
        return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def restore(self, step: int, target: TrainState) -> TrainState:
        """The state of a step, laid out like `target` (ShapeDtypeStructs with shardings).

        Raises `UserError` when the checkpoint is of another model or optimizer: orbax would cast dtypes silently.
        """
        self._check(step, target)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(target._asdict()))
        return TrainState(**self._manager.restore(step, args=items)["state"])

    def _check(self, step: int, target: TrainState) -> None:
        found = self._manager.item_metadata(step)["state"].tree
        saved = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(found)}
        asked = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(target)}
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
