"""Llama and what grew from it, Mistral and Qwen, in Hugging Face's format: their tensors, their keys of config.json.

Names and layouts are those of `transformers`, models/llama/modeling_llama.py; the others have the same. Linear weights
are [out, in]. Both sides rotate the halves of a head together (`jaxdist.nn.attention.rotary`), so no head is permuted.

Legend: D model width, n key/value heads, G query heads of one, K head width, F hidden width of the MLP, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxdist.checkpoint.huggingface.decoder import (
    CONSTANT_BUFFERS,
    NO_TOKENS,
    TABLES,
    UNTIED,
    decoder_tensors,
    tied_head,
)
from jaxdist.checkpoint.huggingface.family import CONFIG, Family, Tensor, config_value, norm_tensors
from jaxdist.config.rules.fields import Key, Rule, show
from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError

LAYER_TYPES = ("full_attention", "sliding_attention")
SCALINGS = ("default", "linear", "llama3")
# {key of rope_parameters: our key}, of llama3; the first of linear, too
SCALING_KEYS = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low",
    "high_freq_factor": "rope_high",
    "original_max_position_embeddings": "rope_positions",
}


def _tensors(model: ModelConfig, positions: int) -> list[Tensor]:
    last = norm_tensors("head.norm", "model.norm", model.width, bias=False)
    block = block_tensors(model, mlp_tensors("mlp", "mlp", model.width, model.mlp_width or 0))
    return decoder_tensors(model, "model.embed_tokens", [], "model.layers", block, last)


def mlp_tensors(leaf: str, name: str, width: int, hidden: int) -> list[Tensor]:
    """The kernels of an MLP. Ours [D, 2, F] has gate and up together."""
    return [
        Tensor(f"{leaf}.up.kernel", f"{name}.gate_proj.weight", (hidden, width), lambda x: x[:, 0].T),
        Tensor(f"{leaf}.up.kernel", f"{name}.up_proj.weight", (hidden, width), lambda x: x[:, 1].T),
        Tensor(f"{leaf}.down.kernel", f"{name}.down_proj.weight", (width, hidden), np.transpose),
    ]


def block_tensors(model: ModelConfig, mlp: list[Tensor]) -> list[Tensor]:
    """The tensors of a block, those of its MLP without biases among them. Our kernel [D, n, G + 2, K] has a key/value
    head's queries, key and value together."""
    width, hidden, heads, kv_heads = model.width, model.mlp_width or 0, model.heads, model.kv_heads or 0
    G, head = heads // kv_heads, model.head_width or 0
    kernel, bias, attention = "attention.qkv.linear.kernel", "attention.qkv.linear.bias", "self_attn"
    up, queries, keys = "mlp.up", heads * head, kv_heads * head
    found = [
        Tensor(kernel, f"{attention}.q_proj.weight", (queries, width), lambda x: x[:, :, :G].transpose(1, 2, 3, 0)),
        Tensor(kernel, f"{attention}.k_proj.weight", (keys, width), lambda x: x[:, :, G].transpose(1, 2, 0)),
        Tensor(kernel, f"{attention}.v_proj.weight", (keys, width), lambda x: x[:, :, G + 1].transpose(1, 2, 0)),
        Tensor("attention.out.kernel", f"{attention}.o_proj.weight", (width, queries), np.transpose),
        *mlp,
        *norm_tensors("norm1", "input_layernorm", width, bias=False),
        *norm_tensors("norm2", "post_attention_layernorm", width, bias=False),
    ]
    if model.qk_norm:
        found += [Tensor(f"attention.{x}_norm.scale", f"{attention}.{x}_norm.weight", (head,)) for x in ("q", "k")]
    if model.qkv_bias:
        found += [
            Tensor(bias, f"{attention}.q_proj.bias", (queries,), lambda x: x[:, :G]),
            Tensor(bias, f"{attention}.k_proj.bias", (keys,), lambda x: x[:, G]),
            Tensor(bias, f"{attention}.v_proj.bias", (keys,), lambda x: x[:, G + 1]),
        ]
    if model.bias:
        found += [
            Tensor("attention.out.bias", f"{attention}.o_proj.bias", (width,)),
            Tensor(f"{up}.bias", "mlp.gate_proj.bias", (hidden,), lambda x: x[0]),
            Tensor(f"{up}.bias", "mlp.up_proj.bias", (hidden,), lambda x: x[1]),
            Tensor("mlp.down.bias", "mlp.down_proj.bias", (width,)),
        ]
    return found


def written_shared(model: ModelConfig, positions: int) -> dict[str, Any]:
    """The other keys of config.json, of all families of this style."""
    scaled = model.rope_type != "default"
    used = list(SCALING_KEYS)[: {"linear": 1, "llama3": 4}.get(model.rope_type, 0)]
    rope = {"rope_type": model.rope_type, **{key: getattr(model, SCALING_KEYS[key]) for key in used}}
    # rope_theta and rope_scaling are for transformers before version 5, rope_parameters for later ones.
    return {
        "max_position_embeddings": positions,
        "rope_theta": model.rope_theta,
        "rope_scaling": dict(rope) if scaled else None,
        "rope_parameters": {"rope_theta": model.rope_theta, **rope},
        **NO_TOKENS,
    }


def read_shared(
    found: dict[str, Any], known: Mapping[str, Key], keys: Mapping[str, tuple[str, Any]], *, theta: float = 10000.0
) -> dict[str, Any]:
    """The values that all families of this style have, where they depend on several keys or are always the same.
    theta: the rotary base if none is given."""
    value = {ours: config_value(found, theirs, known[ours], usual) for theirs, (ours, usual) in keys.items()}
    heads, width = value["heads"], value["width"]
    if value["head_width"] is None and width % heads:
        raise UserError(
            f"{CONFIG}: num_attention_heads {heads} does not divide hidden_size {width}, and no head_dim is given;"
            " allowed: a divisor, or give head_dim"
        )
    return {
        "kv_heads": heads if value["kv_heads"] is None else value["kv_heads"],
        "head_width": width // heads if value["head_width"] is None else value["head_width"],
        "moe.experts": 0,
        **_rotary(found, known, theta),
    }


def _rotary(found: dict[str, Any], known: Mapping[str, Key], theta: float) -> dict[str, Any]:
    """Rotary positions. Raises `UserError` for scalings that no configuration makes."""
    rope = found.get("rope_scaling") or found.get("rope_parameters") or {}
    kind = (rope.get("rope_type") or rope.get("type") or "default") if isinstance(rope, dict) else rope
    if not isinstance(rope, dict) or kind not in SCALINGS:
        raise UserError(
            f"{CONFIG}: rotary positions of type {show(kind)}, which no configuration makes; allowed:"
            f" {', '.join(SCALINGS)}"
        )
    for place in (rope, found):
        if place.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise UserError(
                f"{CONFIG}: partial_rotary_factor is {show(place['partial_rotary_factor'])}, which no configuration"
                " makes; allowed: 1"
            )
    base = next((each for each in (rope, found) if each.get("rope_theta") is not None), {})
    value = {"rope_theta": config_value(base, "rope_theta", known["rope_theta"], theta), "rope_type": kind}
    if kind == "default":
        return value
    if kind == "llama3" and rope.get("original_max_position_embeddings") is None:
        longest = found.get("original_max_position_embeddings") or found.get("max_position_embeddings")
        rope = rope | {"original_max_position_embeddings": longest}
    used = list(SCALING_KEYS)[: 1 if kind == "linear" else 4]
    return value | {
        SCALING_KEYS[key]: known[SCALING_KEYS[key]].check(rope.get(key), f"{CONFIG}: {key} of rotary positions")
        for key in used
    }


def positions_seen(found: dict[str, Any], known: Mapping[str, Key], usual: int | None = 4096) -> int | None:
    """The window of all layers that have one. usual: if none is given."""
    own: int | None = replace(known["window"], optional=True).check(
        found.get("sliding_window", usual), f"{CONFIG}: sliding_window"
    )
    return own


def window_of(found: dict[str, Any], known: Mapping[str, Key], *, layers: int = 32, first: int = 28) -> int | None:
    """The window of `layer_types`. Raises `UserError` for one that only some layers have.

    layers, first: `num_hidden_layers` and `max_window_layers` if they are not given.
    """
    layers, used = found.get("num_hidden_layers", layers), found.get("use_sliding_window", False)
    window = positions_seen(found, known) if used is True else None
    if window is None:
        kinds = {"full_attention"}
    else:
        first = config_value(found, "max_window_layers", replace(known["layers"], rule=Rule("", at_least=0)), first)
        kinds = ({"full_attention"} if first > 0 else set()) | ({"sliding_attention"} if first < layers else set())
    own = found.get("layer_types")
    kinds = kinds if own is None else set(map(str, own)) if isinstance(own, list) else {show(own)}
    if len(kinds) != 1 or not kinds <= ({"full_attention"} if window is None else set(LAYER_TYPES)):
        raise UserError(
            f"{CONFIG}: layers of {' and '.join(sorted(kinds))}, which no configuration makes; allowed: all of"
            " full_attention, or with a window all of sliding_attention"
        )
    return window if "sliding_attention" in kinds else None


def _read_llama(found: dict[str, Any], known: Mapping[str, Key], model: ModelConfig, positions: int) -> Any:
    if found.get("attention_bias", False) is not found.get("mlp_bias", False):
        raise UserError(f"{CONFIG}: attention_bias and mlp_bias differ; allowed: both true, or both false")
    bias = config_value(found, "attention_bias", known["bias"], False)
    return read_shared(found, known, LLAMA.keys) | {"qkv_bias": bias, "qk_norm": False, "window": None}, []


def _read_mistral(found: dict[str, Any], known: Mapping[str, Key], model: ModelConfig, positions: int) -> Any:
    fixed = {"bias": False, "qkv_bias": False, "qk_norm": False, "window": positions_seen(found, known)}
    return read_shared(found, known, MISTRAL.keys) | fixed, []


def _read_qwen2(found: dict[str, Any], known: Mapping[str, Key], model: ModelConfig, positions: int) -> Any:
    fixed = {"bias": False, "qkv_bias": True, "qk_norm": False, "window": window_of(found, known)}
    return read_shared(found, known, QWEN2.keys) | fixed, []


def _read_qwen3(found: dict[str, Any], known: Mapping[str, Key], model: ModelConfig, positions: int) -> Any:
    fixed = {"bias": False, "qkv_bias": False, "qk_norm": True, "window": window_of(found, known)}
    return read_shared(found, known, QWEN3.keys) | fixed, []


def written_qwen(model: ModelConfig, positions: int) -> dict[str, Any]:
    """As `written_shared`, with the window of all layers or of none."""
    used = model.window is not None
    return written_shared(model, positions) | {
        "use_sliding_window": used,
        "sliding_window": model.window,
        "max_window_layers": 0 if used else model.layers,
        "layer_types": ["sliding_attention" if used else "full_attention"] * (model.layers or 0),
    }


SHARED: Mapping[str, tuple[str, Any]] = {
    "vocab_size": ("vocab", 32000),
    "hidden_size": ("width", 4096),
    "num_hidden_layers": ("layers", 32),
    "num_attention_heads": ("heads", 32),
    "head_dim": ("head_width", None),
    "num_key_value_heads": ("kv_heads", None),
    "intermediate_size": ("mlp_width", 11008),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "tie_word_embeddings": ("tied", False),
}
LLAMA = Family(
    kind="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    style="llama",
    keys={**SHARED, "attention_bias": ("bias", False), "mlp_bias": ("bias", False)},
    fixed={"hidden_act": ("silu", "swish")},
    tensors=_tensors,
    written=written_shared,
    read=_read_llama,
    length=("max_position_embeddings", 2048),
    tables=TABLES,
    copies=tied_head,
    unequal=UNTIED,
    dropout={"attention_dropout": 0.0},
    undropped=("other layers",),
    ignored=CONSTANT_BUFFERS,
)
MISTRAL = LLAMA._replace(
    kind="mistral",
    architecture="MistralForCausalLM",
    keys={**SHARED, "num_key_value_heads": ("kv_heads", 8), "intermediate_size": ("mlp_width", 14336)},
    written=lambda model, positions: written_shared(model, positions) | {"sliding_window": model.window},
    read=_read_mistral,
    length=("max_position_embeddings", 131072),
)
QWEN2 = LLAMA._replace(
    kind="qwen2",
    architecture="Qwen2ForCausalLM",
    keys={
        **SHARED,
        "vocab_size": ("vocab", 151936),
        "num_key_value_heads": ("kv_heads", 32),
        "intermediate_size": ("mlp_width", 22016),
    },
    written=written_qwen,
    read=_read_qwen2,
    length=("max_position_embeddings", 32768),
)
QWEN3 = QWEN2._replace(
    kind="qwen3",
    architecture="Qwen3ForCausalLM",
    keys={**QWEN2.keys, "head_dim": ("head_width", 128)},
    fixed={**LLAMA.fixed, "attention_bias": (False,)},
    read=_read_qwen3,
)


def llama_family(model: ModelConfig) -> Family:
    """The family that holds this model, of rotary positions, RMSNorm and SwiGLU. Raises `UserError`."""
    kinds = {
        (False, False, False): LLAMA,
        (True, True, False): LLAMA,
        (False, True, False): QWEN2,
        (False, False, True): QWEN3,
    }
    found = kinds.get((bool(model.bias), bool(model.qkv_bias), bool(model.qk_norm)))
    odd = model.window is not None or model.width % model.heads
    if found is None or (found is LLAMA and model.bias and odd):
        raise UserError(
            f"model: bias {show(model.bias)}, qkv_bias {show(model.qkv_bias)}, qk_norm {show(model.qk_norm)} and window"
            f" {show(model.window)} have no Hugging Face format here together; allowed: without window and norms, bias"
            " alike in all layers (llama); without biases or norms (mistral); qkv_bias only (qwen2); qk_norm only"
            " (qwen3)"
        )
    return MISTRAL if found is LLAMA and odd else found
