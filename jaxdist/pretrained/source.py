"""What is known of parameters that exist already, and how they come into a layout."""

import fnmatch
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from jaxdist.checkpoint.block_order import order_of
from jaxdist.checkpoint.huggingface.safetensors import tensor_name
from jaxdist.config.load import model_differences, settings_by_key
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.optimizer import LoraConfig
from jaxdist.errors import UserError, first_of
from jaxdist.specs import STACKED, PyTree, leaves_by_name, path_name
from jaxdist.state import TrainState

Say = Callable[[str], None]
# Keys of a model that change how it is computed, or trained, and not what it is.
MAY_DIFFER = (
    *("name", "from", "style", "dropout", "label_smoothing", "attention", "scan_blocks", "loss_chunk", "vocab"),
    *(f"moe.{key}" for key in ("dispatch", "factor", "group", "pieces", "bias_rate", "balance_loss", "z_loss")),
)
SHOWN = 5  # parameters that a message lists


class Pretrained(ABC):
    """Parameters that exist already. Use it as a context: it may hold files open.

    - described: such as "step 200 of runs/a".
    - model: the architecture, `resolved`; None: the place does not say it.
    - positions: the length of the longest sequence; None: not known.
    - tokenizer: the folder of its tokenizer; None: there is none.
    - lora: of the adapters that are among the parameters; None: there are none.
    - mend: what to do about parameters that do not fit, for messages.
    """

    described: str
    model: ModelConfig | None = None
    positions: int | None = None
    tokenizer: Path | None = None
    lora: LoraConfig | None = None
    mend: str = "give model.from the same place, or name in init.partial what may differ"
    _key: str

    @abstractmethod
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The parameters by name. Blocks are stacked, in the order of the model."""

    @abstractmethod
    def digest(self) -> str:
        """A hash, in hex, that other parameters do not have."""

    @abstractmethod
    def _arrays(
        self, target: Mapping[str, jax.ShapeDtypeStruct], order: np.ndarray | None, say: Say
    ) -> Iterable[tuple[str, jax.Array]]:
        """The parameters that `target` names, in its layout and dtypes."""

    def model_state(self) -> dict[str, np.ndarray]:
        """The state that a loss carries besides parameters, such as running statistics, by name; {}: there is none."""
        return {}

    def load_model_state(self, target: PyTree) -> PyTree:
        """The model_state in the layout and dtypes of `target`. Raises `UserError` where it is of another model."""
        wanted, mine = leaves_by_name(target), self.model_state()
        there, here = ({name: tuple(leaf.shape) for name, leaf in leaves.items()} for leaves in (mine, wanted))
        if wrong := sorted(name for name in there | here if there.get(name) != here.get(name)):
            own, other = (each.get(wrong[0], "absent") for each in (here, there))
            raise UserError(
                f"{self._key}: {self.described} does not fit this model: model_state.{wrong[0]} is {other} there and"
                f" {own} here; give a run of the same model"
            )
        placed = {name: jax.device_put(mine[name].astype(like.dtype), like.sharding) for name, like in wanted.items()}
        return jax.tree_util.tree_map_with_path(lambda path, _: placed[path_name(path)], target)

    def _fits(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
        """Whether a parameter of one shape can become one of another."""
        return found == wanted

    def load(
        self,
        target: TrainState | PyTree,
        *,
        fresh: Callable[[frozenset[str]], dict[str, jax.Array]] | None = None,
        partial: Sequence[str] = (),
        say: Say = print,
    ) -> PyTree:
        """The parameters in the layout of `target`. Each process reads the parts of its own devices.

        target: a `jaxdist.state_target`; or parameters alone, a tree of ShapeDtypeStructs with shardings, which cannot
            say that its blocks are in the order of a pipeline (`arrange`).
        fresh: names -> initial values, for parameters that `partial` allows to be missing or of another shape.
        partial: patterns of names, such as "head.*".
        say: gets a line about what is not read.

        Raises `UserError` that lists what does not fit.
        """
        order = None
        if isinstance(target, TrainState):
            order, target = order_of(target), target.params
        asked, mine = leaves_by_name(target), self.shapes()
        wanted = {name: tuple(leaf.shape) for name, leaf in asked.items()}
        if order is not None:  # rows without a block are padding
            stacked = [name for name in wanted if name.startswith(f"{STACKED}.")]
            wanted |= {name: (int(order.max()) + 1, *wanted[name][1:]) for name in stacked}
        misfits = {
            name: f"{tensor_name(name)} {_shape(mine.get(name))}, here {_shape(wanted.get(name))}"
            for name in [*wanted, *mine]
            if name not in mine or name not in wanted or not self._fits(name, tuple(mine[name].shape), wanted[name])
        }
        idle = [
            each for each in partial if not each.startswith("model.") and not fnmatch.filter([*wanted, *mine], each)
        ]
        if idle:
            raise UserError(
                f"init.partial: {idle[0]!r} fits no parameter; allowed: patterns of {_listed(list(wanted))}"
            )
        allowed = {name for name in misfits if _fitting(name, partial) and (fresh or name not in wanted)}
        self._refuse([text for name, text in misfits.items() if name not in allowed])
        kept = frozenset(allowed & wanted.keys())
        found = dict(self._arrays({name: leaf for name, leaf in asked.items() if name not in kept}, order, say))
        if kept and fresh:
            found |= fresh(kept)
            say(f"{self._key}: {_listed(sorted(kept))} start at random")
        if left := sorted(allowed - wanted.keys()):
            say(f"{self._key}: {_listed(left)} not read (init.partial)")
        # By the paths of the target, some keys of which are numbers: blocks in a list of a module's.
        return jax.tree_util.tree_map_with_path(lambda path, _: found[path_name(path)], target)

    def _refuse(self, misfits: Sequence[str]) -> None:
        if misfits:
            raise UserError(
                f"{self._key}: {self.described} does not fit this model: {_listed(misfits, '; ')}; {self.mend}"
            )

    def check_architecture(self, model: ModelConfig, partial: Sequence[str] = ()) -> None:
        """Raise `UserError` where a model (`resolved`) would compute something else with these parameters.

        partial: patterns of keys that may differ, such as "model.rope_theta".
        """
        mine = self.model
        if mine is None or type(mine) is not type(model):
            return
        wanted = {
            key: value
            for key, value in settings_by_key(mine).items()
            if key not in MAY_DIFFER and not _fitting(f"model.{key}", partial)
        }
        if wrong := {each.partition("=")[0]: each for each in model_differences(wanted, model)}:
            idle = [f"model.{each}" for each in mine.idle()]  # no key to set: there they change nothing
            shown = [text for key, text in wrong.items() if not _fitting(key, idle)] or [*wrong.values()]
            raise UserError(
                f"{self._key}: {self.described} asks for {', '.join(shown)}; set them, give model.from the same place,"
                f" or let them differ: init.partial={json.dumps([*partial, *wrong])}"
            )

    @abstractmethod
    def close(self) -> None:
        """Close what is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _shape(leaf: Any) -> Any:
    """For a message: of an array, or a shape itself."""
    return "absent" if leaf is None else list(getattr(leaf, "shape", leaf))


def _fitting(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, each) for each in patterns)


def _listed(names: Sequence[str], between: str = ", ") -> str:
    return first_of(names, SHOWN, between)


def cast_text(before: Iterator[Any], after: Iterator[Any]) -> str:
    """Such as "; bfloat16 cast to float32", or "" where nothing is cast."""
    old, new = sorted({str(each) for each in before}), sorted({str(each) for each in after})
    return "" if old == new else f"; {' and '.join(old)} cast to {' and '.join(new)}"
