"""Model definitions: `model_def` turns an `nnx.Module` into pure functions on trees. The rest is plain JAX."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxdist.nn.param import specs_of
from jaxdist.specs import STACKED, PyTree, map_specs


class ModelDef(NamedTuple):
    """A model as pure functions. Parameters are {"embed", "blocks" (every leaf stacked, [layers, ...]), "head"}.

    For example, the loss of a model of one block, where keys_B is one dropout key a sample:

        h = model.embed(params["embed"], batch, keys_B)
        h = model.block(jax.tree.map(lambda leaf: leaf[0], params["blocks"]), h, keys_B)
        loss_sum, weight_sum = model.head(params["head"], params["embed"] if model.tied else None, h, batch)

    init: key -> parameters, in global shapes.
    specs: the PartitionSpecs of the layers; those of blocks have a leading "pipe".
    shapes: ShapeDtypeStructs of the parameters.
    embed: (params of embed, batch, keys_B) -> h.
    block: (params of one block, h, keys_B) -> h.
    head: (params of head, params of embed if tied else None, h, batch) -> (loss sum, weight sum).
    logits: (params of head, params of embed if tied else None, h) -> logits over the whole vocabulary, for sampling.
    layers: the number of blocks.
    tied: whether the head reads the parameters of embed.
    chunks: the number of virtual stages of a pipeline stage.
    stages: the number of blocks of each virtual stage, if these differ; else (). In the leaves of blocks each stage has
        as many rows as the largest; rows without a block are zeros. See `jaxdist.parallel.pipeline.stages`.
    fp8: whether linear layers multiply in float8. The precision of a step must have the same value.
    scan_blocks: blocks in one round of the loop over blocks; 0: no loop.
    columns: whether `embed` maps columns (the last dim) of its parameters to the same columns of h.
    collective_matmul: whether linear layers use `ppermute`, which may not be inside a condition.
    """

    init: Callable[[jax.Array], PyTree]
    specs: PyTree
    shapes: PyTree
    embed: Callable[..., Any]
    block: Callable[..., Any]
    head: Callable[..., Any]
    logits: Callable[..., Any]
    layers: int
    tied: bool
    chunks: int = 1
    stages: tuple[int, ...] = ()
    fp8: bool = False
    scan_blocks: int = 1
    columns: bool = False
    collective_matmul: bool = False

    @property
    def empty_rows(self) -> int:
        """The number of rows without a block in each leaf of blocks."""
        return len(self.stages) * max(self.stages, default=0) - sum(self.stages)

    @property
    def parameters(self) -> int:
        """The number of parameters, without the empty rows."""

        def count(tree: PyTree) -> int:
            return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))

        rows = self.layers + self.empty_rows
        return count(self.shapes) - count(self.shapes[STACKED]) // rows * self.empty_rows


def _pure(module: nnx.Module) -> PyTree:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _any_layer(module: nnx.Module, option: str) -> bool:
    return any(getattr(node, option, False) for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Module))


def model_def(
    build: Callable[[nnx.Rngs], Any],
    *,
    tied: bool,
    param_dtype: Any = jnp.float32,
    scan_blocks: int = 1,
    columns: bool = False,
) -> ModelDef:
    """The `ModelDef` of an nnx.Module. Nothing is allocated: the module is traced abstractly.

    build: rngs -> the module. Its parts are three attributes:
        embed: a module, embed(batch, keys_B) -> h.
        blocks: an nnx.List of uniform modules, block(h, keys_B) -> h.
        head: a module, head(h, batch, embed | None) -> (loss sum, weight sum), with a method logits(h, embed | None) ->
            logits over the whole vocabulary.
    param_dtype: the dtype of all parameters.
    tied, scan_blocks, columns: see `ModelDef`.

    Raises `ValueError` if the blocks are not uniform: they are stacked and scanned over.
    """

    def init(key: jax.Array) -> PyTree:
        module = build(nnx.Rngs(key))
        blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[_pure(block) for block in module.blocks])
        params = {"embed": _pure(module.embed), "blocks": blocks, "head": _pure(module.head)}
        return jax.tree.map(lambda leaf: leaf.astype(param_dtype), params)

    skeleton = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    embed_def, embed_state = nnx.split(skeleton.embed, nnx.Param)
    head_def, head_state = nnx.split(skeleton.head, nnx.Param)
    split = [nnx.split(block, nnx.Param) for block in skeleton.blocks]
    block_def, block_state = split[0]
    if any(other[0] != block_def for other in split):
        raise ValueError("model: blocks must be uniform (same module, same options), they are stacked and scanned over")
    block_specs = map_specs(lambda spec: P("pipe", *spec), specs_of(block_state))

    def embedding(params: PyTree | None) -> Any:
        return None if params is None else nnx.merge(embed_def, params)

    return ModelDef(
        init=init,
        specs={"embed": specs_of(embed_state), "blocks": block_specs, "head": specs_of(head_state)},
        shapes=jax.eval_shape(init, jax.random.key(0)),
        embed=lambda params, batch, keys_B: nnx.merge(embed_def, params)(batch, keys_B),
        block=lambda params, h, keys_B: nnx.merge(block_def, params)(h, keys_B),
        head=lambda params, embed, h, batch: nnx.merge(head_def, params)(h, batch, embedding(embed)),
        logits=lambda params, embed, h: nnx.merge(head_def, params).logits(h, embedding(embed)),
        layers=len(split),
        tied=tied,
        columns=columns,
        fp8=_any_layer(skeleton, "fp8"),
        collective_matmul=_any_layer(skeleton, "collective_matmul"),
        scan_blocks=scan_blocks,
    )
