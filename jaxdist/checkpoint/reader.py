"""Reading checkpoints on the host, leaf by leaf, without a mesh, a model or an optimizer."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxdist.checkpoint.block_order import NONE, saved_order, stacked_dims
from jaxdist.checkpoint.checksums import loss_of, record_of, verify
from jaxdist.checkpoint.errors import reading
from jaxdist.checkpoint.retention import best_first
from jaxdist.config.arguments import BEST
from jaxdist.errors import UserError
from jaxdist.optim.ema import EMA_STATES
from jaxdist.parallel.pipeline.stages import rows_of_blocks
from jaxdist.specs import PyTree, leaves_by_name, path_name
from jaxdist.state import TrainState

FOLDER = "checkpoints"  # in a run directory


def is_complete(folder: Path) -> bool:
    """Whether a step's folder was written to its end. Its name and these files come last."""
    return folder.name.isdigit() and (folder / "_CHECKPOINT_METADATA").is_file() and (folder / "state").is_dir()


def step_folders(run_dir: Path) -> list[Path]:
    """All folders of steps in a run directory, in order, complete or not. A loop of one's own has no run directory: its
    folder of checkpoints will do. Raises `UserError` where there is none."""
    folder = run_dir / FOLDER if (run_dir / FOLDER).is_dir() else run_dir
    named = re.compile(r"[0-9]+(\..*)?")
    found = [path for path in folder.iterdir() if named.fullmatch(path.name)] if folder.is_dir() else []
    if not found:
        raise UserError(f"{run_dir}: holds no checkpoints; give a run directory, or the folder of a loop of your own")
    return sorted(found, key=lambda path: (int(path.name.partition(".")[0]), path.name))


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def open_steps(
    run_dir: Path, *, last: int = 1, step: int | str | None = None, say: Callable[[str], None] = _to_stderr
) -> list["Stored"]:
    """Complete steps of `step_folders`. Raises `UserError` where they are not there, or damaged.

    - last: without `step`, how many of the newest, oldest first.
    - step: one alone: its number, or `BEST` for the intact one with the least evaluation loss.
    - say: gets a line about each better one that is damaged.
    """
    complete = [path for path in step_folders(run_dir) if is_complete(path)]
    if step == BEST and complete:
        return [Stored(_best_intact(complete, run_dir, say))]
    chosen = complete[-last:] if step is None else [path for path in complete if path.name == str(step)]
    if not chosen or (step is None and len(chosen) < last):
        wanted = f"--last: {last}" if step is None else f"--step: {step}"
        raise UserError(f"{wanted}, but the complete steps in {run_dir} are: {_names(complete) or 'none'}")
    for path in chosen:
        if problems := verify(path):
            raise UserError(f"{path}: is damaged: {'; '.join(problems)}; use another step")
    return [Stored(path) for path in chosen]


def _names(folders: Iterable[Path]) -> str:
    return ", ".join(path.name for path in folders)


def _first_intact(folders: Iterable[Path], say: Callable[[str], None]) -> Path | None:
    """The first folder of a step whose files are as they were written. say: gets a line about each before it."""
    for path in folders:
        problems = verify(path)
        if not problems:
            return path
        say(f"checkpoint of step {path.name} is damaged, and passed over: {'; '.join(problems)}")
    return None


def _best_intact(complete: list[Path], run_dir: Path, say: Callable[[str], None]) -> Path:
    """The folder of the intact step with the least evaluation loss. Raises `UserError` where there is none."""
    for path in (unread := [path for path in complete if record_of(path) is None]):
        say(f"checkpoint of step {path.name} is damaged, and passed over: its evaluation loss cannot be read")
    folders = {int(path.name): path for path in complete}
    judged = [folders[step] for step in best_first({step: loss_of(path) for step, path in folders.items()})]
    if found := _first_intact(judged, say):
        return found
    others = _names(path for path in complete if path not in (*judged, *unread))
    mend = f"give a number: {others}" if others else "use a copy of the run"
    if judged:
        raise UserError(f"--step: {BEST}, but all steps in {run_dir} with an evaluation's loss are damaged; {mend}")
    raise UserError(
        f"--step: {BEST}, but no complete step in {run_dir} was saved with an evaluation's loss; {mend}. Set"
        " train.eval_every, or give `Checkpoints.save` the loss, for later ones"
    )


def newest_intact_step(run_dir: Path, say: Callable[[str], None] = _to_stderr) -> Path:
    """The folder of the newest complete step whose files are as they were written. Nothing is moved. say: gets a line
    about each newer, damaged one. Raises `UserError` where there is none."""
    if found := _first_intact(filter(is_complete, reversed(step_folders(run_dir))), say):
        return found
    raise UserError(f"{run_dir}: holds no intact checkpoint; jaxdist checkpoint verify says what there is of each")


class Stored:
    """A step of a checkpoint folder. Blocks come in the order of the model; older versions saved them in that of a
    pipeline.

    meta: the record saved with it (`jaxdist.trainer.resume.record`).
    ema: whether `param` gives the moving average of a parameter, in its dtype. Raises `UserError` where none is kept.
    """

    def __init__(self, folder: Path, *, ema: bool = False) -> None:
        self.folder = folder.absolute()
        self.step = int(folder.name)
        self._handler = ocp.PyTreeCheckpointHandler()
        with reading(str(self.folder)):
            self.meta: dict[str, Any] = ocp.JsonCheckpointHandler().restore(self.folder / "meta")
            self._tree = self._handler.metadata(self.folder / "state").tree
        order = saved_order(self.meta)
        self._rows = None if order is None else rows_of_blocks(order)
        parts = {"opt_state": (), "guard": ()} | self._tree
        self._dims = leaves_by_name(stacked_dims(TrainState(**parts)))
        self._instead = self.averages() if ema else {}
        if ema and not self._instead:
            raise UserError(f"--ema: {folder} keeps no moving average; allowed: a run with train.ema; leave it out")

    def params(self) -> dict[str, Any]:
        """Shapes and dtypes of the parameters, {"blocks.mlp.up.kernel": ShapeDtypeStruct}."""
        found = {}
        for name, leaf in leaves_by_name(self._tree["params"]).items():
            shape, dim = list(leaf.shape), self._dims[_below("params", name)]
            if self._rows is not None and dim != NONE:
                shape[dim] = self._rows.size
            found[name] = jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)
        return found

    def averages(self) -> dict[str, str]:
        """Where the state has the moving average of each parameter, by the parameter's name; {} without `with_ema`."""
        found = self._tree.get("opt_state")
        if not isinstance(found, dict) or all(found.keys() != {*kind._fields} for kind in EMA_STATES):
            return {}
        return {name: _below("opt_state.ema", name) for name in leaves_by_name(found["ema"])}

    def param(self, name: str) -> np.ndarray:
        """One parameter."""
        (array,) = leaves_read(self._read(self.asking(0, name, self._instead.get(name))))
        return array.astype(self.params()[name].dtype) if self._instead else array

    def model_state(self, *, ema: bool = False) -> PyTree:
        """The model_state as lists and dicts of arrays; () where the state has none.

        ema: its average, by `with_ema`; the model_state itself where an older version kept no average of it.
        """
        ema = ema and "model_state" in self._tree["opt_state"]
        part = (self._tree["opt_state"] if ema else self._tree).get("model_state", ())
        if not jax.tree.leaves(part):
            return ()
        nothing = jax.tree.map(lambda _: ocp.PLACEHOLDER, self._tree)
        if not ema:
            return self._read({**nothing, "model_state": part})["model_state"]
        asked = {**nothing["opt_state"], "model_state": part}
        return self._read({**nothing, "opt_state": asked})["opt_state"]["model_state"]

    def asking(self, like: Any, name: str, path: str | None = None) -> PyTree:
        """The state as orbax is asked for it, of which it is to read a parameter alone, or what is at a path, as `like`
        says. Trees of parameters may hold lists."""
        wanted = path or _below("params", name)
        one = lambda at, _: like if path_name(at) == wanted else ocp.PLACEHOLDER  # noqa: E731
        return jax.tree_util.tree_map_with_path(one, self._tree)

    def tree_of(self, params: Mapping[str, Any]) -> PyTree:
        """The tree of the parameters, of values by their names."""
        mine = self._tree["params"]
        return jax.tree.unflatten(jax.tree.structure(mine), [params[name] for name in leaves_by_name(mine)])

    def rest(self) -> dict[str, Any]:
        """Optimizer state, step and guard, as lists and dicts of arrays: all but the parameters."""
        left_out = jax.tree.map(lambda _: ocp.PLACEHOLDER, self._tree["params"])
        found = self._read({**self._tree, "params": left_out})
        return {name: part for name, part in found.items() if name != "params"}

    def _read(self, tree: PyTree) -> PyTree:
        on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        asked = ocp.args.PyTreeRestore(item=tree, restore_args=on_host)
        with reading(str(self.folder)):
            found = self._handler.restore(self.folder / "state", args=asked)
        rows, dims = self._rows, self._dims
        if rows is None:
            return found

        def in_model_order(path: tuple[Any, ...], leaf: np.ndarray) -> np.ndarray:
            dim = NONE if leaf is ocp.PLACEHOLDER else dims[path_name(path)]
            return leaf if dim == NONE else leaf.take(rows, axis=dim)

        return jax.tree_util.tree_map_with_path(in_model_order, found)


def leaves_read(tree: PyTree) -> list[Any]:
    """The leaves that orbax has read of `Stored.asking`."""
    return [leaf for leaf in jax.tree.leaves(tree) if leaf is not ocp.PLACEHOLDER]


def _below(part: str, name: str) -> str:
    """The path in a state of a parameter; that of a tree that is a single array is ""."""
    return f"{part}.{name}" if name else part
