"""Embeddings, blocks and heads of somebody else, as a step runs them: dtypes of sums, and what is refused."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist.errors import UserError
from jaxdist.mesh import make_mesh
from jaxdist.nn import model_def

ROWS, LENGTH, CLASSES = 4, 64, 5


class Up(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(4, 8, rngs=rngs)

    def __call__(self, batch: Any, keys: Any) -> jax.Array:
        kernel = self.up.kernel[...]
        return batch["x"].astype(kernel.dtype) @ kernel


class Middle(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, h: jax.Array, keys: Any) -> Any:
        return h + jnp.tanh(h @ self.w.kernel[...])


class Sums(nnx.Module):
    """A head that returns its sums as they are: of the logits' dtype, and a count that is an int."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, h: jax.Array, batch: Any, embed: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(h @ self.out.kernel[...], batch["y"])
        return losses.sum(), losses.size


class Own(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, block: Any = Middle) -> None:
        self.embed, self.head = Up(rngs), Sums(rngs)
        self.blocks = nnx.List([block(rngs) for _ in range(2)])


def batch_of(rows: int, length: int = LENGTH) -> dict[str, Any]:
    drawn = np.random.default_rng(0)
    return {
        "x": drawn.normal(size=(rows, length, 4)).astype(np.float32),
        "y": drawn.integers(0, CLASSES, (rows, length)).astype(np.int32),
    }


def first_step(build: Any, batch: Any, *, mesh: dict[str, int], **options: Any) -> dict[str, Any]:
    """The metrics of a step."""
    model, placed, tx = model_def(build), make_mesh(**mesh, devices=jax.devices()[: mesh["data"]]), optax.sgd(0.1)
    state = jaxdist.init_state(model, tx, placed, precision=options.get("precision", "fp32"))
    return jax.device_get(jaxdist.make_train_step(model, tx, placed, **options)(state, batch)[1])


class Pair(Middle):
    def __call__(self, h: jax.Array, keys: Any) -> Any:
        return super().__call__(h, keys), None


class OfPairs(Own):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs, Pair)


def test_a_block_that_returns_a_tuple_is_one_line() -> None:
    said = r"^block: makes \('float32\[4,64,8\]', None\) of float32\[4,64,8\]; allowed: the same shape and dtype"
    with pytest.raises(UserError, match=said):
        first_step(OfPairs, batch_of(ROWS), mesh={"data": 1})


def scanned(x: jax.Array) -> jax.Array:
    def step(carry: jax.Array, each: jax.Array) -> tuple[jax.Array, jax.Array]:
        return carry + each, carry

    return jax.lax.scan(step, jnp.zeros(x[:, 0].shape), x.swapaxes(0, 1))[1].swapaxes(0, 1)


CONSTANTS = {
    "a loop": scanned,
    "a branch": lambda x: jax.lax.cond(x.sum() > 0, lambda: jnp.tanh(x), lambda: jnp.zeros(x.shape)),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_where_devices_differ_is_one_line(name: str) -> None:
    """On one device it runs."""

    class Block(Middle):
        def __call__(self, h: jax.Array, keys: Any) -> Any:
            return h + CONSTANTS[name](h @ self.w.kernel[...])

    def trace(devices: int) -> None:
        model, tx = model_def(functools.partial(Own, block=Block)), optax.sgd(0.1)
        mesh = make_mesh(data=devices, devices=jax.devices()[:devices])
        step = jaxdist.make_train_step(model, tx, mesh)
        step.trace(jaxdist.state_target(model, tx, mesh), batch_of(ROWS))

    trace(1)
    with pytest.raises(
        UserError, match=r"^model: has a constant \(test_own_units\.py:\d+\) where .*: 0 \* h in"
    ) as raised:
        trace(2)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("batch", [np.ones((4, 8, 4), np.float32), (np.ones((4, 8, 4)), np.ones((4, 8)))])
def test_a_batch_of_a_model_is_a_dict(batch: Any) -> None:
    with pytest.raises(UserError, match="^batch: is no dict; allowed for a ModelDef: a dict of arrays"):
        first_step(Own, batch, mesh={"data": 1})


@pytest.mark.parametrize(("precision", "rows"), [("fp16", 4), ("bf16", 36)])
def test_the_sums_of_a_head_are_counted_in_float32(precision: str, rows: int) -> None:
    """fp16 made the weight, times the loss scale, infinite, and every gradient 0; bf16 rounded the weight."""
    with jax.numpy_dtype_promotion("standard"):  # as the losses of optax need it
        found, want = (
            first_step(Own, batch_of(rows, 115), mesh={"data": 1}, precision=each) for each in (precision, "fp32")
        )
    assert float(found["weight"]) == rows * 115 == float(want["weight"])
    assert float(found["grad_norm"]) == pytest.approx(float(want["grad_norm"]), rel=0.02)
    assert float(found["loss"]) == pytest.approx(float(want["loss"]), rel=0.005)
