"""A GPT that can be made to go wrong at a chosen place, without compiling again: poison is a parameter."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import rank
from jaxdist.config.schema import ModelConfig
from jaxdist.mesh import AXES, BATCH_LIKE
from jaxdist.models.gpt import gpt
from jaxdist.nn import ModelDef
from jaxdist.specs import STACKED

PyTree = Any
NONE, OUTPUT, GRADIENT = 0, 1, 2  # what is made infinite: the unit's output, or the gradient of one of its parameters
LEAF = {"embed": ("tokens", "table"), STACKED: ("mlp", "up", "kernel"), "head": ("norm", "scale")}


@jax.custom_vjp
def _spoil(x: jax.Array, bad: jax.Array) -> jax.Array:
    return x


def _forward(x: jax.Array, bad: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, bad


def _backward(bad: jax.Array, grad: jax.Array) -> tuple[jax.Array, None]:
    first = jnp.arange(grad.size).reshape(grad.shape) == 0
    return jnp.where(bad & first, jnp.full((), jnp.inf, grad.dtype), grad), None


_spoil.defvjp(_forward, _backward)


def _gets(poison: jax.Array, kind: int, axes: tuple[str, ...]) -> jax.Array:
    """Whether this device is the one. poison: [kind, device, counted over all axes of the mesh]."""
    size = jax.lax.axis_size("tensor")
    here, there = rank(AXES), poison[1].astype(jnp.int32)
    mine = here == there if "tensor" in axes else rank(BATCH_LIKE) == there // size
    return (poison[0] == kind) & mine


def _spoiled(unit: str, params: PyTree) -> PyTree:
    """The unit's own parameters, one of them with an infinite gradient if the poison says so."""
    own = {name: leaf for name, leaf in params.items() if name != "poison"}
    first, *rest = LEAF[unit]
    if first not in own:
        return own
    leaf, axes = own[first], AXES if unit == STACKED else BATCH_LIKE  # a whole leaf has one gradient for all of tensor

    def put(tree: PyTree, path: list[str]) -> PyTree:
        if not path:
            return _spoil(tree, _gets(params["poison"], GRADIENT, axes))
        return {**tree, path[0]: put(tree[path[0]], path[1:])}

    return {**own, first: put(leaf, rest)}


def _infinite(x: jax.Array, poison: jax.Array) -> jax.Array:
    return jnp.where(_gets(poison, OUTPUT, BATCH_LIKE), jnp.full((), jnp.inf, x.dtype), x)


def poisoned(config: ModelConfig, *, max_length: int, param_dtype: Any = jnp.float32) -> ModelDef:
    """The model, with a leaf [kind, device] of poison in each unit."""
    model = gpt(config, max_length=max_length, param_dtype=param_dtype)
    shapes, specs = dict(model.shapes), dict(model.specs)
    for name, unit in model.shapes.items():
        rows = (model.layers,) if name == STACKED else ()
        shapes[name] = {**unit, "poison": jax.ShapeDtypeStruct((*rows, 2), param_dtype)}
        specs[name] = {**model.specs[name], "poison": P("pipe") if name == STACKED else P()}

    def init(key: jax.Array) -> PyTree:
        params = model.init(key)
        return {
            name: {**unit, "poison": jnp.zeros(shapes[name]["poison"].shape, param_dtype)}
            for name, unit in params.items()
        }

    def embed(params: PyTree, batch: PyTree, keys: jax.Array) -> jax.Array:
        return _infinite(model.embed(_spoiled("embed", params), batch, keys), params["poison"])

    def block(params: PyTree, h: jax.Array, keys: jax.Array, rows: PyTree) -> jax.Array:
        return _infinite(model.block(_spoiled(STACKED, params), h, keys, rows), params["poison"])

    def head(params: PyTree, tied: PyTree | None, h: jax.Array, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        table = None if tied is None else {name: leaf for name, leaf in tied.items() if name != "poison"}
        loss, weight = model.head(_spoiled("head", params), table, h, batch)
        return _infinite(loss, params["poison"]), weight

    return model._replace(init=init, shapes=shapes, specs=specs, embed=embed, block=block, head=head)
