"""What a family of models is in Hugging Face's format: its tensors, and its keys of config.json.

One table of tensors serves both directions, because a tensor is described by a view of our leaf: reading the view
exports, writing to it imports. Nothing is computed.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxdist.config.load import settings_by_key
from jaxdist.config.rules.fields import Key, show
from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError

CONFIG = "config.json"
HEAD_DROPOUT = "classifier_dropout"  # of config.json: the rate of heads that classify
POSITIONS = "embed.positions.table"  # our learned positions


class Tensor(NamedTuple):
    """A tensor of Hugging Face.

    - leaf: the name of our parameter. Of a stacked one, this is about one block of `stacked_blocks`.
    - name: the tensor's name, {} for the number of the block.
    - shape: of the tensor.
    - view: our leaf -> a view of it with the elements of the tensor, in order. As it is, if left out.
    """

    leaf: str
    name: str
    shape: tuple[int, ...]
    view: Callable[[np.ndarray], np.ndarray] = np.asarray

    def take(self, leaf: np.ndarray) -> np.ndarray:
        """The tensor, from our leaf."""
        return np.ascontiguousarray(self.view(leaf)).reshape(self.shape)

    def put(self, leaf: np.ndarray, tensor: np.ndarray) -> None:
        """Write the tensor into our leaf, in the leaf's dtype."""
        view = self.view(leaf)
        view[...] = tensor.reshape(view.shape).astype(leaf.dtype, copy=False)


# Of config.json: (found, our keys, the model, positions) -> (values of our keys, other differences in words).
ConfigReader = Callable[[dict[str, Any], Mapping[str, Key], ModelConfig, int], tuple[dict[str, Any], list[str]]]


def _nothing(found: dict[str, Any], known: Mapping[str, Key], model: ModelConfig, positions: int) -> Any:
    return {}, []


def _no_copies(model: ModelConfig) -> dict[str, str]:
    return {}


class Family(NamedTuple):
    """A family of models. Models are resolved; positions is the length of the longest sequence.

    - kind: the `model_type` of config.json.
    - architecture: the class of transformers.
    - prefix: of most names. A bare model, such as OpenAI's GPT-2, has no prefix in its names.
    - keys: {key of config.json: (our key of section model, such as "moe.top_k", the default of transformers)}.
    - fixed: values of config.json that our models compute and no key of ours changes. The first of each is written.
    - tensors: (model, positions) -> its tensors; those of one leaf are neighbours.
    - written: (model, positions) -> the other keys of config.json.
    - read: what `keys` cannot say, see `ConfigReader`. Its values of our keys replace those of `keys`.
    - impossible: (found, model) -> what no configuration makes, where nothing else differs; or "".
    - style: `model.style` of all its models; "" if they have no such key. Names of tensors are those of all families of
      this style: which of them a model has goes by its other options.
    - length: (key of config.json for the length of the longest sequence, its default); None: there is none.
    - positions: our table of learned positions, whose first rows serve shorter sequences; "": there is none.
    - tables: our leaves whose rows are the vocabulary.
    - copies: model -> {a tensor that may be in the files: our leaf that it repeats}.
    - unequal: what a message says of such a tensor that does not repeat it; {} for the name of the tensor that is read.
    - aliases: (end of a name, the end that it has in some files).
    - ignored: ends of the names of tensors that are no parameters.
    - zeros: our leaves that are 0 at every step, and in no file.
    - dropout: {key of config.json for a rate of dropout: the default of transformers; None: no rate of its own}.
    - undropped: in words, what has no such key and drops nothing there, where ours drops at `model.dropout`.
    """

    kind: str
    architecture: str
    prefix: str
    keys: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, tuple[Any, ...]]
    tensors: Callable[[ModelConfig, int], list[Tensor]]
    written: Callable[[ModelConfig, int], dict[str, Any]]
    read: ConfigReader = _nothing
    impossible: Callable[[dict[str, Any], ModelConfig], str] = lambda found, model: ""
    style: str = ""
    length: tuple[str, int] | None = None
    positions: str = ""
    tables: tuple[str, ...] = ()
    copies: Callable[[ModelConfig], dict[str, str]] = _no_copies
    unequal: str = "differs from {}, and this model has one parameter for both; no configuration makes two"
    aliases: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    dropout: Mapping[str, float | None] = MappingProxyType({})
    undropped: tuple[str, ...] = ()

    @property
    def form(self) -> str:
        """Equal for families whose tensors have the same names."""
        return self.style or self.kind


def stacked_blocks(model: ModelConfig) -> range:
    """The numbers of the blocks that are stacked: not those before a mixture of experts that have one MLP."""
    moe = getattr(model, "moe", None)
    return range(moe.dense if moe is not None and moe.on else 0, model.layers)


def check_options(model: ModelConfig, wanted: Mapping[str, tuple[Any, str]], of: str, other: str = "") -> None:
    """Raise `UserError` for an option that a family does not have.

    wanted: {our key: (its one value, why)}. of: the family's name. other: a way out, for the end of the message.
    """
    own = settings_by_key(model)
    for key, (value, why) in wanted.items():
        if own[key] != value:
            raise UserError(f"model.{key}: {show(own[key])}, but {of} {why}; allowed: {show(value)}{other}")


def config_value(found: dict[str, Any], theirs: str, ours: Key, usual: Any) -> Any:
    """A value of config.json, of the type and in the range of our key. null is allowed where it is usual."""
    return replace(ours, optional=usual is None).check(found.get(theirs, usual), f"{CONFIG}: {theirs}")


def norm_tensors(leaf: str, name: str, width: int, *, bias: bool = True) -> list[Tensor]:
    """Those of a norm. leaf, name: without `.scale` and `.weight`."""
    scale = Tensor(f"{leaf}.scale", f"{name}.weight", (width,))
    return [scale, Tensor(f"{leaf}.bias", f"{name}.bias", (width,))] if bias else [scale]


def linear_tensors(leaf: str, name: str, inputs: int, outputs: int) -> list[Tensor]:
    """Those of a linear layer with a bias: theirs is [outputs, inputs], our kernel [inputs, outputs]."""
    kernel = Tensor(f"{leaf}.kernel", f"{name}.weight", (outputs, inputs), np.transpose)
    return [kernel, Tensor(f"{leaf}.bias", f"{name}.bias", (outputs,))]


def qkv_tensors(leaf: str, names: tuple[str, str, str], width: int) -> list[Tensor]:
    """Those of queries, keys and values with biases. Our kernel [D, n, 3, K] has a head's three together."""
    kernels = [
        Tensor(f"{leaf}.kernel", f"{name}.weight", (width, width), _kernel_of(i)) for i, name in enumerate(names)
    ]
    biases = [Tensor(f"{leaf}.bias", f"{name}.bias", (width,), _bias_of(i)) for i, name in enumerate(names)]
    return kernels + biases


def _kernel_of(i: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x_DnQK: x_DnQK[:, :, i].transpose(1, 2, 0)


def _bias_of(i: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x_nQK: x_nQK[:, i]
