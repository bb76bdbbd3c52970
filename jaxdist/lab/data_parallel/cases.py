"""The models that DataParallel is shown with: a GPT with a large vocabulary, and the ResNet-101 of the textbook case.

Legend: B rows, S positions, D width, V vocabulary, H and W of an image, C channels, K classes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError
from jaxdist.lab.data_parallel.closed_forms import Sizes
from jaxdist.mesh import abstract_mesh
from jaxdist.model import ModelDef
from jaxdist.models.gpt import gpt
from jaxdist.models.resnet import ResNet, classify
from jaxdist.nn import label_cross_entropy
from jaxdist.nn.dropout import unused_keys
from jaxdist.parallel.modules.module_loss import ModuleLoss
from jaxdist.parallel.modules.nnx_modules import nnx_loss
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import STACKED, PyTree


class ModelCase(NamedTuple):
    """A model and its batch, as a program sees them that computes outputs in one place and their loss in another.

    about: what it is, for people.
    init: key -> (parameters, running statistics).
    forward: (parameters, running statistics, inputs) -> (outputs, new running statistics), on one device.
    loss: (outputs, labels) -> (sum, weight).
    draw: (random numbers, rows) -> (inputs, labels).
    model: the same for a step of jaxdist, where BatchNorm takes the statistics of each device's rows.
    rows: of a device.
    """

    about: str
    init: Callable[[jax.Array], tuple[PyTree, PyTree]]
    forward: Callable[..., tuple[jax.Array, PyTree]]
    loss: Callable[..., tuple[jax.Array, jax.Array]]
    draw: Callable[[np.random.Generator, int], tuple[dict[str, Any], dict[str, Any]]]
    model: ModelDef | ModuleLoss
    rows: int

    def sizes(self, devices: int) -> Sizes:
        """Bytes of all that travels, from shapes alone: nothing is computed."""
        rows = self.rows * devices
        params, state = jax.eval_shape(self.init, jax.random.key(0))
        inputs, labels = jax.eval_shape(lambda: self._drawn_shapes(rows))
        outputs, _ = jax.eval_shape(self.forward, params, state, inputs)
        return Sizes(*map(_bytes, (params, state, inputs, labels, outputs, jax.eval_shape(self.loss, outputs, labels))))

    def _drawn_shapes(self, rows: int) -> Any:
        """Of one row, whatever it is, so many: no large batch is drawn for its shapes."""
        one = self.draw(np.random.default_rng(0), 1)
        return jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), one)


def _bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def make_gpt(config: ModelConfig, *, seq_len: int, rows: int, dtype: Any = jnp.float32) -> ModelCase:
    """A language model, whose outputs are the logits of every position."""
    model = gpt(config, max_length=seq_len, param_dtype=dtype)

    def region(params: PyTree, ids_BS: jax.Array) -> jax.Array:
        keys_B = unused_keys(len(ids_BS))
        batch = {"inputs": ids_BS, "keys": keys_B}
        h = model.embed(params["embed"], batch, keys_B)
        h, _ = lax.scan(
            lambda h, block: (model.block(block, h, *model.read_by_blocks(batch)), None), h, params[STACKED]
        )
        return model.logits(params["head"], params["embed"] if model.tied else None, h)

    # Layers name the axes of a mesh. In this one each is one device: the one on which the arguments are.
    logits = jax.shard_map(region, mesh=abstract_mesh(), in_specs=P(), out_specs=P())

    def loss(logits_BSV: jax.Array, labels: PyTree) -> tuple[jax.Array, jax.Array]:
        flat = logits_BSV.reshape(-1, logits_BSV.shape[-1])
        return label_cross_entropy(flat, labels["targets"].reshape(-1), labels["weights"].reshape(-1))

    def draw(rng: np.random.Generator, rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
        ids = rng.integers(0, config.vocab, (rows, seq_len + 1)).astype(np.int32)
        return {"inputs": ids[:, :-1]}, {"targets": ids[:, 1:], "weights": np.ones((rows, seq_len), np.float32)}

    return ModelCase(
        f"{config.describe()}, vocabulary {config.vocab:,}, {rows} x {seq_len} tokens a device",
        lambda key: (model.init(key), {}),
        lambda params, state, inputs: (logits(params, inputs["inputs"]), state),
        loss,
        draw,
        model,
        rows,
    )


def make_resnet(config: ModelConfig, *, rows: int, dtype: Any = jnp.float32) -> ModelCase:
    """A classifier of images, whose outputs are the logits of each image."""

    def build(rngs: nnx.Rngs) -> ResNet:
        return ResNet(config, rngs, dtype)

    graph, *empty = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))), nnx.Param, nnx.BatchStat)

    def init(key: jax.Array) -> tuple[PyTree, PyTree]:
        _, *parts = nnx.split(build(nnx.Rngs(key)), nnx.Param, nnx.BatchStat)
        return nnx.to_pure_dict(parts[0]), nnx.to_pure_dict(parts[1])

    def forward(params: PyTree, state: PyTree, inputs: PyTree) -> tuple[jax.Array, PyTree]:
        parts = [jax.tree.map(lambda leaf: leaf, each) for each in empty]  # copies, to be filled
        for part, values in zip(parts, (params, state), strict=True):
            nnx.replace_by_pure_dict(part, values)
        module = nnx.merge(graph, *parts)
        with jax.numpy_dtype_promotion("standard"):  # Flax's BatchNorm mixes float64 with float32
            logits_BK = module(inputs["image"])
        return logits_BK.astype(accumulation_dtype(logits_BK.dtype)), nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))

    def draw(rng: np.random.Generator, rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
        image = rng.normal(size=(rows, config.image_size, config.image_size, config.channels)).astype(dtype)
        return {"image": image}, {"label": rng.integers(0, config.classes, rows).astype(np.int32)}

    def loss(logits_BK: jax.Array, labels: PyTree) -> tuple[jax.Array, jax.Array]:
        return label_cross_entropy(logits_BK, labels["label"], jnp.ones(labels["label"].shape))

    about = f"{config.describe()}, {config.classes} classes, {rows} images a device"
    return ModelCase(about, init, forward, loss, draw, nnx_loss(build, classify, sync=False), rows)


# {name: (the case that runs on a laptop, that of full size)}, as functions: a model is traced to be made.
CASES: dict[str, tuple[Callable[[], ModelCase], Callable[[], ModelCase]]] = {
    "gpt": (
        lambda: make_gpt(_config("gpt", layers=2, width=128, heads=4, vocab=8192), seq_len=64, rows=4),
        lambda: make_gpt(_config("gpt", layers=12, width=768, heads=12, vocab=50257), seq_len=1024, rows=8),
    ),
    "resnet101": (
        lambda: make_resnet(
            _config("resnet", depth=101, blocks=(1, 1, 1, 1), width=16, classes=100, image_size=32, stem="small"),
            rows=8,
        ),
        lambda: make_resnet(_config("resnet", depth=101), rows=32),
    ),
}


def make_case(name: str, *, full: bool) -> ModelCase:
    """The case of this name. full: of the size that people train. Raises `UserError` for an unknown name."""
    if name not in CASES:
        raise UserError(f"--model: {name!r} is not known; allowed: {', '.join(CASES)}")
    return CASES[name][full]()


def _config(name: str, **options: Any) -> ModelConfig:
    return ModelConfig(name=name).replace(**options)
