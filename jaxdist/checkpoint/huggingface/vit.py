"""ViT in Hugging Face's format: the tensors of `ViTForImageClassification`, and its keys of config.json.

Names are those in the files, as `transformers` 4 and 5 write them; version 5 has others in memory.
"""

from collections.abc import Mapping
from typing import Any

from jaxdist.checkpoint.huggingface.family import (
    CONFIG,
    Family,
    Tensor,
    config_value,
    linear_tensors,
    norm_tensors,
    qkv_tensors,
)
from jaxdist.config.rules.fields import Key, show
from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError
from jaxdist.specs import STACKED


def _tensors(model: ModelConfig, positions: int) -> list[Tensor]:
    """Our patches are [p, p, C] in a row of the kernel [p p C, D]; theirs are [C, p, p], after D."""
    width, size, channels = model.width, model.patch_size, model.channels
    hidden, embeddings, prefix = model.mlp_width or 0, "vit.embeddings", "vit.encoder.layer.{}"
    patches = f"{embeddings}.patch_embeddings.projection"
    table = (1, 1 + (model.image_size // size) ** 2, width)
    block = [
        *norm_tensors("norm1", "layernorm_before", width),
        *qkv_tensors(
            "attention.qkv.linear",
            ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
            width,
        ),
        *linear_tensors("attention.out", "attention.output.dense", width, width),
        *norm_tensors("norm2", "layernorm_after", width),
        *linear_tensors("mlp.up", "intermediate.dense", width, hidden),
        *linear_tensors("mlp.down", "output.dense", hidden, width),
    ]
    return [
        Tensor("embed.class_token", f"{embeddings}.cls_token", (1, 1, width)),
        Tensor("embed.positions.table", f"{embeddings}.position_embeddings", table),
        Tensor(
            "embed.patches.kernel",
            f"{patches}.weight",
            (width, channels, size, size),
            lambda x: x.reshape(size, size, channels, width).transpose(3, 2, 0, 1),
        ),
        Tensor("embed.patches.bias", f"{patches}.bias", (width,)),
        *(each._replace(leaf=f"{STACKED}.{each.leaf}", name=f"{prefix}.{each.name}") for each in block),
        *norm_tensors("head.norm", "vit.layernorm", width),
        *linear_tensors("head.classifier", "classifier", width, model.classes),
    ]


def _written(model: ModelConfig, positions: int) -> dict[str, Any]:
    labels = {str(i): f"LABEL_{i}" for i in range(model.classes)}
    found: dict[str, Any] = {"id2label": labels, "label2id": {label: int(i) for i, label in labels.items()}}
    return found | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), model.dropout)


def _read(
    found: dict[str, Any], known: Mapping[str, Key], model: ModelConfig, positions: int
) -> tuple[dict[str, Any], list[str]]:
    labels = found.get("id2label")
    if labels is not None and not isinstance(labels, dict):
        raise UserError(f"{CONFIG}: id2label is {show(labels)}; allowed: an object with an entry for each label")
    count = {} if labels is None else {"num_labels": len(labels)}
    return {"classes": config_value(found | count, "num_labels", known["classes"], 2)}, []


VIT = Family(
    kind="vit",
    architecture="ViTForImageClassification",
    prefix="vit.",
    keys={
        "hidden_size": ("width", 768),
        "num_hidden_layers": ("layers", 12),
        "num_attention_heads": ("heads", 12),
        "intermediate_size": ("mlp_width", 3072),
        "layer_norm_eps": ("norm_eps", 1e-12),
        "image_size": ("image_size", 224),
        "patch_size": ("patch_size", 16),
        "num_channels": ("channels", 3),
    },
    fixed={"hidden_act": ("gelu",), "qkv_bias": (True,)},
    tensors=_tensors,
    written=_written,
    read=_read,
    dropout={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ignored=("pooler.dense.weight", "pooler.dense.bias"),  # of ViTModel, which no class above it uses
)
