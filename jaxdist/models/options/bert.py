"""Options of the model `bert`, and what they must be."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from jaxdist.config.rules.fields import setting
from jaxdist.config.rules.transformer import (
    attention_setting,
    check_heads,
    check_sequence,
    check_tensor,
    loss_chunk_setting,
    scan_blocks_setting,
)
from jaxdist.config.schema import Config, ModelConfig
from jaxdist.config.sections.labels import label_smoothing_setting
from jaxdist.config.sources import check_source
from jaxdist.errors import UserError

UNUSED_AXES = ("context", "expert")  # of the mesh: no layer uses them yet


@dataclass(frozen=True)
class Options(ModelConfig):
    """BERT, an encoder. BERT-base: 12 layers, width 768, 12 heads, 30522 ids."""

    head: str = setting(
        "mlm",
        "mlm: predicts masked tokens; classification: a label of the whole sequence",
        choices=("mlm", "classification"),
    )
    classes: int = setting(2, "number of labels (head: classification)", at_least=1)
    label_smoothing: float = label_smoothing_setting(" (head: classification)")
    layers: int = setting(4, "number of blocks", at_least=1)
    width: int = setting(128, "size of the residual stream", at_least=1)
    heads: int = setting(4, "attention heads; divides width", at_least=1)
    vocab: int = setting(264, "number of token ids; 264: the bytes, [MASK], and up to a multiple of 8", at_least=1)
    types: int = setting(2, "number of segments, of the batch's token_type_ids; 0 where it has none", at_least=1)
    mlp_width: int | None = setting(None, "hidden size of the MLP; null: 4 x width", at_least=1)
    dropout: float = setting(0.1, "probability of dropping an activation in training", at_least=0, below=1)
    norm_eps: float = setting(1e-12, "added to the variance in normalisation", above=0)
    attention: str = attention_setting()
    scan_blocks: int | None = scan_blocks_setting()
    loss_chunk: int | None = loss_chunk_setting()

    def resolved(self) -> Self:
        """With the width of the MLP filled in."""
        return replace(self, mlp_width=4 * self.width if self.mlp_width is None else self.mlp_width)

    def idle(self) -> tuple[str, ...]:
        """The number of labels of a head that predicts tokens."""
        return ("classes",) if self.head == "mlm" else ()

    def describe(self) -> str:
        """Such as "bert (mlm): 4 blocks, width 128, 4 heads"."""
        return f"{self.name} ({self.head}): {self.layers} blocks, width {self.width}, {self.heads} heads"


def check_options(config: Config, mesh: Mapping[str, int]) -> None:
    """Raise `UserError` where the model does not fit itself, the data source, or a mesh of these sizes."""
    model = config.model.resolved()
    if model.label_smoothing and model.head == "mlm":
        raise UserError(
            f"model.label_smoothing: {model.label_smoothing} has no effect with model.head 'mlm'; allowed: 0; or"
            " model.head=classification"
        )
    check_heads(model)
    check_tensor(model, mesh["tensor"])
    check_sequence(config, mesh["tensor"])
    leaves = ("inputs", "targets") if model.head == "mlm" else ("inputs", "label")
    check_source(config.data, leaves, f"model.head {model.head!r}", next_token=False)
