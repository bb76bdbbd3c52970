"""BERT in Hugging Face's format: tensors and config.json of `BertForMaskedLM` and `BertForSequenceClassification`."""

from collections.abc import Mapping
from typing import Any

from jaxdist.checkpoint.huggingface.family import (
    CONFIG,
    HEAD_DROPOUT,
    POSITIONS,
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

ARCHITECTURES = {"mlm": "BertForMaskedLM", "classification": "BertForSequenceClassification"}  # by model.head
MASKED = "cls.predictions"


def _tensors(model: ModelConfig, positions: int) -> list[Tensor]:
    width, hidden, embeddings = model.width, model.mlp_width or 0, "bert.embeddings"
    attention = "attention.self"
    block = [
        *qkv_tensors("attention.qkv.linear", (f"{attention}.query", f"{attention}.key", f"{attention}.value"), width),
        *linear_tensors("attention.out", "attention.output.dense", width, width),
        *norm_tensors("norm1", "attention.output.LayerNorm", width),
        *linear_tensors("mlp.up", "intermediate.dense", width, hidden),
        *linear_tensors("mlp.down", "output.dense", hidden, width),
        *norm_tensors("norm2", "output.LayerNorm", width),
    ]
    if model.head == "mlm":
        head = [
            *linear_tensors("head.dense", f"{MASKED}.transform.dense", width, width),
            *norm_tensors("head.norm", f"{MASKED}.transform.LayerNorm", width),
            Tensor("head.decoder.bias", f"{MASKED}.bias", (model.vocab or 0,)),
        ]
    else:
        head = [
            *linear_tensors("head.pooler", "bert.pooler.dense", width, width),
            *linear_tensors("head.classifier", "classifier", width, model.classes),
        ]
    return [
        Tensor("embed.tokens.table", f"{embeddings}.word_embeddings.weight", (model.vocab or 0, width)),
        Tensor(POSITIONS, f"{embeddings}.position_embeddings.weight", (positions, width)),
        Tensor("embed.types.table", f"{embeddings}.token_type_embeddings.weight", (model.types, width)),
        *norm_tensors("embed.norm", f"{embeddings}.LayerNorm", width),
        *(each._replace(leaf=f"{STACKED}.{each.leaf}", name=f"bert.encoder.layer.{{}}.{each.name}") for each in block),
        *head,
    ]


def _copies(model: ModelConfig) -> dict[str, str]:
    if model.head != "mlm":
        return {}
    return {f"{MASKED}.decoder.weight": "embed.tokens.table", f"{MASKED}.decoder.bias": "head.decoder.bias"}


def _written(model: ModelConfig, positions: int) -> dict[str, Any]:
    found: dict[str, Any] = {"max_position_embeddings": positions}
    found |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), model.dropout)
    if model.head == "mlm":
        found["tie_word_embeddings"] = True
    else:
        labels = {str(i): f"LABEL_{i}" for i in range(model.classes)}
        found |= {"id2label": labels, "label2id": {label: int(i) for i, label in labels.items()}}
    return found


def _read(
    found: dict[str, Any], known: Mapping[str, Key], model: ModelConfig, positions: int
) -> tuple[dict[str, Any], list[str]]:
    """The head is that of `architectures`; files of another one, such as BertForPreTraining, may hold either."""
    values, named = dict[str, Any](), found.get("architectures")
    if named is not None and not isinstance(named, list):
        raise UserError(f"{CONFIG}: architectures is {show(named)}; allowed: a list of names, or null")
    heads = [head for head, name in ARCHITECTURES.items() if name in (named or ())]
    if heads:
        values["head"] = heads[0]
    labels = found.get("id2label")
    if labels is not None and not isinstance(labels, dict):
        raise UserError(f"{CONFIG}: id2label is {show(labels)}; allowed: an object with an entry for each label")
    if model.head == "classification":
        count = {} if labels is None else {"num_labels": len(labels)}
        values["classes"] = config_value(found | count, "num_labels", known["classes"], 2)
    return values, []


def _impossible(found: dict[str, Any], model: ModelConfig) -> str:
    tied = found.get("tie_word_embeddings", True)
    if model.head == "classification" or tied is True:
        return ""
    return f"tie_word_embeddings is {show(tied)}, which no configuration with model.head 'mlm' makes; allowed: True"


BERT = Family(
    kind="bert",
    architecture=ARCHITECTURES["mlm"],
    prefix="bert.",
    keys={
        "vocab_size": ("vocab", 30522),
        "hidden_size": ("width", 768),
        "num_hidden_layers": ("layers", 12),
        "num_attention_heads": ("heads", 12),
        "intermediate_size": ("mlp_width", 3072),
        "type_vocab_size": ("types", 2),
        "layer_norm_eps": ("norm_eps", 1e-12),
    },
    fixed={"hidden_act": ("gelu",), "position_embedding_type": ("absolute",), "is_decoder": (False,)},
    tensors=_tensors,
    length=("max_position_embeddings", 512),
    positions=POSITIONS,
    written=_written,
    read=_read,
    impossible=_impossible,
    tables=("embed.tokens.table", "head.decoder.bias"),
    dropout={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, HEAD_DROPOUT: None},
    copies=_copies,
    aliases=(
        ("LayerNorm.weight", "LayerNorm.gamma"),  # as Google's files have them
        ("LayerNorm.bias", "LayerNorm.beta"),
        (f"{MASKED}.bias", f"{MASKED}.decoder.bias"),
    ),
    # Buffers; and of BertForPreTraining what predicts the next sentence.
    ignored=("position_ids", "embeddings.token_type_ids", "cls.seq_relationship.weight", "cls.seq_relationship.bias"),
)


def bert_family(model: ModelConfig) -> Family:
    """The family of a BERT with this head. The masked-language head leaves out the pooler of files that have one."""
    pooler = ("pooler.dense.weight", "pooler.dense.bias") if model.head == "mlm" else ()
    return BERT._replace(architecture=ARCHITECTURES[model.head], ignored=BERT.ignored + pooler)
