"""Checkpoints through orbax: asynchronous, atomic (a step's folder appears when complete, with checksums), verified.

A checkpoint holds whole arrays under the names of the `TrainState`'s leaves, blocks in the order of the model, whatever
the mesh, strategy and pipeline. They are restored straight into the layout that is asked for. The item `meta` beside
them is the record of the run.
"""

import errno
import math
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.checkpoint.arguments import check_save, check_shared, folder_of_step, folder_of_user, whole_state
from jaxdist.checkpoint.background import own_copy, writers_step_back
from jaxdist.checkpoint.barrier import Entered, SaveBarrier, not_watched, share_failures
from jaxdist.checkpoint.block_order import as_saved, between, in_model_order, in_order_of, order_of, saved_order
from jaxdist.checkpoint.checksums import Integrity, Landed, SealedFolder, check_files, loss_of, own_meta, recorded
from jaxdist.checkpoint.errors import FAILURES, SaveFailed, only_in, reading, tell_in_one_line, why
from jaxdist.checkpoint.retention import Retention, no_room, remove_leftovers
from jaxdist.errors import UserError
from jaxdist.files.regular import identity_of, name_aside, remove_empty
from jaxdist.precision.loss_scale import fresh_guard, tree_is_finite
from jaxdist.processes import anywhere, done_by_first
from jaxdist.specs import leaves_by_name
from jaxdist.state import TrainState, shardings_of


def _lasting(state: TrainState) -> dict[str, Any]:
    """The part of the state that every layout can restore, but for an empty model_state. The residual is apart."""
    left_out = {"residual"} if jax.tree.leaves(state.model_state) else {"residual", "model_state"}
    return {name: part for name, part in state._asdict().items() if name not in left_out}


def _restoring(target: Any) -> ocp.args.CheckpointArgs:
    """The arguments of orbax to restore arrays in the layout of `target` (ShapeDtypeStructs)."""
    return ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))


# Copies of an array are each saved in part, so that processes share the writing; a part of fewer bytes is not worth it:
# JAX compiles a program for each.
MIN_PART = 1 << 20
# Orbax measures its limit on a save by the wall clock, which may be set forward by an hour meanwhile. So its limit is
# years away. Processes that wait for each other have that of `SaveBarrier`.
NO_LIMIT_S = 10**8


class Checkpoints:
    """The folder `checkpoints/` of a run. Every process must make the same calls.

    Close it, or use it as a context. A failed asynchronous save raises `SaveFailed` in `wait`, in the next `save` or in
    `close`; it is never silent.

    - keep, keep_every, keep_best: see `Retention`.
    - entered: see `SaveBarrier`.
    """

    def __init__(
        self, folder: str | Path, *, keep: int, keep_every: int = 0, keep_best: int = 0, entered: Entered = not_watched
    ) -> None:
        self._folder = folder_of_user(folder)
        self._retention, self._saves = Retention(keep, keep_every, keep_best), SaveBarrier(entered)
        self._is_finite = jax.jit(tree_is_finite)
        self._manager = self._open()
        self._shared = check_shared(self._folder)
        self._retention.losses.update({step: loss_of(self._folder / str(step)) for step in self._manager.all_steps()})
        self.under_way: int | None = None  # the step of a save that was not waited for; the same on every process
        self._ahead: tuple[int, Future[Integrity]] | None = None
        self._closing = Event()
        self._began = 0.0
        self.longest_save = 0.0  # seconds, from the call of `save` to the end; on process 0
        self._verified: int | None = None
        self.failed: SaveFailed | None = None  # how the last save ended, if it did not land
        # Written by the thread of a save, on process 0: how it landed, and why old checkpoints could not be removed.
        self._landed, self._not_removed = Landed(None, 0.0), list[OSError]()

    def _open(self) -> ocp.CheckpointManager:
        """The manager of orbax for the folder, once what killed and failed saves have left is removed."""
        tell_in_one_line()
        remove_leftovers(self._folder)  # not by orbax, which does it in the background, and may meet the next save's
        options = ocp.CheckpointManagerOptions(
            create=True,
            enable_async_checkpointing=True,
            temporary_path_class=SealedFolder.of(self._saves, self._commit),
            # If making them fails in a thread, other threads of orbax wait for it, and the interpreter for these.
            async_options=ocp.options.AsyncOptions(
                timeout_secs=NO_LIMIT_S, create_directories_asynchronously=False, barrier_sync_fn=self._saves.meet
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
        try:
            return ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)
        except OSError as error:
            raise UserError(f"{self._folder} cannot hold checkpoints: {why(error)}; use another --run-dir") from error

    def move_to(self, folder: Path) -> None:
        """Go on in this folder, to which the old one was moved. What a save has written to the old path is removed."""
        assert self.under_way is None
        self._manager.close()
        remove_leftovers(self._folder)
        remove_empty(self._folder, self._folder.parent)
        self._folder = folder.absolute()
        self._manager = self._open()

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
        damaged or the format of one is newer (none is moved), and `SaveFailed` as `wait` does.
        """
        self.wait()
        step, lines = done_by_first(self._look)
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
        path = self._folder / str(step)
        aside = name_aside(path)
        try:
            path.rename(aside)
        except OSError as error:
            what = f"checkpoint of step {step} in {self._folder} is damaged and cannot be moved aside: {why(error)}"
            raise UserError(f"{what}; move it away") from error
        return aside.name

    def save(self, step: int, state: TrainState, meta: dict[str, Any], *, loss: float | None = None) -> None:
        """Start a save. When this returns, the state has been copied: its buffers may be donated.

        loss: of an evaluation, for `keep_best`. Raises FloatingPointError, and writes nothing, where parameters or
        optimizer state are not finite; `SaveFailed` if the previous save has not landed, or this one cannot begin.
        """
        if not self._is_finite((whole_state(state, "state").params, state.opt_state)):
            raise FloatingPointError(f"the state after step {step} is not finite, though loss and gradients were")
        self.wait()
        step, meta, loss = check_save(step, meta, loss, self.latest())
        self._saves.begin()
        self._saves.enter("making its folder")
        if self.failed is not None:
            remove_leftovers(self._folder)  # they take room
        problem = self.no_room()
        self._saves.enter("copying")
        if self._saves.fails_anywhere(problem is not None):
            self._fail(step, problem)
        self._shared = self._shared or check_shared(self._folder)
        order = order_of(state)
        state = own_copy(state) if order is None else in_model_order(state, order)
        items = {"state": ocp.args.PyTreeSave(_lasting(state)), "meta": ocp.args.JsonSave(recorded(meta, loss))}
        if jax.tree.leaves(state.residual):
            items["residual"] = ocp.args.PyTreeSave(state.residual)
        self._retention.losses[step], self._began = math.nan if loss is None else loss, time.monotonic()
        self._landed, self._not_removed = Landed(None, 0.0), []
        try:
            saved = self._manager.save(step, args=ocp.args.Composite(**items))
        except FAILURES as error:
            if jax.process_count() > 1:
                raise  # the others wait in orbax: only the end of this process tells them
            self._fail(step, error)
        assert saved, f"orbax declined to save step {step}"
        self.under_way = step
        writers_step_back()

    def no_room(self) -> OSError | None:
        """Why process 0 cannot write here, as far as a small file tells; None on the others."""
        return no_room(self._folder)

    def _fail(self, step: int, error: Exception | None) -> NoReturn:
        self._manager.reload()  # orbax lists the step that was to be saved
        self.failed = SaveFailed(step, error)
        raise self.failed from error

    def meta(self, step: int) -> dict[str, Any]:
        """The record saved with a step."""
        return own_meta(self._meta(step))

    def _meta(self, step: int) -> dict[str, Any]:
        """`meta`, with what this package has written beside it."""
        self.wait() if step == self.under_way else folder_of_step(self._folder, step)
        with reading(f"checkpoint of step {step}"):
            found = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))
        return dict(found["meta"])

    def restore(self, step: int, target: TrainState) -> TrainState:
        """The state of a step in the layout of `target` (ShapeDtypeStructs with shardings).

        Raises `UserError` for a damaged checkpoint, and for another model or optimizer: orbax would restore changed
        bytes, and cast dtypes, silently. Warns about a checkpoint of an older version, without checksums.
        """
        whole_state(target, "target")
        self._verify(step)
        saved = saved_order(self._meta(step))
        rows = between(saved, order_of(target))
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
                state["guard"] = jax.jit(fresh_guard, out_shardings=shardings_of(target.guard))()
            kept = {"model_state": target.model_state} | state  # without arrays it is not saved
            return TrainState(**kept, residual=self._residual(step, target.residual))

    def _verify(self, step: int) -> None:
        """Raise `UserError` for damage, unless `newest_intact` has just verified this step."""
        just, self._verified = self._verified, None
        if just == step:
            return
        self.wait()
        problem, sealed = done_by_first(lambda: check_files(folder_of_step(self._folder, step), step))
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
            return jax.jit(zeros, out_shardings=shardings_of(target))()

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
        if saved.keys() != asked.keys():
            raise UserError(f"{where}: {only_in(saved, asked)}")
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
            late: list[Exception] = [*self._not_removed]
        except FAILURES as error:
            self._drain()
            late = [error]
        if jax.process_index() != 0:  # process 0 gives the folder its name, so that only it can tell
            return step, late[0] if late else None
        own, there = self._landed.folder, identity_of(self._folder / str(step))
        if own is None or own != there:  # another folder of that name is no proof
            return step, late[0] if late else FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if late:  # it has its name, which is given last
            what = "is saved, but an old one is not removed"
            warnings.warn(f"checkpoint of step {step} {what}: {why(late[0])}", stacklevel=3)
        self._manager.reload()  # orbax does not know what was removed
        self.longest_save = max(self.longest_save, self._landed.at - self._began)
        return step, None

    def _commit(self, landed: Landed) -> None:
        """Take note of a save that is complete, then remove what is old. On process 0, in the save's thread."""
        self._landed, self._not_removed = landed, self._retention.remove_old(self._folder)

    def _drain(self) -> None:
        """Wait for the rest of a save that failed: otherwise orbax's threads go on, and the next save raises their
        errors."""
        for part in (self._manager._checkpointer, self._manager._non_blocking_metadata_store):
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
