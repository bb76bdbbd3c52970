"""Options of the model `vit`, and what they must be."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from jaxdist.config.rules.fields import setting
from jaxdist.config.rules.pipeline import divisors, near
from jaxdist.config.rules.transformer import attention_setting, check_heads, check_tensor, scan_blocks_setting
from jaxdist.config.schema import Config, ModelConfig
from jaxdist.config.sections.labels import label_smoothing_setting
from jaxdist.config.sources import check_source
from jaxdist.errors import UserError

UNUSED_AXES = ("context", "expert")  # of the mesh: no layer uses them


@dataclass(frozen=True)
class Options(ModelConfig):
    """The Vision Transformer. The defaults are those of ViT-Base/16."""

    image_size: int = setting(224, "rows and columns of an image", at_least=1)
    patch_size: int = setting(16, "rows and columns of a patch; divides image_size", at_least=1)
    channels: int = setting(3, "channels of an image", at_least=1)
    classes: int = setting(1000, "number of labels", at_least=1)
    label_smoothing: float = label_smoothing_setting()
    layers: int = setting(12, "number of blocks", at_least=1)
    width: int = setting(768, "size of the residual stream", at_least=1)
    heads: int = setting(12, "attention heads; divides width", at_least=1)
    mlp_width: int | None = setting(None, "hidden size of the MLP; null: 4 x width", at_least=1)
    dropout: float = setting(0.0, "probability of dropping an activation in training", at_least=0, below=1)
    norm_eps: float = setting(1e-12, "added to the variance in normalisation", above=0)
    attention: str = attention_setting()
    scan_blocks: int | None = scan_blocks_setting()

    def resolved(self) -> Self:
        """With the width of the MLP filled in."""
        return replace(self, mlp_width=4 * self.width if self.mlp_width is None else self.mlp_width)

    def describe(self) -> str:
        """Such as "vit: 12 blocks, width 768, 12 heads, 196 patches"."""
        patches = (self.image_size // self.patch_size) ** 2
        return f"{self.name}: {self.layers} blocks, width {self.width}, {self.heads} heads, {patches} patches"

    def sample(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """The (shape, dtype) of each leaf of a sample, for plans, which read no data."""
        return {"image": ((self.image_size, self.image_size, self.channels), "uint8"), "label": ((), "int32")}


def check_options(config: Config, mesh: Mapping[str, int]) -> None:
    """Raise `UserError` where the model does not fit itself, the data source, or a mesh of these sizes."""
    model = config.model.resolved()
    check_source(config.data, tuple(model.sample()), f"model.name {model.name!r}")
    if model.image_size % model.patch_size:
        raise UserError(
            f"model.patch_size: {model.patch_size} does not divide model.image_size {model.image_size}; allowed:"
            f" {near(divisors(model.image_size), model.patch_size)}"
        )
    check_heads(model)
    check_tensor(model, mesh["tensor"])
