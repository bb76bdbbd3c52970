"""ResNet: a residual network of convolutions for images (He et al. 2016), with 18, 34, 50, 101 or 152 layers.

As in torchvision ("v1.5"), a bottleneck has its stride in the 3x3 convolution. BatchNorm takes the statistics of the
whole global microbatch, whatever the layout. Its running statistics are state and no parameters, so that this entry
gives a loss of a module in place of a `ModelDef`.

Legend: B rows, H and W positions, C channels, K classes.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist.config.entries import ModelFacts
from jaxdist.errors import UserError
from jaxdist.models._pixels import are_bytes
from jaxdist.nn import label_accuracy, label_cross_entropy
from jaxdist.parallel.modules.module_loss import ModuleLoss
from jaxdist.parallel.modules.nnx_modules import nnx_loss
from jaxdist.precision.policy import accumulation_dtype

FACTS = ModelFacts(user_loss=True, generates=False)

EXPANSION = 4  # of channels, by a bottleneck
HE = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")  # He et al. 2015


def _convolution(rngs: nnx.Rngs, size: int, before: int, after: int, stride: int, dtype: Any) -> nnx.Conv:
    """A convolution without bias, as a norm follows. It pads both sides alike, as PyTorch does; "SAME" does not."""
    padding = ((size // 2, size // 2),) * 2
    options: dict[str, Any] = {"padding": padding, "use_bias": False, "kernel_init": HE, "param_dtype": dtype}
    return nnx.Conv(before, after, (size, size), stride, rngs=rngs, **options)


def _norm(rngs: nnx.Rngs, channels: int, dtype: Any) -> nnx.BatchNorm:
    """A BatchNorm with the numbers of PyTorch: its momentum 0.1 is 0.9 here."""
    norm = nnx.BatchNorm(channels, momentum=0.9, epsilon=1e-5, param_dtype=dtype, rngs=rngs)
    wide = accumulation_dtype(dtype)  # Flax makes the running statistics in float32
    norm.mean, norm.var = nnx.BatchStat(jnp.zeros(channels, wide)), nnx.BatchStat(jnp.ones(channels, wide))
    return norm


def _normalised(norm: nnx.BatchNorm, x: jax.Array, counted: jax.Array | None) -> jax.Array:
    """x by a norm, in the dtype of x: a norm in float32 would have the next convolutions in float32, too.

    counted: of rows, whether they enter the statistics; None: all do
    """
    mask = None if counted is None else counted[:, None, None, None]
    return norm(x, mask=mask).astype(x.dtype)


class ResidualBlock(nnx.Module):
    """relu(x + f(x)), where f is two 3x3 convolutions, or a bottleneck: 1x1, 3x3, and 1x1 with four times the channels.

    The first 3x3 convolution has the stride. x passes a 1x1 convolution where the shapes differ.
    """

    def __init__(self, rngs: nnx.Rngs, before: int, width: int, stride: int, dtype: Any, *, bottleneck: bool) -> None:
        after = width * EXPANSION if bottleneck else width
        layers = [(3, before, width, stride), (3, width, width, 1)]
        if bottleneck:
            layers = [(1, before, width, 1), (3, width, width, stride), (1, width, after, 1)]
        self.convolutions = nnx.List([_convolution(rngs, *layer, dtype) for layer in layers])
        self.norms = nnx.List([_norm(rngs, layer[2], dtype) for layer in layers])
        differs = stride != 1 or before != after
        self.shortcut = _convolution(rngs, 1, before, after, stride, dtype) if differs else None
        self.shortcut_norm = _norm(rngs, after, dtype) if differs else None

    def __call__(self, x_BHWC: jax.Array, counted_B: jax.Array | None = None) -> jax.Array:
        h = x_BHWC
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            h = _normalised(norm, convolution(h if number == 0 else nnx.relu(h)), counted_B)
        if self.shortcut is not None and self.shortcut_norm is not None:
            x_BHWC = _normalised(self.shortcut_norm, self.shortcut(x_BHWC), counted_B)
        return nnx.relu(h + x_BHWC)


class ResNet(nnx.Module):
    """images [B, H, W, C] -> logits [B, K].

    It computes in the dtype of its parameters, which a precision policy casts, and has statistics in at least float32.
    """

    def __init__(self, config: Any, rngs: nnx.Rngs, param_dtype: Any = jnp.float32) -> None:
        """config: `Options` of `jaxdist/models/options/resnet.py`."""
        self.pooled, self.label_smoothing = config.stem == "imagenet", config.label_smoothing
        self.deterministic = False  # `Module.eval` makes it True
        size, stride = (7, 2) if self.pooled else (3, 1)
        self.stem = _convolution(rngs, size, config.channels, config.width, stride, param_dtype)
        self.stem_norm = _norm(rngs, config.width, param_dtype)
        stages, before = [], config.width
        for number, count in enumerate(config.blocks_of_stages):
            width, blocks = config.width * 2**number, []
            for i in range(count):
                stride = 2 if number and not i else 1
                blocks.append(ResidualBlock(rngs, before, width, stride, param_dtype, bottleneck=config.bottleneck))
                before = width * EXPANSION if config.bottleneck else width
            stages.append(nnx.List(blocks))
        self.stages = nnx.List(stages)
        self.head = nnx.Linear(before, config.classes, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, images: jax.Array, counted_B: jax.Array | None = None) -> jax.Array:
        """counted_B: whether a row enters the statistics of norms; None: all do."""
        h = self.stem(images.astype(self.stem.kernel[...].dtype))
        h = nnx.relu(_normalised(self.stem_norm, h, counted_B))
        if self.pooled:
            h = nnx.max_pool(h, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for blocks in self.stages:
            for block in blocks:
                h = block(h, counted_B)
        return self.head(h.mean((1, 2)))


def classify(model: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, ...]:
    """(cross-entropy sum, weight, {"accuracy": (sum, weight)}) of a classifier of images, over these rows. Labels are
    smoothed in training mode.

    batch: image [B, H, W, C], label [B], and weights [B] or none. A row of weight 0 enters nothing, nor the statistics
        of norms. Pixels of the type uint8 go from 0 to 255, and become numbers from -1 to 1; floats are taken as they
        are.
    """
    if not isinstance(batch, Mapping):
        raise UserError(
            f"model: a batch is a {type(batch).__name__}; allowed: a dict of image, label and, if you like, weights"
        )
    if lacking := {"image", "label"} - batch.keys():
        raise UserError(
            f"model: a batch needs image and label, and has no {min(lacking)}, but {', '.join(sorted(batch))}; allowed:"
            " a data.source of images, such as digits or images"
        )
    image, label = batch["image"], batch["label"]
    if image.ndim != 4 or image.shape[3] != model.stem.in_features:
        raise UserError(
            f"model.channels: {model.stem.in_features}, but images of the batch have the shape {list(image.shape[1:])};"
            " allowed: [rows, columns, channels]; PyTorch's [channels, rows, columns] is image.transpose(0, 2, 3, 1); a"
            " grey image needs image[..., None]"
        )
    if are_bytes(image):
        image = image.astype(jnp.float32) / 127.5 - 1
    weights = batch.get("weights")
    if weights is not None and weights.shape != image.shape[:1]:
        raise UserError(
            f"model: weights of the batch have the shape {list(weights.shape)}; allowed: {list(image.shape[:1])}, one a"
            " row"
        )
    logits = model(image, None if weights is None else weights != 0)
    logits = logits.astype(accumulation_dtype(logits.dtype))
    weights = jnp.ones(label.shape) if weights is None else weights
    smoothing = 0.0 if model.deterministic else model.label_smoothing
    total, weight = label_cross_entropy(logits, label, weights, smoothing)
    return total, weight, {"accuracy": label_accuracy(logits, label, weights)}


def resnet(config: Any, *, max_length: int = 0, param_dtype: Any = jnp.float32) -> ModuleLoss:
    """The loss of a ResNet: cross-entropy, with the metric `accuracy`. Its statistics are those of all devices' rows.

    config: section `model` of a configuration with `name: resnet`. max_length: not used, as an image has its own size.

    >>> from jaxdist.config.schema import ModelConfig
    >>> from jaxdist.models.resnet import resnet
    >>> loss = resnet(ModelConfig(name="resnet", depth=101))
    >>> f"{loss.parameters:,}"
    '44,549,160'
    """
    return nnx_loss(lambda rngs: ResNet(config, rngs, param_dtype), classify)


def from_torchvision(weights: Mapping[str, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """(params, model_state) of the same ResNet, from the state dict of one of torchvision's.

    weights: arrays by torchvision's names: {name: tensor.numpy() for name, tensor in model.state_dict().items()}. They
        are copied.

    >>> from jaxdist.models.resnet import from_torchvision
    >>> params, model_state = from_torchvision({"fc.weight": np.ones((10, 4)), "bn1.running_mean": np.zeros(4)})
    >>> params["head"]["kernel"].shape, model_state["stem_norm"]["mean"].shape
    ((4, 10), (4,))
    """
    params: dict[Any, Any] = {}
    model_state: dict[Any, Any] = {}
    for name, value in weights.items():
        *path, kind = name.split(".")
        if kind == "num_batches_tracked":
            continue
        array, running = np.array(value), kind.startswith("running_")
        leaf = {"running_mean": "mean", "running_var": "var", "bias": "bias"}.get(kind)
        leaf = leaf or ("scale" if array.ndim == 1 else "kernel")
        node = model_state if running else params
        for key in _place(".".join(path)):
            node = node.setdefault(key, {})
        node[leaf] = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
    return params, model_state


def _place(name: str) -> list[Any]:
    """The path in a `ResNet` of one of torchvision's layers, such as "layer1.0.conv2"."""
    named = {"conv1": ["stem"], "bn1": ["stem_norm"], "fc": ["head"]}
    if name in named:
        return named[name]
    found = re.fullmatch(r"layer(\d)\.(\d+)\.(conv|bn|downsample\.)(\d)", name)
    if found is None:
        raise UserError(f"from_torchvision: {name!r} is no layer of a ResNet; give the state dict of one")
    stage, block, kind, number = int(found[1]) - 1, int(found[2]), found[3], int(found[4])
    if kind == "downsample.":
        return ["stages", stage, block, ("shortcut", "shortcut_norm")[number]]
    return ["stages", stage, block, "convolutions" if kind == "conv" else "norms", number - 1]
