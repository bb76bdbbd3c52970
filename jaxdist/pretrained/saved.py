"""Parameters of a run: its checkpoints, read by orbax into the layout that is asked for."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict

from jaxdist.checkpoint.block_order import as_saved, between, in_order_of, saved_order, settings_of_run
from jaxdist.checkpoint.checksums import CHECKSUMS, verify
from jaxdist.checkpoint.errors import reading
from jaxdist.checkpoint.huggingface.convert import recorded_model
from jaxdist.checkpoint.huggingface.family import POSITIONS
from jaxdist.checkpoint.reader import FOLDER, Stored, is_complete, leaves_read, open_steps
from jaxdist.config.rules.fields import keys, show
from jaxdist.config.sections.optimizer import LoraConfig
from jaxdist.errors import UserError
from jaxdist.pretrained.source import Pretrained, Say, cast_text
from jaxdist.specs import leaves_by_name
from jaxdist.state import TrainState


class Saved(Pretrained):
    """A step of a run. A table of positions may have fewer rows in the model: the first are taken.

    where: as of `open_pretrained`; or a step that was verified.
    ema: its moving average in place of its parameters; frozen ones have none, and are as they are.

    Raises `UserError` where it is damaged, or has no average.
    """

    def __init__(self, where: Path | Stored, *, key: str, ema: bool) -> None:
        self._key = key
        if isinstance(where, Stored):
            self._stored, run = where, _run_of(where.folder)
        elif is_complete(where):
            if problems := verify(where):
                raise UserError(f"{key}: {where} is damaged: {'; '.join(problems)}; use another step")
            self._stored, run = Stored(where), _run_of(where)
        else:
            (self._stored,) = open_steps(where)
            run = where
        meta = settings_of_run(self._stored.meta)
        self.described = f"{'the average of ' * ema}step {self._stored.step} of {run}"
        self._averaged = self._stored.averages() if ema else {}
        if ema and not self._averaged:
            raise UserError(
                f"{key}: step {self._stored.step} of {run} keeps no moving average; allowed: a run with train.ema, or"
                " no ema"
            )
        if "." not in str(meta.get("model", {"name": "."}).get("name", "gpt")):  # a dotted path would be imported
            self.model = recorded_model(meta["model"], f"{key}: step {self._stored.step} of {run}")
        self.lora = _adapters(meta.get("optimizer", {}).get("lora"), self.described)
        self.positions = meta.get("data", {}).get("seq_len")
        folder = meta.get("config", {}).get("data.tokenizer")  # a setting that a resumed run may change
        self.tokenizer = Path(folder) if folder not in (None, "bytes") else None

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return self._stored.params()

    def model_state(self) -> dict[str, np.ndarray]:
        return leaves_by_name(self._stored.model_state(ema=bool(self._averaged)))

    def digest(self) -> str:
        seal = self._stored.folder / CHECKSUMS  # of every byte of the step; older versions wrote none
        text = f"{sorted(self.shapes().items())} {bool(self._averaged)} {self._stored.meta}"
        return hashlib.sha256(text.encode() + (seal.read_bytes() if seal.exists() else b"")).hexdigest()

    def _fits(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
        return found == wanted or (name == POSITIONS and found[1:] == wanted[1:] and found[0] > wanted[0])

    def close(self) -> None:
        """Nothing is open."""

    def _arrays(
        self, target: Mapping[str, jax.ShapeDtypeStruct], order: np.ndarray | None, say: Say
    ) -> Iterable[tuple[str, jax.Array]]:
        shapes = self.shapes()
        dtypes = (shapes[name].dtype for name in target), (leaf.dtype for leaf in target.values())
        say(f"{self._key}: parameters of {self.described}{cast_text(*dtypes)}")
        for name, like in target.items():
            yield name, self._array(name, like, shapes[name], order)

    def _array(
        self, name: str, like: jax.ShapeDtypeStruct, found: jax.ShapeDtypeStruct, order: np.ndarray | None
    ) -> jax.Array:
        asked: Any = unflatten_dict({name: like}, sep=".")
        saved = saved_order(self._stored.meta)
        rows = between(saved, order)
        state = TrainState((), asked, ())
        state = state if rows is None else as_saved(state, rows, saved)
        (wanted,) = leaves_by_name(state.params).values()
        longer = name == POSITIONS and found.shape != like.shape
        if longer:  # a small table: whole on every device for a moment
            whole = jax.sharding.NamedSharding(like.sharding.mesh, jax.sharding.PartitionSpec())
            wanted = jax.ShapeDtypeStruct(found.shape, like.dtype, sharding=whole)
        array = self._read(name, wanted)
        if longer:
            return jax.jit(lambda table: table[: like.shape[0]], out_shardings=like.sharding)(array)
        if rows is None:
            return array
        restored = TrainState((), unflatten_dict({name: array}, sep="."), ())
        del array
        (moved,) = jax.tree.leaves(in_order_of(TrainState((), asked, ()), restored, rows))
        return moved

    def _read(self, name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        item = self._stored.asking(like, name, self._averaged.get(name))
        arguments = ocp.checkpoint_utils.construct_restore_args(item)
        asked = ocp.args.PyTreeRestore(item=item, restore_args=arguments)
        with reading(str(self._stored.folder)):
            found = ocp.PyTreeCheckpointHandler().restore(self._stored.folder / "state", args=asked)
        (array,) = leaves_read(found)
        return array


def _run_of(step: Path) -> Path:
    """The run directory, or the folder of checkpoints, of a step's folder."""
    return step.parent.parent if step.parent.name == FOLDER else step.parent


def _adapters(given: Any, where: str) -> LoraConfig | None:
    """LoRA's section in a record; None: the run had no adapters. Raises `UserError`."""
    if not given:
        return None
    known = keys(LoraConfig)
    if not isinstance(given, dict) or given.keys() - known.keys():
        raise UserError(f"{where} has a record optimizer.lora that is not known here: {show(given)}; use another run")
    found = LoraConfig(**{name: known[name].check(value, f"optimizer.lora.{name}") for name, value in given.items()})
    return found if found.rank else None
