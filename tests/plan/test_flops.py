"""FLOPs counted in jaxprs, against closed forms."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.plan.traced.flops import flops_of


def flops(function: Any, *shapes: tuple[int, ...]) -> float:
    return flops_of(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)))


def test_products() -> None:
    assert flops(lambda a, b: a @ b, (3, 5), (5, 7)) == 2 * 3 * 5 * 7
    assert flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (4, 3, 5), (4, 5, 7)) == 4 * 2 * 3 * 5 * 7
    assert flops(lambda a, b: a + b, (3, 5), (3, 5)) == 0


def test_convolution() -> None:
    window = lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "VALID")  # noqa: E731
    assert flops(window, (2, 3, 8, 8), (5, 3, 3, 3)) == 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3)


def test_loops_calls_and_conditions() -> None:
    def loop(x: Any, w: Any) -> Any:
        return lax.scan(lambda x, _: (jax.jit(jnp.matmul)(x, w), None), x, length=6)[0]

    def branches(x: Any, w: Any) -> Any:
        return lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)

    once = 2 * 3 * 5 * 5
    assert flops(loop, (3, 5), (5, 5)) == 6 * once
    assert flops(branches, (3, 5), (5, 5)) == 2 * once


def test_rematerialisation_computes_again() -> None:
    def loss(x: Any, w: Any) -> Any:
        return jnp.sin(jnp.sin(x @ w) @ w).sum()

    once = 2 * 3 * 5 * 5
    assert flops(jax.grad(loss, argnums=(0, 1)), (3, 5), (5, 5)) == 6 * once
    assert flops(jax.grad(jax.checkpoint(loss), argnums=(0, 1)), (3, 5), (5, 5)) == 8 * once
