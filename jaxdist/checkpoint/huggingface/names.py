"""The models that have a format of Hugging Face, and the family of each. A family is a table in a file of its own."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxdist.checkpoint.huggingface.bert import BERT, bert_family
from jaxdist.checkpoint.huggingface.family import Family, Tensor
from jaxdist.checkpoint.huggingface.gpt import GPT2, gpt_family
from jaxdist.checkpoint.huggingface.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from jaxdist.checkpoint.huggingface.mixture import DOTS1, MIXTRAL, QWEN3_MOE
from jaxdist.checkpoint.huggingface.vit import VIT
from jaxdist.config.rules.fields import show
from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError

# {model.name: model -> its family, which raises `UserError` for a model that none can hold}
MODELS: Mapping[str, Callable[[ModelConfig], Family]] = {
    "gpt": gpt_family,
    "vit": lambda model: VIT,
    "bert": bert_family,
}
# {model.name: its families}
FAMILIES_OF = {"gpt": (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, DOTS1), "vit": (VIT,), "bert": (BERT,)}
FAMILIES = {each.kind: each for families in FAMILIES_OF.values() for each in families}


def name_of(own: Family) -> str:
    """The `model.name` of a family's models."""
    return next(name for name, families in FAMILIES_OF.items() if any(each.kind == own.kind for each in families))


def check_name(name: Any) -> None:
    """Raise `UserError` for a model that has no format. name: `model.name`, perhaps of a record from elsewhere."""
    if not isinstance(name, str) or name not in MODELS:
        allowed = ", ".join(MODELS)
        raise UserError(f"model.name: {show(name)} has no Hugging Face format here; allowed: {allowed}")


def family(model: ModelConfig) -> Family:
    """The family whose format can hold this model (`resolved`). Raises `UserError`."""
    check_name(model.name)
    return MODELS[model.name](model)


def tensors(model: ModelConfig, *, positions: int) -> list[Tensor]:
    """All tensors of a model (`resolved`); the tensors of one leaf are neighbours.

    positions: the length of the longest sequence. Raises `UserError` for a model that has no format: see `family`.
    """
    return family(model).tensors(model, positions)
