"""Mixtures of experts with the attention of Llama in Hugging Face's format: Mixtral, Qwen3-MoE and dots.llm1.

Names are those in the files, with tensors of their own for each expert, as `transformers` 4 and 5 write them; version 5
has the experts of a layer in one tensor in memory. Attention, norms, embedding and head are those of `llama.py`.

Legend: D model width, E experts, F hidden width of an expert.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxdist.checkpoint.huggingface.decoder import decoder_tensors
from jaxdist.checkpoint.huggingface.family import CONFIG, Family, Tensor, check_options, norm_tensors, stacked_blocks
from jaxdist.checkpoint.huggingface.llama import (
    LLAMA,
    SHARED,
    block_tensors,
    mlp_tensors,
    positions_seen,
    read_shared,
    window_of,
    written_qwen,
    written_shared,
)
from jaxdist.config.rules.fields import Key, Rule
from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError
from jaxdist.specs import STACKED

LAYERS = "model.layers"
ALIKE: Mapping[str, tuple[Any, str]] = {"bias": (False, "has no biases"), "qkv_bias": (False, "has no biases")}
SOFTMAX_ONLY: Mapping[str, tuple[Any, str]] = {
    **ALIKE,
    "moe.scores": ("softmax", "has scores over all experts"),
    "moe.scaling": (1.0, "has no such factor"),
    "moe.bias_rate": (None, "has no biases of the experts"),
    "moe.shared": (0, "has no such experts"),
    "moe.dense": (0, "has experts in all blocks"),
}
OPTIONS: Mapping[str, Mapping[str, tuple[Any, str]]] = {  # by `model_type`, what `check_options` is given
    "mixtral": {**SOFTMAX_ONLY, "moe.normalised": (True, "has weights that sum to 1")},
    "qwen3_moe": SOFTMAX_ONLY,
    "dots1": {**ALIKE, "qk_norm": (True, "has norms of queries and keys")},
}


def _tensors(mixture: Callable[[ModelConfig], list[Tensor]]) -> Callable[[ModelConfig, int], list[Tensor]]:
    """`Family.tensors`. mixture: model -> the tensors of a block's mixture."""

    def tensors(model: ModelConfig, positions: int) -> list[Tensor]:
        width, dense = model.width, []
        plain = block_tensors(model, mlp_tensors("mlp", "mlp", width, model.mlp_width or 0))
        for i in range(stacked_blocks(model).start):
            dense += [
                each._replace(leaf=f"embed.dense.{i}.{each.leaf}", name=f"{LAYERS}.{i}.{each.name}") for each in plain
            ]
        last = norm_tensors("head.norm", "model.norm", width, bias=False)
        return decoder_tensors(model, "model.embed_tokens", dense, LAYERS, block_tensors(model, mixture(model)), last)

    return tensors


def _mixture(model: ModelConfig, name: str, parts: tuple[str, str, str]) -> list[Tensor]:
    """The router and its experts. parts: theirs of an expert, gate, up and down. Our kernel [E, D, 2, F] has the gate
    and up of all experts together."""
    experts, hidden, width = model.moe.experts, model.moe.hidden, model.width
    expert = [f"{name}.experts.{j}" for j in range(experts)]
    gate, up, down = parts
    found = [Tensor("mlp.router.kernel", f"{name}.gate.weight", (experts, width), np.transpose)]
    for j, each in enumerate(expert):
        found.append(Tensor("mlp.experts.up.kernel", f"{each}.{gate}.weight", (hidden, width), _up_of(j, 0)))
        found.append(Tensor("mlp.experts.up.kernel", f"{each}.{up}.weight", (hidden, width), _up_of(j, 1)))
    for j, each in enumerate(expert):
        found.append(Tensor("mlp.experts.down.kernel", f"{each}.{down}.weight", (width, hidden), _down_of(j)))
    return found


def _up_of(expert: int, half: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x_ED2F: x_ED2F[expert, :, half].T


def _down_of(expert: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x_EFD: x_EFD[expert].T


def _mixtral(model: ModelConfig) -> list[Tensor]:
    return _mixture(model, "block_sparse_moe", ("w1", "w3", "w2"))


def _qwen3(model: ModelConfig) -> list[Tensor]:
    return _mixture(model, "mlp", ("gate_proj", "up_proj", "down_proj"))


def _dots1(model: ModelConfig) -> list[Tensor]:
    bias = Tensor("mlp.router.bias", "mlp.gate.e_score_correction_bias", (model.moe.experts,))
    shared = mlp_tensors("mlp.shared", "mlp.shared_experts", model.width, model.moe.shared * model.moe.hidden)
    return [bias, *_qwen3(model), *shared]


def _read(
    found: dict[str, Any],
    known: Mapping[str, Key],
    own: Family,
    counts: tuple[str, ...],
    *,
    window: int | None,
    theta: float = 10000.0,
    usual: int | None = None,
) -> dict[str, Any]:
    """What all families here have. counts: names of the key for the number of experts, the usual one first.
    usual: that number if it is not given."""
    key = next((each for each in counts if each in found), counts[0])
    experts = _at_least(2, known["moe.experts"], found.get(key, usual), key)
    fixed = {ours: value for ours, (value, _) in OPTIONS[own.kind].items()}
    return read_shared(found, known, own.keys, theta=theta) | fixed | {"moe.experts": experts, "window": window}


def _at_least(least: int, ours: Key, value: Any, theirs: str) -> int:
    """The value of a key of config.json with another range than ours has."""
    checked: int = replace(ours, rule=Rule("", at_least=least)).check(value, f"{CONFIG}: {theirs}")
    return checked


def _read_mixtral(found: dict[str, Any], known: Mapping[str, Key], model: ModelConfig, positions: int) -> Any:
    window = positions_seen(found, known, usual=None)
    value = _read(found, known, MIXTRAL, ("num_local_experts",), window=window, theta=1e6, usual=8)
    return value | {"qk_norm": False, "mlp_width": found.get("intermediate_size", 14336)}, []


def _read_qwen3(found: dict[str, Any], known: Mapping[str, Key], model: ModelConfig, positions: int) -> Any:
    # All layers have it: transformers reads neither max_window_layers nor layer_types of such a model.
    window = positions_seen(found, known) if found.get("use_sliding_window", False) is True else None
    counts = ("num_experts", "num_local_experts")  # of the hub; as transformers 5 saves it
    return _read(found, known, QWEN3_MOE, counts, window=window, usual=128) | {"qk_norm": True}, []


def _read_dots1(found: dict[str, Any], known: Mapping[str, Key], model: ModelConfig, positions: int) -> Any:
    window = window_of(found | {"use_sliding_window": True}, known, layers=62, first=62)
    rate = known["moe.bias_rate"].default if model.moe.bias_rate is None else model.moe.bias_rate
    shared = _at_least(1, known["moe.shared"], found.get("n_shared_experts"), "n_shared_experts")
    more = {"moe.scores": "sigmoid", "moe.bias_rate": rate, "moe.shared": shared}
    return _read(found, known, DOTS1, ("n_routed_experts", "num_local_experts"), window=window) | more, []


MIXTRAL = LLAMA._replace(
    kind="mixtral",
    architecture="MixtralForCausalLM",
    keys={
        **SHARED,
        "num_key_value_heads": ("kv_heads", 8),
        "intermediate_size": ("moe.hidden", 14336),
        "rms_norm_eps": ("norm_eps", 1e-5),
        "num_local_experts": ("moe.experts", 8),
        "num_experts_per_tok": ("moe.top_k", 2),
    },
    tensors=_tensors(_mixtral),
    written=lambda model, positions: written_shared(model, positions) | {"sliding_window": model.window},
    read=_read_mixtral,
    length=("max_position_embeddings", 131072),
    zeros=(f"{STACKED}.mlp.router.statistics",),
)
QWEN3_MOE = MIXTRAL._replace(
    kind="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys={
        **SHARED,
        "vocab_size": ("vocab", 151936),
        "hidden_size": ("width", 2048),
        "num_hidden_layers": ("layers", 24),
        "num_key_value_heads": ("kv_heads", 4),
        "intermediate_size": ("mlp_width", 6144),  # of no block
        "moe_intermediate_size": ("moe.hidden", 768),
        "num_experts": ("moe.experts", 128),
        "num_experts_per_tok": ("moe.top_k", 8),
        "norm_topk_prob": ("moe.normalised", False),
    },
    fixed={**LLAMA.fixed, "attention_bias": (False,), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    tensors=_tensors(_qwen3),
    written=lambda model, positions: {
        key: value for key, value in written_qwen(model, positions).items() if key != "layer_types"
    },
    read=_read_qwen3,
    length=("max_position_embeddings", 32768),
)
DOTS1 = QWEN3_MOE._replace(
    kind="dots1",
    architecture="Dots1ForCausalLM",
    keys={
        **SHARED,
        "vocab_size": ("vocab", 152064),
        "hidden_size": ("width", 4608),
        "num_hidden_layers": ("layers", 62),
        "num_key_value_heads": ("kv_heads", 32),
        "intermediate_size": ("mlp_width", 10944),
        "moe_intermediate_size": ("moe.hidden", 1408),
        "n_routed_experts": ("moe.experts", None),
        "num_experts_per_tok": ("moe.top_k", 0),
        "n_shared_experts": ("moe.shared", 0),
        "first_k_dense_replace": ("moe.dense", 0),
        "routed_scaling_factor": ("moe.scaling", 1.0),
        "norm_topk_prob": ("moe.normalised", False),
    },
    fixed={**LLAMA.fixed, "attention_bias": (False,), "n_group": (1,), "topk_group": (1,), "moe_layer_freq": (1,)},
    tensors=_tensors(_dots1),
    written=written_qwen,
    read=_read_dots1,
    length=("max_position_embeddings", 2048),
)


def mixture_family(model: ModelConfig) -> Family:
    """The family that holds this mixture of experts, of rotary positions, RMSNorm and SwiGLU. Raises `UserError`."""
    moe = model.moe
    moe.check(layers=model.layers)
    own = DOTS1 if moe.scores == "sigmoid" else QWEN3_MOE if model.qk_norm else MIXTRAL
    of = f"Hugging Face's {own.architecture.removesuffix('ForCausalLM')}"
    check_options(model, OPTIONS[own.kind], of)
    if own is DOTS1 and moe.bias_rate is None:
        raise UserError(f"model.moe.bias_rate: null, but {of} has biases of the experts; allowed: a number >= 0")
    if own is DOTS1 and not moe.shared:
        raise UserError(f"model.moe.shared: 0, but {of} has experts for every token; allowed: 1 and more")
    return own
