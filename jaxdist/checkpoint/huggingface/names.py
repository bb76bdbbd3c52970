"""The table of Hugging Face's tensors for GPT-2 and Llama: the name of each, and its place in our parameters.

One table serves both directions, because a tensor is described by a view of our leaf: reading the view exports, writing
to it imports. Nothing is computed. Names and layouts are those of `transformers`, models/gpt2/modeling_gpt2.py (Conv1D
kernels are [in, out], as ours) and models/llama/modeling_llama.py (Linear weights are [out, in]). Both rotate the
halves of a head together, as `jaxdist.nn.attention.rotary` does, so no head is permuted.

Legend: D model width, n key/value heads, G query heads of one, K head width, F hidden width of the MLP, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxdist.config.rules.fields import show
from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError

FAMILIES = {"gpt2": ("learned", "layernorm", "gelu"), "llama": ("rope", "rmsnorm", "swiglu")}
HEAD = "lm_head.weight"  # the one name without the prefix
PREFIXES = {"gpt2": "transformer.", "llama": "model."}
TABLES = ("embed.tokens.table", "head.projection.table")  # their rows are the vocabulary


class Tensor(NamedTuple):
    """A tensor of Hugging Face.

    - leaf: the name of our parameter. Of a stacked one, this is about one block.
    - name: the tensor's name, {} for the number of the block.
    - view: our leaf -> a view of it with the elements of the tensor, in order.
    - shape: of the tensor.
    """

    leaf: str
    name: str
    view: Callable[[np.ndarray], np.ndarray]
    shape: tuple[int, ...]

    def take(self, leaf: np.ndarray) -> np.ndarray:
        """The tensor, from our leaf."""
        return np.ascontiguousarray(self.view(leaf)).reshape(self.shape)

    def put(self, leaf: np.ndarray, tensor: np.ndarray) -> None:
        """Write the tensor into our leaf, in the leaf's dtype."""
        view = self.view(leaf)
        view[...] = tensor.reshape(view.shape).astype(leaf.dtype, copy=False)


def check_name(name: Any) -> None:
    """Raise `UserError` for a model that has no format. name: `model.name`, perhaps of a record from elsewhere."""
    if name != "gpt":
        raise UserError(f"model.name: {show(name)} has no Hugging Face format here; allowed: gpt")


def family(model: ModelConfig) -> str:
    """ "gpt2" or "llama", the format that can hold this model (`resolved`). Raises `UserError`."""
    check_name(model.name)
    kinds = (model.positions, model.norm, model.mlp)
    found = next((name for name, kind in FAMILIES.items() if kind == kinds), None)
    if found is None:
        known = " or ".join(f"{', '.join(kind)} ({name})" for name, kind in FAMILIES.items())
        raise UserError(
            f"model: positions {kinds[0]}, norm {kinds[1]} and mlp {kinds[2]} have no Hugging Face format"
            f" here; allowed: {known}"
        )
    if found == "gpt2" and not model.bias:
        raise UserError(
            "model.bias: False, but Hugging Face's GPT-2 has biases in every layer; allowed: true; or model.style=llama"
        )
    if found == "gpt2" and model.kv_heads != model.heads:
        raise UserError(
            f"model.kv_heads: {model.kv_heads}, but Hugging Face's GPT-2 has as many as model.heads;"
            f" allowed: {model.heads}; or model.style=llama"
        )
    return found


def whole(leaf: np.ndarray) -> np.ndarray:
    """The same elements in the same order."""
    return leaf


def transposed(leaf: np.ndarray) -> np.ndarray:
    """[in, out] -> [out, in]."""
    return leaf.T


def tensors(model: ModelConfig, *, positions: int) -> list[Tensor]:
    """All tensors of a model (`resolved`); the tensors of one leaf are neighbours.

    positions: rows of GPT-2's position table. Raises `UserError` for a model that has no format: see `family`.
    """
    kind = family(model)
    prefix, table = PREFIXES[kind], (model.vocab, model.width)
    found = [
        Tensor("embed.tokens.table", prefix + ("wte" if kind == "gpt2" else "embed_tokens") + ".weight", whole, table)
    ]
    if kind == "gpt2":
        found.append(Tensor("embed.positions.table", prefix + "wpe.weight", whole, (positions, model.width)))
    of_block = _gpt2_block(model) if kind == "gpt2" else _llama_block(model)
    layers = prefix + ("h" if kind == "gpt2" else "layers") + ".{}."
    found += [each._replace(leaf="blocks." + each.leaf, name=layers + each.name) for each in of_block]
    found += _norm("head.norm", prefix + ("ln_f" if kind == "gpt2" else "norm"), model)
    return found if model.tied else [*found, Tensor("head.projection.table", HEAD, whole, table)]


def _norm(leaf: str, name: str, model: ModelConfig) -> list[Tensor]:
    scale = Tensor(f"{leaf}.scale", f"{name}.weight", whole, (model.width,))
    if model.norm == "rmsnorm":
        return [scale]
    return [scale, Tensor(f"{leaf}.bias", f"{name}.bias", whole, (model.width,))]


def _gpt2_block(model: ModelConfig) -> list[Tensor]:
    """The tensors of a block. Our kernel [D, n, q k v, K] has q, k and v of a head together; c_attn has all q, then all
    k, then all v."""
    width, hidden = model.width, model.mlp_width or 0

    def linear(
        leaf: str,
        name: str,
        sizes: tuple[int, int],
        kernel: Callable[[np.ndarray], np.ndarray] = whole,
        bias: Callable[[np.ndarray], np.ndarray] = whole,
    ) -> list[Tensor]:
        weight = Tensor(f"{leaf}.kernel", f"{name}.weight", kernel, sizes)
        return [weight, Tensor(f"{leaf}.bias", f"{name}.bias", bias, sizes[1:])]

    return [
        *_norm("norm1", "ln_1", model),
        *linear(
            "attention.qkv.linear",
            "attn.c_attn",
            (width, 3 * width),
            lambda kernel_DnQK: kernel_DnQK.transpose(0, 2, 1, 3),
            lambda bias_nQK: bias_nQK.transpose(1, 0, 2),
        ),
        *linear("attention.out", "attn.c_proj", (width, width)),
        *_norm("norm2", "ln_2", model),
        *linear("mlp.up", "mlp.c_fc", (width, hidden)),
        *linear("mlp.down", "mlp.c_proj", (hidden, width)),
    ]


def _llama_block(model: ModelConfig) -> list[Tensor]:
    """The tensors of a block. Our kernel [D, n, G + 2, K] has a key/value head's queries, key and value together."""
    width, hidden, heads, kv_heads = model.width, model.mlp_width or 0, model.heads, model.kv_heads or 0
    groups, head = heads // kv_heads, width // heads

    def tensor(leaf: str, name: str, view: Callable[[np.ndarray], np.ndarray], *shape: int) -> Tensor:
        return Tensor(leaf, name, view, shape)

    qkv, up, attention = "attention.qkv.linear", "mlp.up", "self_attn"
    kernel, bias = f"{qkv}.kernel", f"{qkv}.bias"
    queries, keys = heads * head, kv_heads * head
    found = [
        tensor(kernel, f"{attention}.q_proj.weight", lambda x: x[:, :, :groups].transpose(1, 2, 3, 0), queries, width),
        tensor(kernel, f"{attention}.k_proj.weight", lambda x: x[:, :, groups].transpose(1, 2, 0), keys, width),
        tensor(kernel, f"{attention}.v_proj.weight", lambda x: x[:, :, groups + 1].transpose(1, 2, 0), keys, width),
        tensor("attention.out.kernel", f"{attention}.o_proj.weight", transposed, width, queries),
        tensor(f"{up}.kernel", "mlp.gate_proj.weight", lambda x: x[:, 0].T, hidden, width),
        tensor(f"{up}.kernel", "mlp.up_proj.weight", lambda x: x[:, 1].T, hidden, width),
        tensor("mlp.down.kernel", "mlp.down_proj.weight", transposed, width, hidden),
        *_norm("norm1", "input_layernorm", model),
        *_norm("norm2", "post_attention_layernorm", model),
    ]
    if model.bias:
        found += [
            tensor(bias, f"{attention}.q_proj.bias", lambda x: x[:, :groups], queries),
            tensor(bias, f"{attention}.k_proj.bias", lambda x: x[:, groups], keys),
            tensor(bias, f"{attention}.v_proj.bias", lambda x: x[:, groups + 1], keys),
            tensor("attention.out.bias", f"{attention}.o_proj.bias", whole, width),
            tensor(f"{up}.bias", "mlp.gate_proj.bias", lambda x: x[0], hidden),
            tensor(f"{up}.bias", "mlp.up_proj.bias", lambda x: x[1], hidden),
            tensor("mlp.down.bias", "mlp.down_proj.bias", whole, width),
        ]
    return found
