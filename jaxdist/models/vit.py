"""ViT: the Vision Transformer, a classifier of images (Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words").

Legend: B batch, H rows and W columns of an image, C channels, p rows and columns of a patch, S positions (the class
token, then the patches row by row), D model width, L labels.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config.entries import ModelFacts
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.optimizer import LoraConfig
from jaxdist.errors import UserError
from jaxdist.models._encoder import encoder_block
from jaxdist.models._pixels import are_bytes
from jaxdist.nn import (
    LayerNorm,
    Linear,
    ModelDef,
    PositionEmbed,
    add_bias,
    dropout,
    label_accuracy,
    label_cross_entropy,
    model_def,
    normal,
)
from jaxdist.precision.policy import accumulation_dtype

FACTS = ModelFacts(kernels=True, generates=False)

Batch = dict[str, jax.Array]


def patches_of(image_BHWC: jax.Array, size: int) -> jax.Array:
    """The patches [B, patches, p p C] of images, row by row, each as its pixels row by row."""
    batch, rows, columns, channels = image_BHWC.shape
    cut = image_BHWC.reshape(batch, rows // size, size, columns // size, size, channels)
    return cut.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, size * size * channels)


class Embed(nnx.Module):
    """Patches through a linear layer, the class token before them, learned positions."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        size, side, inputs = config.patch_size, config.image_size // config.patch_size, config.channels
        self.patches = Linear(rngs, size * size * inputs, config.width, std=(size * size * inputs) ** -0.5, fp32=True)
        self.class_token = normal(rngs, (config.width,), 0.02, (None,))
        self.positions = PositionEmbed(rngs, 1 + side * side, config.width)
        self.size, self.dropout = size, config.dropout
        self.image = (config.image_size, config.image_size, config.channels)

    def __call__(self, batch: Batch, keys_B: jax.Array) -> jax.Array:
        image_BHWC = batch["image"]
        if image_BHWC.shape[1:] != self.image:
            raise UserError(
                f"vit: images are {list(image_BHWC.shape[1:])}, and the model takes {list(self.image)}; set"
                " model.image_size and model.channels to those of the data"
            )
        table_SD = self.positions(1 + (self.image[0] // self.size) ** 2)
        wide = accumulation_dtype(table_SD.dtype)
        pixels = image_BHWC.astype(wide)
        if are_bytes(image_BHWC):
            pixels = pixels * (1 / 127.5) - 1
        patches_BSD = self.patches(patches_of(pixels, self.size).astype(table_SD.dtype)).astype(table_SD.dtype)
        # The class token is added where nothing was, with the first position.
        added_SD = table_SD.astype(wide).at[0].add(self.class_token[...].astype(wide))
        h_BSD = add_bias(jnp.pad(patches_BSD, ((0, 0), (1, 0), (0, 0))), added_SD)
        return dropout(h_BSD, keys_B, site=0, rate=self.dropout)


class Head(nnx.Module):
    """Final norm, logits of the labels from the class token, cross-entropy."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.norm, self.label_smoothing = LayerNorm(config.width, eps=config.norm_eps), config.label_smoothing
        self.classifier = Linear(rngs, config.width, config.classes, std=0.02, fp32=True)

    def logits(self, h_BSD: jax.Array, embed: Embed | None) -> jax.Array:
        """[B, L], in at least fp32."""
        return self.classifier(self.norm(h_BSD[:, :1]))[:, 0]

    def __call__(self, h_BSD: jax.Array, batch: Batch, embed: Embed | None) -> tuple[jax.Array, jax.Array]:
        """(sum of weighted losses in nats, sum of weights)."""
        return label_cross_entropy(self.logits(h_BSD, embed), batch["label"], batch["weights"], self.label_smoothing)

    def metrics(self, h_BSD: jax.Array, batch: Batch, embed: Embed | None) -> dict[str, tuple[jax.Array, jax.Array]]:
        """The accuracy."""
        return {"accuracy": label_accuracy(self.logits(h_BSD, embed), batch["label"], batch["weights"])}


class ViT(nnx.Module):
    """The whole model as a module; training takes it apart with `model_def`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, fp8: bool) -> None:
        self.embed = Embed(config, rngs)
        self.blocks = nnx.List(
            [encoder_block(config, rngs, {"fp8": fp8}, post_norm=False) for _ in range(config.layers)]
        )
        self.head = Head(config, rngs)


def vit(
    config: ModelConfig,
    *,
    max_length: int,
    param_dtype: Any = jnp.float32,
    fp8: bool = False,
    lora: LoraConfig | None = None,
) -> ModelDef:
    """The `ModelDef` of a ViT. Batches: image [B, H, W, C], label and weights [B].

    Pixels that are integers go from 0 to 255, and become numbers from -1 to 1; floats are taken as they are.
    Evaluations have the metric accuracy.

    The blocks are split over `tensor`, as GPT's are. Patches, positions and classifier are copies on its devices: they
    are less than a hundredth of the work.

    config: its `attention` "auto" is "xla" here; `jaxdist.build` knows what the model runs on.
    max_length: without effect: the positions are those of the patches.
    fp8: whether the blocks' linear layers multiply in float8, as precision fp8 needs.
    lora: adapters of the blocks' layers, see `model_def`.
    """
    full = config.resolved()
    # Not `columns`, though it could be: prefetching would send whole images in place of a small kernel.
    return model_def(
        lambda rngs: ViT(full, rngs, fp8=fp8), param_dtype=param_dtype, scan_blocks=full.scan_blocks, lora=lora
    )
