"""Model definitions: `model_def` turns an `nnx.Module` into pure functions on trees. The rest is plain JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxdist.model import ModelDef
from jaxdist.nn.param import specs_of
from jaxdist.specs import PyTree, map_specs


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

    >>> class Model(nnx.Module):  # its layers stand for embed, blocks and head as above
    ...     def __init__(self, rngs):
    ...         self.embed, *blocks, self.head = (nnx.Linear(8, 8, rngs=rngs) for _ in range(6))
    ...         self.blocks = nnx.List(blocks)
    >>> assert jaxdist.model_def(Model, tied=False).layers == 4
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
