"""Modules of NNX and Linen, and losses of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.sharding import NamedSharding

import jaxdist
from jaxdist.mesh import abstract_mesh
from jaxdist.specs import batch_spec, spec_axes


class Dropped(nnx.Module):
    """Two dropouts that store their streams, and BatchNorm, which all rows share."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(4, 16, rngs=rngs), nnx.Linear(16, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropouts = nnx.List([nnx.Dropout(0.5, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropouts[1](nnx.relu(self.dropouts[0](self.norm(self.up(x))))))


def squared(model: Any, batch: Any) -> Any:
    out = model(batch)
    return (out**2).sum(), out.shape[0], {"size": (jnp.abs(out).sum(), out.size)}


class OwnNorm(nnx.BatchNorm):
    """A subclass that calls its parent's."""

    def __call__(self, x: jax.Array, *args: Any, **options: Any) -> jax.Array:
        return 2 * super().__call__(x, *args, **options)


class LocalNorm(nnx.Module):
    """A layer of somebody's own, with statistics of the rows at hand."""

    def __init__(self, features: int, rngs: nnx.Rngs) -> None:
        self.mean = nnx.BatchStat(jnp.zeros(features))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean(0)
        return x - x.mean(0)


def with_layer(make: Callable[..., Any]) -> Any:
    return nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), make(4, rngs=nnx.Rngs(1)))


class LinenNet(linen.Module):
    rate: float = 0.5

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = linen.Dropout(self.rate, deterministic=not train)(linen.Dense(4)(x))
        return linen.BatchNorm(use_running_average=not train)(x)


def linen_loss(**options: Any) -> Any:
    module = LinenNet()
    variables = module.init(jax.random.key(0), jnp.ones((1, 4)), train=False)
    return jaxdist.linen_loss(module, variables, squared, **options)


def traced(loss: Any) -> Any:
    """(step, target, batch) to trace, on devices that are not there."""
    mesh, tx = abstract_mesh(data=2), optax.sgd(0.1)
    target, batch = jaxdist.state_target(loss, tx, mesh), jax.ShapeDtypeStruct((8, 4), jnp.float32)
    return jaxdist.make_train_step(loss, tx, mesh), target, batch


nnx_of = lambda layer, **options: jaxdist.nnx_loss(with_layer(layer), squared, **options)  # noqa: E731


def called(loss: Any) -> Any:
    return loss(loss.params, jnp.arange(32.0).reshape(8, 4), None, loss.model_state)


class Masks(linen.Module):
    """A mask for each of four time steps, by the stream of this name."""

    split: Any
    name_of_stream: str = "dropout"

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        class Cell(linen.Module):
            stream: str

            @linen.compact
            def __call__(self, carry: Any, _: Any) -> Any:
                return carry, jax.random.uniform(self.make_rng(self.stream))

        drawn = linen.scan(Cell, split_rngs=dict(self.split), length=4)(self.name_of_stream)(0.0, None)[1]
        return drawn * self.param("w", linen.initializers.ones, ())


def masks(split: Any, name: str = "dropout", seeded: bool = True, **options: Any) -> list[float]:
    module, keys = Masks(tuple(split.items()), name), jax.random.split(jax.random.key(3), 2)
    variables = {"params": {"w": jnp.ones(())}}

    def fn(model: Any, batch: Any) -> Any:
        return jnp.zeros(()), 1.0, {f"{i}": (x, 1.0) for i, x in enumerate(model(batch))}

    loss = jaxdist.linen_loss(module, variables, fn, **options)
    return [float(pair[0]) for pair in loss(loss.params, jnp.zeros((2, 4)), keys if seeded else None)[2].values()]


def trained() -> list[float]:
    """What a module says of a batch in evaluation mode, after three steps under zero3 on four devices."""
    mesh, tx, x = jaxdist.make_mesh(fsdp=4), optax.sgd(0.1), np.random.default_rng(0).normal(size=(8, 4))
    options = {"strategy": "zero3", "min_shard_bytes": 0}
    model = with_layer(nnx.BatchNorm)
    loss = jaxdist.nnx_loss(model, squared)
    state = jaxdist.init_state(loss, tx, mesh, **options)
    step = jaxdist.make_train_step(loss, tx, mesh, **options)
    sharding, rows = NamedSharding(mesh, batch_spec(mesh)), x.astype(np.float32)
    for _ in range(3):
        state, _ = step(state, jax.make_array_from_callback(x.shape, sharding, lambda index: rows[index]))
    assert all("fsdp" in spec_axes(leaf.sharding.spec) for leaf in jax.tree.leaves(state.params))
    model = jaxdist.nnx_update(model, state)
    model.eval()
    return [float(each) for each in np.asarray(model(rows)).ravel()]
