"""Options of the model `resnet`, and what they must be."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxdist.config.rules.fields import setting
from jaxdist.config.schema import Config, ModelConfig
from jaxdist.config.sections.labels import label_smoothing_setting
from jaxdist.config.sources import check_source
from jaxdist.errors import UserError

# Blocks of each stage; below 50 blocks are of two 3x3 convolutions, from 50 on bottlenecks (table 1 of the paper).
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


@dataclass(frozen=True)
class Options(ModelConfig):
    """ResNet, a classifier of images [image_size, image_size, channels]."""

    depth: int = setting(50, "layers with weights: 18, 34, 50, 101 or 152", at_least=min(BLOCKS), at_most=max(BLOCKS))
    blocks: tuple[int, ...] = setting((), "blocks of each stage, [1, 1, 1]; []: as many as depth says", at_least=1)
    classes: int = setting(1000, "number of labels", at_least=1)
    label_smoothing: float = label_smoothing_setting()
    channels: int = setting(3, "channels of an image", at_least=1)
    image_size: int = setting(224, "rows and columns of an image", at_least=1)
    width: int = setting(64, "channels after the first convolution; stages double them", at_least=1)
    stem: str = setting(
        "imagenet",
        "the first layers; imagenet: 7x7 with stride 2 and pooling; small, for images of up to 64: 3x3",
        choices=("imagenet", "small"),
    )

    @property
    def blocks_of_stages(self) -> tuple[int, ...]:
        """The number of blocks of each stage."""
        return self.blocks or BLOCKS[self.depth]

    @property
    def bottleneck(self) -> bool:
        """Whether blocks are bottlenecks."""
        return self.depth >= 50

    def describe(self) -> str:
        """Such as "resnet (bottleneck): 3 + 4 + 6 + 3 blocks, width 64, images of 224"."""
        kind, stages = "bottleneck" if self.bottleneck else "basic", " + ".join(map(str, self.blocks_of_stages))
        return f"{self.name} ({kind}): {stages} blocks, width {self.width}, images of {self.image_size}"

    def sample(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """The (shape, dtype) of each leaf of a sample, for plans, which read no data."""
        return {"image": ((self.image_size, self.image_size, self.channels), "uint8"), "label": ((), "int32")}


def check_options(config: Config, mesh: Mapping[str, int]) -> None:
    """Raise `UserError` where the model does not fit the other sections."""
    check_source(config.data, tuple(config.model.sample()), f"model.name {config.model.name!r}")
    if config.model.depth not in BLOCKS:
        raise UserError(f"model.depth: {config.model.depth}; allowed: {', '.join(map(str, BLOCKS))}")
    if config.parallel.grad_sync.deterministic:
        raise UserError(
            "parallel.grad_sync.deterministic: true, but the batch statistics of model resnet depend on how many rows a"
            " microbatch has, and so on the layout; allowed: false"
        )
