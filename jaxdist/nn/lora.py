"""LoRA: low-rank adapters of linear layers, x W + alpha / rank * (x A) B (Hu et al. 2021, arXiv 2106.09685).

Only A and B are trained: everything else is frozen by `ADAPTERS_ONLY` (`jaxdist.config.sections.optimizer`). A is split
over `tensor` as the layer's inputs are, and B as its outputs. A column-parallel layer has a whole A; a row-parallel one
adds to each device's part before its own psum. So a layer with an adapter sends what it sent without one. In the
backward pass the gradient of whatever is whole, A or B, is summed over `tensor`.

A layer whose product computes several projections has an adapter for each that is targeted: queries, keys and values
have an A each, as in PEFT's format.

Legend: I input width of the layer, R rank; B is [R, *features].
"""

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.collectives import to_varying, varying_axes
from jaxdist.config.sections.optimizer import LoraConfig
from jaxdist.errors import UserError
from jaxdist.nn.dropout import dropout, dropout_columns
from jaxdist.nn.linear import ColumnParallelLinear, RowParallelLinear
from jaxdist.nn.param import normal, spec_of, zeros
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import STACKED

FIRST_SITE = 16  # of dropout in a block; the layers themselves use smaller ones
# Names of Hugging Face's modules, as PEFT's `target_modules` has them, in our patterns.
HUGGING_FACE = {
    "all-linear": ("*",),
    "q_proj": ("*.q",),
    "k_proj": ("*.k",),
    "v_proj": ("*.v",),
    "o_proj": ("*attention.out",),
    "gate_proj": ("*.up.gate",),
    "up_proj": ("*.up.up", "*.mlp.up"),
    "down_proj": ("*.mlp.down",),
    "c_attn": ("*.q", "*.k", "*.v"),
    "c_fc": ("*.mlp.up",),
    "c_proj": ("*attention.out", "*.mlp.down"),
}
Layer = ColumnParallelLinear | RowParallelLinear


class Adapter(nnx.Module):
    """The adapter of one projection: x [..., I] -> [..., *features].

    A is drawn from N(0, 1 / I), and B is 0, so that training begins with the layer as it is.

    shape, spec: of the kernel that it adds to.
    site: of dropout, see `jaxdist.nn.dropout`.
    keys: dropout keys [B] of the rows, which `keyed` sets.
    """

    keys: Any = None

    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, ...], spec: tuple[Any, ...], lora: LoraConfig, site: int):
        (inputs, *features), rank = shape, lora.rank
        self.a = normal(rngs, (inputs, rank), inputs**-0.5, (spec[0], None))
        self.b = zeros((rank, *features), (None, *spec[1:]))
        self.scale, self.rate, self.site, self.split = lora.alpha / rank, lora.dropout, site, spec[0] is not None

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.rate:
            assert self.keys is not None, "an adapter with dropout runs by `keyed`"
            x = (dropout_columns if self.split else dropout)(x, self.keys, site=self.site, rate=self.rate)
        low = jnp.tensordot(x, _whole(self.a[...], x), 1) * self.scale
        return jnp.tensordot(low, _whole(self.b[...], low), 1)


def _whole(weight: jax.Array, x: jax.Array) -> jax.Array:
    """The weight, typed varying like x. As for a bias, autodiff sums its gradient over devices in at least fp32."""
    wide = weight.astype(accumulation_dtype(weight.dtype))
    with jax.named_scope("lora.gradients"):  # of the sum that the cast becomes in the backward pass, for the ledger
        cast: jax.Array = to_varying(wide, varying_axes(x))
    return cast.astype(weight.dtype)


class Adapters(nnx.Module):
    """The adapters of a layer that computes several projections: the sum to add to its result.

    parts: (name, size along the last dim but one of the result) of each projection.
    """

    def __init__(self, parts: Sequence[tuple[str, int]], adapters: dict[str, Adapter]) -> None:
        self.parts = tuple(parts)
        for name, adapter in adapters.items():
            setattr(self, name, adapter)

    def __call__(self, x: jax.Array) -> jax.Array:
        found = {name: getattr(self, name)(x) for name, _ in self.parts if hasattr(self, name)}
        like = next(iter(found.values()))

        def zeros_of(size: int) -> jax.Array:
            shape = (*like.shape[:-2], size, like.shape[-1])
            return to_varying(jnp.zeros(shape, like.dtype), varying_axes(like))

        return jnp.concatenate([found.get(name, zeros_of(size)) for name, size in self.parts], axis=-2)


def adapting(build: Callable[[nnx.Rngs], Any], lora: LoraConfig) -> Callable[[nnx.Rngs], Any]:
    """The function rngs -> module, with adapters on the layers of its blocks that `lora.targets` names.

    The parameters of the module itself are drawn as without adapters. Raises `UserError` for a target that fits no
    layer.
    """

    def adapted(rngs: nnx.Rngs) -> Any:
        module = build(rngs)
        for block in module.blocks:
            _attach(block, lora, rngs)
        return module

    return adapted


def _layers(block: nnx.Module) -> Iterator[tuple[str, Layer]]:
    """(path, layer) of each linear layer of a block that can have an adapter, in order: "blocks.mlp.down"."""
    found = {".".join(map(str, (STACKED, *path))): node for path, node in nnx.iter_graph(block)}
    yield from ((path, found[path]) for path in sorted(found) if isinstance(found[path], Layer))


def _attach(block: nnx.Module, lora: LoraConfig, rngs: nnx.Rngs) -> None:
    lora.check(collective_matmul=any(layer.collective_matmul for _, layer in _layers(block)))
    layers = list(_layers(block))
    names = [f"{path}.{part}" if part else path for path, layer in layers for part, _ in layer.parts or (("", 0),)]
    chosen, site = _targeted(names, lora.targets), FIRST_SITE
    for path, layer in layers:
        shape, spec, made = layer.kernel.shape, tuple(spec_of(layer.kernel)), dict[str, Adapter]()
        for part, size in layer.parts or (("", 0),):
            if (f"{path}.{part}" if part else path) in chosen:
                part_shape = (*shape[:-2], size, shape[-1]) if part else shape
                made[part] = Adapter(rngs, part_shape, spec, lora, site)
            site += 1
        if made:
            layer.lora = Adapters(layer.parts, made) if layer.parts else made[""]


def _targeted(names: list[str], targets: tuple[str, ...]) -> set[str]:
    """The names that fit a target, a pattern of ours or a name of Hugging Face's."""
    chosen = set[str]()
    for target in targets:
        patterns = HUGGING_FACE.get(target, (target,))
        fits = {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
        if not fits:
            raise UserError(
                f"optimizer.lora.targets: {target!r} fits no linear layer of the blocks; allowed: patterns of"
                f" {', '.join(names)}; or Hugging Face's names of them, of {', '.join(HUGGING_FACE)}"
            )
        chosen |= fits
    return chosen


def keyed(block: Any, keys_B: jax.Array) -> Any:
    """The block, whose adapters drop by these keys. Linear layers are not called with keys, so they are set."""
    for _, node in nnx.iter_graph(block):
        if isinstance(node, Adapter) and node.rate:
            node.keys = keys_B
    return block
