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
from jaxdist.specs import STACKED

FAMILIES = {"gpt2": ("learned", "layernorm", "gelu"), "llama": ("rope", "rmsnorm", "swiglu")}
HEAD = "lm_head.weight"  # the one name without the prefix
PREFIXES = {"gpt2": "transformer.", "llama": "model."}
TABLES = ("embed.tokens.table", "head.projection.table")  # their rows are the vocabulary


class Tensor(NamedTuple):
    """A tensor of Hugging Face.

    - leaf: the name of our parameter. Of a stacked one, this is about one block.
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


def tensors(model: ModelConfig, *, positions: int) -> list[Tensor]:
    """All tensors of a model (`resolved`); the tensors of one leaf are neighbours.

    positions: rows of GPT-2's position table. Raises `UserError` for a model that has no format: see `family`.
    """
    kind = family(model)
    prefix, table = PREFIXES[kind], (model.vocab, model.width)
    if kind == "gpt2":
        tokens, layers, last_norm, of_block = "wte", "h", "ln_f", _gpt2_block(model)
    else:
        tokens, layers, last_norm, of_block = "embed_tokens", "layers", "norm", _llama_block(model)
    found = [Tensor("embed.tokens.table", f"{prefix}{tokens}.weight", table)]
    if kind == "gpt2":
        found.append(Tensor("embed.positions.table", f"{prefix}wpe.weight", (positions, model.width)))
    found += [
        each._replace(leaf=f"{STACKED}.{each.leaf}", name=f"{prefix}{layers}.{{}}.{each.name}") for each in of_block
    ]
    found += _norm("head.norm", prefix + last_norm, model)
    return found if model.tied else [*found, Tensor("head.projection.table", HEAD, table)]


def _norm(leaf: str, name: str, model: ModelConfig) -> list[Tensor]:
    scale = Tensor(f"{leaf}.scale", f"{name}.weight", (model.width,))
    if model.norm == "rmsnorm":
        return [scale]
    return [scale, Tensor(f"{leaf}.bias", f"{name}.bias", (model.width,))]


def _gpt2_block(model: ModelConfig) -> list[Tensor]:
    """The tensors of a block. Our kernel [D, n, q k v, K] has q, k and v of a head together; c_attn has all q, then all
    k, then all v."""
    width, hidden = model.width, model.mlp_width or 0
    qkv, c_attn = "attention.qkv.linear", "attn.c_attn"
    return [
        *_norm("norm1", "ln_1", model),
        Tensor(f"{qkv}.kernel", f"{c_attn}.weight", (width, 3 * width), lambda x_DnQK: x_DnQK.transpose(0, 2, 1, 3)),
        Tensor(f"{qkv}.bias", f"{c_attn}.bias", (3 * width,), lambda x_nQK: x_nQK.transpose(1, 0, 2)),
        Tensor("attention.out.kernel", "attn.c_proj.weight", (width, width)),
        Tensor("attention.out.bias", "attn.c_proj.bias", (width,)),
        *_norm("norm2", "ln_2", model),
        Tensor("mlp.up.kernel", "mlp.c_fc.weight", (width, hidden)),
        Tensor("mlp.up.bias", "mlp.c_fc.bias", (hidden,)),
        Tensor("mlp.down.kernel", "mlp.c_proj.weight", (hidden, width)),
        Tensor("mlp.down.bias", "mlp.c_proj.bias", (width,)),
    ]


def _llama_block(model: ModelConfig) -> list[Tensor]:
    """The tensors of a block. Our kernel [D, n, G + 2, K] has a key/value head's queries, key and value together."""
    width, hidden, heads, kv_heads = model.width, model.mlp_width or 0, model.heads, model.kv_heads or 0
    G, head = heads // kv_heads, width // heads
    kernel, bias, attention = "attention.qkv.linear.kernel", "attention.qkv.linear.bias", "self_attn"
    up, queries, keys = "mlp.up", heads * head, kv_heads * head
    found = [
        Tensor(kernel, f"{attention}.q_proj.weight", (queries, width), lambda x: x[:, :, :G].transpose(1, 2, 3, 0)),
        Tensor(kernel, f"{attention}.k_proj.weight", (keys, width), lambda x: x[:, :, G].transpose(1, 2, 0)),
        Tensor(kernel, f"{attention}.v_proj.weight", (keys, width), lambda x: x[:, :, G + 1].transpose(1, 2, 0)),
        Tensor("attention.out.kernel", f"{attention}.o_proj.weight", (width, queries), np.transpose),
        Tensor(f"{up}.kernel", "mlp.gate_proj.weight", (hidden, width), lambda x: x[:, 0].T),
        Tensor(f"{up}.kernel", "mlp.up_proj.weight", (hidden, width), lambda x: x[:, 1].T),
        Tensor("mlp.down.kernel", "mlp.down_proj.weight", (width, hidden), np.transpose),
        *_norm("norm1", "input_layernorm", model),
        *_norm("norm2", "post_attention_layernorm", model),
    ]
    if model.bias:
        found += [
            Tensor(bias, f"{attention}.q_proj.bias", (queries,), lambda x: x[:, :G]),
            Tensor(bias, f"{attention}.k_proj.bias", (keys,), lambda x: x[:, G]),
            Tensor(bias, f"{attention}.v_proj.bias", (keys,), lambda x: x[:, G + 1]),
            Tensor("attention.out.bias", f"{attention}.o_proj.bias", (width,)),
            Tensor(f"{up}.bias", "mlp.gate_proj.bias", (hidden,), lambda x: x[0]),
            Tensor(f"{up}.bias", "mlp.up_proj.bias", (hidden,), lambda x: x[1]),
            Tensor("mlp.down.bias", "mlp.down_proj.bias", (width,)),
        ]
    return found
