"""GPT-2 and Llama in Hugging Face's format: their tensors, and their keys of config.json.

Names and layouts are those of `transformers`, models/gpt2/modeling_gpt2.py (Conv1D kernels are [in, out], as ours) and
models/llama/modeling_llama.py (Linear weights are [out, in]). Both rotate the halves of a head together, as
`jaxdist.nn.attention.rotary.rotary` does, so no head is permuted.

Legend: D model width, n key/value heads, G query heads of one, K head width, F hidden width of the MLP, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdist.checkpoint.huggingface.family import CONFIG, Family, Tensor, config_value, norm_tensors
from jaxdist.config.rules.fields import Key, show
from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError
from jaxdist.specs import STACKED

UNTIED = (
    f"is not the embedding, though {CONFIG} says tie_word_embeddings; allowed: set it to false there, and"
    " model.tied=false"
)
HEAD = "lm_head.weight"  # the one name without the prefix
TABLES = ("embed.tokens.table", "head.projection.table")
CONSTANT_BUFFERS = ("attn.bias", "attn.masked_bias", "rotary_emb.inv_freq")  # in older files; no parameters


def gpt_family(model: ModelConfig) -> Family:
    """GPT-2 or Llama, the format that can hold this model. Raises `UserError`."""
    kinds = (model.positions, model.norm, model.mlp)
    known = (GPT2, ("learned", "layernorm", "gelu")), (LLAMA, ("rope", "rmsnorm", "swiglu"))
    found = next((each for each, kind in known if kind == kinds), None)
    if found is None:
        allowed = " or ".join(f"{', '.join(kind)} ({each.kind})" for each, kind in known)
        raise UserError(
            f"model: positions {kinds[0]}, norm {kinds[1]} and mlp {kinds[2]} have no Hugging Face format"
            f" here; allowed: {allowed}"
        )
    if found is GPT2 and not model.bias:
        raise UserError(
            "model.bias: False, but Hugging Face's GPT-2 has biases in every layer; allowed: true; or model.style=llama"
        )
    if found is GPT2 and model.kv_heads != model.heads:
        raise UserError(
            f"model.kv_heads: {model.kv_heads}, but Hugging Face's GPT-2 has as many as model.heads;"
            f" allowed: {model.heads}; or model.style=llama"
        )
    return found


def _gpt2(model: ModelConfig, positions: int) -> list[Tensor]:
    table = Tensor("embed.positions.table", "transformer.wpe.weight", (positions, model.width))
    last = norm_tensors("head.norm", "transformer.ln_f", model.width)
    return _whole(model, "transformer.wte", [table], "transformer.h", _gpt2_block(model), last)


def _llama(model: ModelConfig, positions: int) -> list[Tensor]:
    last = norm_tensors("head.norm", "model.norm", model.width, bias=False)
    return _whole(model, "model.embed_tokens", [], "model.layers", _llama_block(model), last)


def _whole(
    model: ModelConfig, tokens: str, embed: list[Tensor], layers: str, block: list[Tensor], last: list[Tensor]
) -> list[Tensor]:
    table = (model.vocab, model.width)
    blocks = [each._replace(leaf=f"{STACKED}.{each.leaf}", name=f"{layers}.{{}}.{each.name}") for each in block]
    found = [Tensor(TABLES[0], f"{tokens}.weight", table), *embed, *blocks, *last]
    return found if model.tied else [*found, Tensor(TABLES[1], HEAD, table)]


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
        *norm_tensors("norm1", "input_layernorm", width, bias=False),
        *norm_tensors("norm2", "post_attention_layernorm", width, bias=False),
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


def _copies(model: ModelConfig) -> dict[str, str]:
    return {HEAD: TABLES[0]} if model.tied else {}


# Without these keys transformers takes token 50256 or 2 for the end of a text, whatever the tokenizer.
NO_TOKENS: Mapping[str, Any] = {"bos_token_id": None, "eos_token_id": None}


def _gpt2_written(model: ModelConfig, positions: int) -> dict[str, Any]:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    return {"n_positions": positions, **dropout, **NO_TOKENS}


def _llama_written(model: ModelConfig, positions: int) -> dict[str, Any]:
    # rope_theta is for transformers before version 5, rope_parameters for later ones.
    return {
        "max_position_embeddings": positions,
        "head_dim": model.width // model.heads,
        "rope_theta": model.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        **NO_TOKENS,
    }


def _gpt2_read(
    found: dict[str, Any], known: Mapping[str, Key], model: ModelConfig, positions: int
) -> tuple[dict[str, Any], list[str]]:
    keys, other = GPT2.keys, list[str]()
    width, heads, hidden = (
        config_value(found, theirs, known[keys[theirs][0]], keys[theirs][1])
        for theirs in ("n_embd", "n_head", "n_inner")
    )
    if (length := config_value(found, "n_positions", known["seq_len"], 1024)) != positions:
        other.append(f"data.seq_len={length} (is {positions})")
    return {"kv_heads": heads, "mlp_width": 4 * width if hidden is None else hidden}, other


def _llama_read(
    found: dict[str, Any], known: Mapping[str, Key], model: ModelConfig, positions: int
) -> tuple[dict[str, Any], list[str]]:
    rope = _rotary(found)
    values = {"rope_theta": config_value(rope, "rope_theta", known["rope_theta"], 10000.0)}
    if found.get("num_key_value_heads") is None:
        values["kv_heads"] = config_value(found, "num_attention_heads", known["heads"], 32)
    if found.get("attention_bias", False) is not found.get("mlp_bias", False):
        raise UserError(f"{CONFIG}: attention_bias and mlp_bias differ; allowed: both true, or both false")
    return values, []


def _rotary(found: dict[str, Any]) -> dict[str, Any]:
    """Where rope_theta is given, if anywhere. Raises `UserError` for other rotary positions than the plain ones."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    kind = (rope.get("rope_type") or rope.get("type") or "default") if isinstance(rope, dict) else rope
    if not isinstance(rope, dict) or kind != "default":
        raise UserError(
            f"{CONFIG}: rotary positions of type {show(kind)}, which no configuration makes; allowed: default"
        )
    return next((each for each in (rope, found) if each.get("rope_theta") is not None), {})


def _other_heads(found: dict[str, Any], model: ModelConfig) -> str:
    head, own = found.get("head_dim"), model.width // model.heads
    if head in (None, own):
        return ""
    return f"head_dim is {show(head)}, which no configuration makes; allowed: hidden_size / num_attention_heads, {own}"


GPT2 = Family(
    kind="gpt2",
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
    written=_gpt2_written,
    read=_gpt2_read,
    impossible=_other_heads,
    tables=TABLES,
    copies=_copies,
    unequal=UNTIED,
    ignored=CONSTANT_BUFFERS,
)
LLAMA = Family(
    kind="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    keys={
        "vocab_size": ("vocab", 32000),
        "hidden_size": ("width", 4096),
        "num_hidden_layers": ("layers", 32),
        "num_attention_heads": ("heads", 32),
        "num_key_value_heads": ("kv_heads", None),
        "intermediate_size": ("mlp_width", 11008),
        "rms_norm_eps": ("norm_eps", 1e-6),
        "attention_bias": ("bias", False),
        "mlp_bias": ("bias", False),
        "tie_word_embeddings": ("tied", False),
    },
    fixed={"hidden_act": ("silu", "swish")},
    tensors=_llama,
    written=_llama_written,
    read=_llama_read,
    impossible=_other_heads,
    tables=TABLES,
    copies=_copies,
    unequal=UNTIED,
    ignored=CONSTANT_BUFFERS,
)
