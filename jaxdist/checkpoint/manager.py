"""Checkpoints through orbax: asynchronous, atomic (a step's folder appears when complete, with checksums), verified.

A checkpoint holds whole arrays under the names of the `TrainState`'s leaves, blocks in the order of the model, whatever
the mesh, strategy and pipeline. They are restored straight into the layout that is asked for. The item `meta` beside
them is the record of the run.
"""

import errno
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.checkpoint.background import own_copy, writers_step_back
from jaxdist.checkpoint.barrier import Entered, SaveBarrier, not_watched, share_failures
from jaxdist.checkpoint.block_order import as_saved, between, in_model_order, in_order_of, saved_order
from jaxdist.checkpoint.checksums import CHECKSUMS, RECORD, TEMPORARY, Integrity, SealedFolder, check_files, record_of
from jaxdist.checkpoint.errors import FAILURES, SaveFailed, reading, why
from jaxdist.checkpoint.retention import Retention
from jaxdist.errors import UserError
from jaxdist.precision.loss_scale import fresh_guard, tree_is_finite
from jaxdist.processes import anywhere, from_first
from jaxdist.specs import leaves_by_name
from jaxdist.state import TrainState


def _lasting(state: TrainState) -> dict[str, Any]:
    """The part of the state that every layout can restore. The residual belongs to one layout: it is another item."""
    return {name: part for name, part in state._asdict().items() if name != "residual"}


def _restoring(target: Any) -> ocp.args.CheckpointArgs:
    """The arguments of orbax to restore arrays in the layout of `target` (ShapeDtypeStructs)."""
    return ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))


DAMAGED = ".damaged"  # in the names of folders that were moved aside
# Copies of an array are each saved in part, so that processes share the writing; a part of fewer bytes is not worth it:
# JAX compiles a program for each.
MIN_PART = 1 << 20


class Checkpoints:
    """The folder `checkpoints/` of a run. Every process must make the same calls.

    Close it, or use it as a context. A failed asynchronous save raises `SaveFailed` in `wait`, in the next `save` or in
    `close`; it is never silent.

    - keep, keep_every, keep_best: see `Retention`.
    - order: the block in each row of the run's stacked blocks (`order_of_blocks`); None: the model's order.
    - entered: see `SaveBarrier`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        keep_every: int = 0,
        keep_best: int = 0,
        order: np.ndarray | None = None,
        entered: Entered = not_watched,
    ) -> None:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{str(folder)!r} is a file where checkpoints belong; move it, or use another --run-dir")
        self._folder, self._order = folder.absolute(), between(None, order)
        self._retention, self._saves = Retention(keep, keep_every, keep_best), SaveBarrier(entered)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._retention,
            create=True,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
            temporary_path_class=SealedFolder.of(self._saves),
            # If making them fails in a thread, other threads of orbax wait for it, and the interpreter for these.
            async_options=ocp.options.AsyncOptions(
                create_directories_asynchronously=False, barrier_sync_fn=self._saves.meet
            ),
            lightweight_initialize=True,  # reads nothing of a step, which may be damaged
        )
        handled = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_PART))
        )
        # Without handlers a manager that has not saved yet cannot tell what a checkpoint holds. No compression: trained
        # numbers shrink by 8 %, for five times the processor time of a save.
        arrays = lambda: ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=handled)  # noqa: E731
        items = {"state": arrays(), "residual": arrays(), "meta": ocp.JsonCheckpointHandler()}
        handlers = {name: share_failures(handler, self._saves) for name, handler in items.items()}
        self._is_finite = jax.jit(tree_is_finite)
        try:
            self._manager = ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)
        except OSError as error:
            raise UserError(f"{str(folder)!r} cannot hold checkpoints: {why(error)}; use another --run-dir") from error
        for step in self._manager.all_steps():
            self._retention.losses[step] = (record_of(self._folder / str(step)) or {}).get("loss", math.nan)
        self.under_way: int | None = None  # the step of a save that was not waited for; the same on every process
        self._ahead: tuple[int, Future[Integrity]] | None = None
        self._closing = Event()
        self._began = 0.0
        self.longest_save = 0.0  # seconds, from the call of `save` to the end; on process 0
        self._verified: int | None = None
        self.failed: SaveFailed | None = None  # how the last save ended, if it did not land

    def latest(self) -> int | None:
        """The newest complete step, or None. It may be damaged: see `newest_intact`."""
        return self._manager.latest_step()

    def look_ahead(self) -> None:
        """Begin to verify the newest step in a thread. `newest_intact` takes its result."""
        step = self.latest()
        if step is not None and jax.process_index() == 0:
            pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jaxdist-verify")
            self._ahead = step, pool.submit(check_files, self._folder / str(step), step, self._closing)
            pool.shutdown(wait=False)

    def _check_files(self, step: int) -> Integrity:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == step:
            return ahead[1].result()
        return check_files(self._folder / str(step), step)

    def newest_intact(self, say: Callable[[str], None]) -> int | None:
        """The newest step whose files are as they were written, or None if there is no checkpoint.

        Newer, damaged ones are moved aside, so that their steps can be saved again. say: is called with one line about
        each of them, and about a checkpoint of an older version, without checksums. Raises `UserError` if all are
        damaged (none is moved), and `SaveFailed` as `wait` does.
        """
        self.wait()
        step, lines, error = None, list[str](), ""
        if jax.process_index() == 0:
            try:
                step, lines = self._look()
            except (OSError, UserError) as raised:  # as text: all processes raise what this one met
                error = str(raised)
        step, lines, error = from_first((step, lines, error))
        if error:
            raise UserError(error)
        for line in lines:
            say(line)
        self._manager.reload()
        self._verified = step
        return step

    def _look(self) -> tuple[int | None, list[str]]:
        """`newest_intact` on process 0: the step, and the lines to say."""
        damaged: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            verdict = self._check_files(step)
            if verdict.problem:
                damaged[step] = verdict.problem
                continue
            lines = [
                f"checkpoint of step {bad} is damaged: {what}; moved to {self._move_aside(bad)}, step {step} is used"
                for bad, what in damaged.items()
            ]
            if not verdict.sealed:
                lines.append(f"checkpoint of step {step} is not verified: an older version saved it, without checksums")
            return step, lines
        if damaged:
            each = "; ".join(f"step {step}: {what}" for step, what in damaged.items())
            raise UserError(f"every checkpoint in {self._folder} is damaged ({each}); use a copy, or another --run-dir")
        return None, []

    def _move_aside(self, step: int) -> str:
        """Rename a step's folder to a name that is not a step. Nothing is deleted."""
        name, tries = f"{step}{DAMAGED}", 1
        while (self._folder / name).exists():
            name, tries = f"{step}{DAMAGED}-{tries + 1}", tries + 1
        try:
            (self._folder / str(step)).rename(self._folder / name)
        except OSError as error:
            what = f"checkpoint of step {step} in {self._folder} is damaged and cannot be moved aside: {why(error)}"
            raise UserError(f"{what}; move it away") from error
        return name

    def save(self, step: int, state: TrainState, meta: dict[str, Any], *, loss: float | None = None) -> None:
        """Start a save. When this returns, the state has been copied: its buffers may be donated.

        loss: of an evaluation, for `keep_best`. Raises FloatingPointError, and writes nothing, where parameters or
        optimizer state are not finite; `SaveFailed` if the previous save has not landed, or this one cannot begin.
        """
        if not self._is_finite((state.params, state.opt_state)):
            raise FloatingPointError(f"the state after step {step} is not finite, though loss and gradients were")
        self.wait()
        if self.failed is not None and jax.process_index() == 0:
            for path in self._folder.glob(f"*{TEMPORARY}*"):  # what the failed save has left takes room
                shutil.rmtree(path, ignore_errors=True)  # what cannot go now goes at the next start
        self._saves.begin()
        self._check_room(step)
        state = own_copy(state) if self._order is None else in_model_order(state, self._order)
        record = {"checksums": 1} | ({} if loss is None else {"loss": loss})
        items = {"state": ocp.args.PyTreeSave(_lasting(state)), "meta": ocp.args.JsonSave(meta | {RECORD: record})}
        if jax.tree.leaves(state.residual):
            items["residual"] = ocp.args.PyTreeSave(state.residual)
        self._retention.losses[step], self._began = math.nan if loss is None else loss, time.time()
        try:
            saved = self._manager.save(step, args=ocp.args.Composite(**items))
        except FAILURES as error:
            if jax.process_count() > 1:
                raise  # the others wait in orbax: only the end of this process tells them
            self._fail(step, error)
        assert saved, f"orbax declined to save step {step}"
        self.under_way = step
        writers_step_back()

    def _check_room(self, step: int) -> None:
        """Raise `SaveFailed` on every process where process 0 cannot make folders."""
        problem: OSError | None = None
        if jax.process_index() == 0:
            probe = self._folder / f"probe{TEMPORARY}"
            self._saves.enter("making its folder")
            try:
                probe.mkdir(parents=True, exist_ok=True)
                probe.rmdir()
            except OSError as error:
                problem = error
            self._saves.enter("copying")
        if anywhere(problem is not None):
            self._fail(step, problem)

    def _fail(self, step: int, error: Exception | None) -> NoReturn:
        self._manager.reload()  # orbax lists the step that was to be saved
        self.failed = SaveFailed(step, error)
        raise self.failed from error

    def meta(self, step: int) -> dict[str, Any]:
        """The record saved with a step."""
        with reading(f"checkpoint of step {step}"):
            found = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        return {key: value for key, value in found.items() if key != RECORD}

    def restore(self, step: int, target: TrainState) -> TrainState:
        """The state of a step in the layout of `target` (ShapeDtypeStructs with shardings).

        Raises `UserError` for a damaged checkpoint, and for another model or optimizer: orbax would restore changed
        bytes, and cast dtypes, silently. Warns about a checkpoint of an older version, without checksums.
        """
        self._verify(step)
        saved = saved_order(self.meta(step))
        rows = between(saved, self._order)
        if rows is None:
            return self._in_saved_order(step, target)
        # The state in the saved order has no name here, so that `in_order_of` can free its leaves one by one.
        return in_order_of(target, self._in_saved_order(step, as_saved(target, rows, saved)), rows)

    def _in_saved_order(self, step: int, target: TrainState) -> TrainState:
        """`restore` without moving blocks. A part of the state that an older version did not save is made new."""
        with reading(f"checkpoint of step {step}"):
            unguarded = not self._manager.item_metadata(step)["state"].tree.get("guard")
            asked = target._replace(guard=()) if unguarded else target
            self._check(step, asked)
            state = self._manager.restore(step, args=ocp.args.Composite(state=_restoring(_lasting(asked))))["state"]
            if unguarded and target.guard:
                layout = jax.tree.map(lambda leaf: leaf.sharding, target.guard)
                state["guard"] = jax.jit(fresh_guard, out_shardings=layout)()
            return TrainState(**state, residual=self._residual(step, target.residual))

    def _verify(self, step: int) -> None:
        """Raise `UserError` for damage, unless `newest_intact` has just verified this step."""
        just, self._verified = self._verified, None
        if just == step:
            return
        self.wait()
        problem, sealed = from_first(check_files(self._folder / str(step), step) if jax.process_index() == 0 else None)
        if problem:
            raise UserError(f"checkpoint of step {step} is damaged: {problem}; use another one, or another --run-dir")
        if not sealed:
            warnings.warn(f"checkpoint of step {step} has no checksums and cannot be verified", stacklevel=3)

    def _residual(self, step: int, target: Any) -> Any:
        """The error feedback of lossy gradient sums in the layout of `target`; zeros where none was saved.

        It is one summand a device. On another number of devices the first one gets the sum of all.
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
        restored = self._manager.restore(step, args=ocp.args.Composite(residual=_restoring(asked)))
        return jax.tree.unflatten(treedef, map(fit, leaves, jax.tree.leaves(restored["residual"])))

    def _check(self, step: int, target: TrainState) -> None:
        found = self._manager.item_metadata(step)["state"].tree
        saved = leaves_by_name(found)
        asked = leaves_by_name(target._replace(residual=()))  # parameters first, for the message
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
        """Wait for a save under way. Raises `SaveFailed`, on every process, if it has not landed."""
        if self.under_way is None:
            return
        step, error = self._await()
        self._saves.enter("done", meeting=1)
        if anywhere(error is not None):
            self._fail(step, error)
        self.failed = None

    def _await(self) -> tuple[int, Exception | None]:
        """Wait. Returns the step that was being saved, and the error that this process met."""
        assert self.under_way is not None
        step, self.under_way = self.under_way, None
        try:
            self._manager.wait_until_finished()
        except FAILURES as error:
            self._drain()
            if jax.process_index() != 0 or not (self._folder / str(step)).is_dir():
                return step, error
            self._manager.reload()  # it has its name, which is given last
            warnings.warn(
                f"checkpoint of step {step} is saved, but an old one is not removed: {why(error)}", stacklevel=3
            )
        # Process 0 gives the folder its name, so that only it can tell.
        landed = jax.process_index() != 0 or (self._folder / str(step)).is_dir()
        if landed and jax.process_index() == 0:
            ended = (self._folder / str(step) / CHECKSUMS).stat().st_mtime  # the last file
            self.longest_save = max(self.longest_save, min(ended, time.time()) - self._began)
        return step, None if landed else FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _drain(self) -> None:
        """Wait for the rest of a save that failed: otherwise orbax's threads go on, and the next save raises their
        errors."""
        parts = self._manager._checkpointer, self._manager._non_blocking_metadata_store
        for part in parts:
            for _ in range(10):  # each failure is raised once; the first one is told
                try:
                    part.wait_until_finished()
                    break
                except FAILURES:
                    continue

    def close(self) -> None:
        """Wait for a save under way, then release everything. Raises `SaveFailed` of this process. Unlike `wait`, a
        process that fails may call it alone."""
        self._closing.set()  # the interpreter waits at its exit for `look_ahead`
        step, error = (0, None) if self.under_way is None else self._await()
        self._manager.close()
        if error is not None:
            raise SaveFailed(step, error) from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
