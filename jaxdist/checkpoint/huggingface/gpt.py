"""GPT-2 in Hugging Face's format: its tensors, and its keys of config.json.

Names and layouts are those of `transformers`, models/gpt2/modeling_gpt2.py. Conv1D kernels are [in, out], as ours.

Legend: D model width, n heads, K head width.
"""

from collections.abc import Mapping
from typing import Any

from jaxdist.checkpoint.huggingface.decoder import (
    CONSTANT_BUFFERS,
    NO_TOKENS,
    TABLES,
    UNTIED,
    decoder_tensors,
    tied_head,
)
from jaxdist.checkpoint.huggingface.family import POSITIONS, Family, Tensor, check_options, config_value, norm_tensors
from jaxdist.checkpoint.huggingface.llama import llama_family
from jaxdist.checkpoint.huggingface.mixture import mixture_family
from jaxdist.config.rules.fields import Key, show
from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError


def gpt_family(model: ModelConfig) -> Family:
    """The family whose format can hold this model: GPT-2, one of `llama_family` or of `mixture_family`. Raises
    `UserError`."""
    kinds = (model.positions, model.norm, model.mlp)
    if kinds == ("rope", "rmsnorm", "swiglu"):
        return mixture_family(model) if model.moe.on else llama_family(model)
    if kinds != ("learned", "layernorm", "gelu"):
        raise UserError(
            f"model: positions {kinds[0]}, norm {kinds[1]} and mlp {kinds[2]} have no Hugging Face format"
            " here; allowed: learned, layernorm, gelu (gpt2) or rope, rmsnorm, swiglu (llama)"
        )
    wanted = {
        "bias": (True, "has biases in every layer"),
        "qkv_bias": (True, "has biases in every layer"),
        "kv_heads": (model.heads, "has as many as model.heads"),
        "head_width": (model.width // model.heads, "has heads of width / heads"),
        "qk_norm": (False, "has no such norms"),
        "window": (None, "has no window"),
        "moe.experts": (0, "has no experts"),
    }
    check_options(model, wanted, "Hugging Face's GPT-2", "; or model.style=llama")
    return GPT2


def _gpt2(model: ModelConfig, positions: int) -> list[Tensor]:
    table = Tensor(POSITIONS, "transformer.wpe.weight", (positions, model.width))
    last = norm_tensors("head.norm", "transformer.ln_f", model.width)
    return decoder_tensors(model, "transformer.wte", [table], "transformer.h", _gpt2_block(model), last)


def _gpt2_block(model: ModelConfig) -> list[Tensor]:
    """The tensors of a block. Our kernel [D, n, q k v, K] has q, k and v of a head together; c_attn has all q, then all
    k, then all v."""
    width, hidden = model.width, model.mlp_width or 0
    qkv, c_attn = "attention.qkv.linear", "attn.c_attn"
    return [
        *norm_tensors("norm1", "ln_1", width),
        Tensor(f"{qkv}.kernel", f"{c_attn}.weight", (width, 3 * width), lambda x_DnQK: x_DnQK.transpose(0, 2, 1, 3)),
        Tensor(f"{qkv}.bias", f"{c_attn}.bias", (3 * width,), lambda x_nQK: x_nQK.transpose(1, 0, 2)),
        Tensor("attention.out.kernel", "attn.c_proj.weight", (width, width)),
        Tensor("attention.out.bias", "attn.c_proj.bias", (width,)),
        *norm_tensors("norm2", "ln_2", width),
        Tensor("mlp.up.kernel", "mlp.c_fc.weight", (width, hidden)),
        Tensor("mlp.up.bias", "mlp.c_fc.bias", (hidden,)),
        Tensor("mlp.down.kernel", "mlp.c_proj.weight", (hidden, width)),
        Tensor("mlp.down.bias", "mlp.c_proj.bias", (width,)),
    ]


def _gpt2_written(model: ModelConfig, positions: int) -> dict[str, Any]:
    return {"n_positions": positions, **dict.fromkeys(GPT2.dropout, model.dropout), **NO_TOKENS}


def _gpt2_read(
    found: dict[str, Any], known: Mapping[str, Key], model: ModelConfig, positions: int
) -> tuple[dict[str, Any], list[str]]:
    keys = GPT2.keys
    width, heads, hidden = (
        config_value(found, theirs, known[keys[theirs][0]], keys[theirs][1])
        for theirs in ("n_embd", "n_head", "n_inner")
    )
    fixed: dict[str, Any] = {"bias": True, "qkv_bias": True, "qk_norm": False, "window": None, "moe.experts": 0}
    if width % heads == 0:
        fixed["head_width"] = width // heads
    return fixed | {"kv_heads": heads, "mlp_width": 4 * width if hidden is None else hidden}, []


def _other_heads(found: dict[str, Any], model: ModelConfig) -> str:
    head, own = found.get("head_dim"), model.width // model.heads
    if head in (None, own):
        return ""
    return f"head_dim is {show(head)}, which no configuration makes; allowed: hidden_size / num_attention_heads, {own}"


GPT2 = Family(
    kind="gpt2",
    style="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    keys={
        "vocab_size": ("vocab", 50257),
        "n_embd": ("width", 768),
        "n_layer": ("layers", 12),
        "n_head": ("heads", 12),
        "n_inner": ("mlp_width", None),
        "layer_norm_epsilon": ("norm_eps", 1e-5),
        "tie_word_embeddings": ("tied", True),
    },
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    tensors=_gpt2,
    length=("n_positions", 1024),
    positions=POSITIONS,
    written=_gpt2_written,
    read=_gpt2_read,
    impossible=_other_heads,
    tables=TABLES,
    copies=tied_head,
    unequal=UNTIED,
    dropout={"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    ignored=CONSTANT_BUFFERS,
)
