"""A model with one key, `depth`."""

from dataclasses import dataclass
from typing import Any

from jaxdist.config.rules.fields import setting
from jaxdist.config.schema import ModelConfig
from jaxdist.models.gpt import gpt
from jaxdist.nn import ModelDef


@dataclass(frozen=True)
class Options(ModelConfig):
    """The whole of it."""

    depth: int = setting(1, "number of blocks", at_least=1)


def tower(config: Any, *, max_length: int, param_dtype: Any) -> ModelDef:
    print(f"model: depth {config.depth}")
    inner = ModelConfig(layers=config.depth, width=16, heads=2, vocab=32)
    return gpt(inner, max_length=max_length, param_dtype=param_dtype)
