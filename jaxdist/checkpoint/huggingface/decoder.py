"""What families of decoders share in Hugging Face's format: the embedding, the blocks, the head."""

from collections.abc import Mapping
from typing import Any

from jaxdist.checkpoint.huggingface.family import CONFIG, Tensor
from jaxdist.config.schema import ModelConfig
from jaxdist.specs import STACKED

UNTIED = (
    f"is not the embedding, though {CONFIG} says tie_word_embeddings; allowed: set it to false there, and"
    " model.tied=false"
)
HEAD = "lm_head.weight"  # the one name without the prefix
TABLES = ("embed.tokens.table", "head.projection.table")
CONSTANT_BUFFERS = ("attn.bias", "attn.masked_bias", "rotary_emb.inv_freq")  # in older files; no parameters
# Without these keys transformers takes token 50256 or 2 for the end of a text, whatever the tokenizer.
NO_TOKENS: Mapping[str, Any] = {"bos_token_id": None, "eos_token_id": None}


def decoder_tensors(
    model: ModelConfig, tokens: str, embed: list[Tensor], layers: str, block: list[Tensor], last: list[Tensor]
) -> list[Tensor]:
    """All tensors of a decoder.

    - tokens: the name of the embedding, without .weight.
    - embed: the other tensors of the embedding.
    - layers: the start of the names of a block's tensors.
    - block: the tensors of a block, without that start. last: those of the final norm.
    """
    table = (model.vocab, model.width)
    blocks = [each._replace(leaf=f"{STACKED}.{each.leaf}", name=f"{layers}.{{}}.{each.name}") for each in block]
    found = [Tensor(TABLES[0], f"{tokens}.weight", table), *embed, *blocks, *last]
    return found if model.tied else [*found, Tensor(TABLES[1], HEAD, table)]


def tied_head(model: ModelConfig) -> dict[str, str]:
    """The head, if it is tied: some files hold it beside the embedding."""
    return {HEAD: TABLES[0]} if model.tied else {}
