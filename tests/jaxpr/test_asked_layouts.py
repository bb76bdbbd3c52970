"""A layout that a loss or a layer asks for is one line, which names what asked and where."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist

MESH = jaxdist.make_mesh(data=2)
ROWS = NamedSharding(MESH, P("data"))
FEW = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("one",)), P())
BATCH = {"x": np.ones((6, 4), np.float32)}  # 3 rows on a device, which do not divide by 2
SGD = optax.sgd(0.1)
Ask = Callable[[jax.Array], jax.Array]
TANH = jax.shard_map(
    jnp.tanh, mesh=jaxdist.make_mesh(data=4, devices=jax.devices()[:4]), in_specs=P("data"), out_specs=P("data")
)


def loss_with(ask: Ask) -> Any:
    def loss(params: Any, batch: Any, keys: Any) -> Any:
        return (ask(batch["x"] @ params["w"]) ** 2).sum(), batch["x"].shape[0]

    return loss, {"w": jnp.ones((4, 4))}


class Part(nnx.Module):
    """An embedding, a block, which asks for a layout, and a head."""

    def __init__(self, rngs: nnx.Rngs, call: Callable[..., Any]) -> None:
        self.inner, self.call = nnx.Linear(4, 4, rngs=rngs), call

    def __call__(self, *given: Any) -> Any:
        return self.call(self.inner, *given)


def model_with(ask: Ask) -> Any:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = Part(rngs, lambda inner, batch, keys: inner(batch["x"]))
            self.blocks = nnx.List([Part(rngs, lambda inner, h, keys: ask(inner(h)))])
            self.head = Part(rngs, lambda inner, h, batch, embed: ((inner(h) ** 2).sum(), h.shape[0]))

    model = jaxdist.model_def(Model)
    return model, model


def compile_step(given: tuple[Any, Any]) -> Any:
    model, source = given
    step = jaxdist.make_train_step(model, SGD, MESH)
    return step.lower(jaxdist.state_target(source, SGD, MESH), BATCH)


ASKED: dict[str, Ask] = {
    "with_sharding_constraint": lambda x: jax.lax.with_sharding_constraint(x, ROWS),
    "with_sharding_constraint, in a jit": lambda x: jax.jit(lambda x: jax.lax.with_sharding_constraint(x, ROWS))(x),
    "with_sharding_constraint, by a spec": lambda x: jax.lax.with_sharding_constraint(x, P("data")),
    "device_put": lambda x: jax.device_put(x, ROWS),
    "device_put, by a spec": lambda x: jax.device_put(x, P("data")),
    "device_put, of an array of its own": lambda x: x + jax.device_put(np.ones(4, np.float32), FEW),
    "reshard": lambda x: jax.sharding.reshard(x, ROWS),
    "shard_map": lambda x: jax.shard_map(jnp.tanh, mesh=MESH, in_specs=P("data"), out_specs=P("data"))(x),
    "shard_map, of another mesh, made before": lambda x: TANH(x),
    "out_shardings": lambda x: jax.jit(
        jnp.tanh,
        out_shardings=ROWS,
    )(x),
}  # fmt: skip


@pytest.mark.parametrize("kind", [loss_with, model_with])
@pytest.mark.parametrize("name", ASKED)
def test_a_layout_in_the_manual_region_is_one_line(name: str, kind: Callable[[Ask], Any]) -> None:
    with pytest.raises(jaxdist.UserError) as found:
        compile_step(kind(ASKED[name]))
    text = str(found.value)
    assert text.startswith(f"{name.partition(',')[0]}: in a loss or a layer (test_asked_layouts.py:")
    assert "leave it out: mesh and strategy say" in text and "; jax says: " in text and "\n" not in text


@pytest.mark.parametrize("kind", [loss_with, model_with])
def test_what_asks_for_no_layout_is_taken(kind: Callable[[Ask], Any]) -> None:
    lowered = compile_step(kind(lambda x: jax.device_put(x, jax.memory.Space.Device)))
    assert "sdy.manual_computation" in lowered.as_text() or "shard_map" in lowered.as_text()


def failing(x: jax.Array) -> jax.Array:
    return x.reshape(-1, 5)


def test_another_error_stays_as_it_is() -> None:
    with pytest.raises(TypeError, match="reshape"):
        compile_step(loss_with(failing))


def wrong(x: jax.Array) -> jax.Array:
    raise ValueError("of the user's own, no device_put()")  # nor reshard


def beside(x: jax.Array) -> jax.Array:
    return jax.device_put(jnp.ones(5)) + x


def handed_on(x: jax.Array) -> jax.Array:
    return wrong(jax.device_put(x))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (wrong, "of the user's own"),
        (handed_on, "of the user's own"),
        (lambda x: jax.jit(wrong, in_shardings=None)(x), "of the user's own"),
        (beside, "ncompatible shapes for broadcasting"),
    ],
)
def test_an_error_of_the_users_own_stays_as_it_is(ask: Ask, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as found:
        compile_step(loss_with(ask))
    assert not isinstance(found.value, jaxdist.UserError)
