"""What a function computes of constants and integers alone is in float64; gradients and lines are as they were."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from levels import levels

from jaxdist.jaxpr.source import line_of_user
from jaxdist.jaxpr.walk import every_equation
from jaxdist.plan.verify.subject import narrowing
from jaxdist.precision.widen import widen_fixed

RNG = np.random.default_rng(0)
NARROW = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in {"t": (5, 8), "w": (3, 8, 8)}.items()}
IDS = np.array([[0, 4, 2], [3, 3, 1]])
FROZEN = {
    "products": lambda c, ids: jnp.tanh(c["t"][ids].mean(1) @ c["w"][0]),
    "a rule of its own": lambda c, ids: jax.nn.relu(c["t"][ids].sum(1) @ c["w"][0]),
    "loop": lambda c, ids: lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), c["t"][ids[:, 0]], c["w"])[0],
    "while": lambda c, ids: lax.while_loop(
        lambda h: h.max() < 99, lambda h: 2 * h @ c["w"][0], jnp.abs(c["t"][ids[0, :2]])
    ),
    "branch": lambda c, ids: lax.cond(ids[0, 0] > 1, lambda x: x, lambda x: jnp.sin(x) @ c["w"][1], c["t"][ids[:, 1]]),
    "draws": lambda c, ids: jax.random.uniform(jax.random.key(0), (2, 8), jnp.float32) * c["t"][ids[:, 0]],
    "spectrum": lambda c, ids: jnp.fft.fft(c["t"]).real[ids[:, 0]],
    "jit": lambda c, ids: jax.jit(lambda ids: jnp.exp(c["t"][ids[:, 0]]) @ c["w"][2])(ids),
    "masks": lambda c, ids: ((ids[:, :1] > 2).astype(c["t"].dtype) / 3) * jnp.ones((2, 8), c["t"].dtype),
    "numbers chosen by floats": lambda c, ids: c["t"][jnp.argmax(c["x"], -1)] @ c["w"][0],
}


def loss_of(name: str, dtype: Any) -> Any:
    """A loss that multiplies what is frozen by its parameters, with constants of a dtype."""
    constants = {key: jnp.asarray(value, dtype) for key, value in NARROW.items()}
    return lambda p, ids: ((FROZEN[name](constants | {"x": p}, ids) @ p.T) ** 2).sum()


@pytest.mark.parametrize("name", levels(FROZEN, everyday=4))
def test_it_is_the_function_with_constants_of_float64(name: str) -> None:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        p, ids = jnp.asarray(RNG.normal(size=(2, 8))), jnp.asarray(IDS)
        narrow = loss_of(name, jnp.float32)
        assert narrowing(jax.make_jaxpr(narrow)(p, ids))[0] == 4
        jaxpr = jax.make_jaxpr(widen_fixed(narrow))(p, ids)
        assert narrowing(jaxpr)[0] == 8
        got, want, rounded = (
            jax.device_get(jax.jit(jax.value_and_grad(loss))(p, ids))
            for loss in (widen_fixed(narrow), loss_of(name, jnp.float64), narrow)
        )
        np.testing.assert_allclose(got[0], want[0], rtol=1e-13)
        np.testing.assert_allclose(got[1], want[1], rtol=1e-11)
        assert abs(rounded[0] - want[0]) > 1e-11 * abs(want[0])


def test_lines_of_the_user_and_what_floating_arguments_reach_are_kept() -> None:
    @jax.custom_jvp
    def doubled(x: jax.Array) -> jax.Array:
        return x

    doubled.defjvp(lambda x, t: (x[0], 2 * t[0]))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        table, p, ids = jnp.asarray(NARROW["t"]), jnp.ones(8), jnp.asarray(IDS)

        def loss(p: jax.Array, ids: jax.Array) -> jax.Array:
            h = jnp.take(table, ids[:, 0], axis=0)
            return (doubled(p.astype(jnp.float32)) * (h * table[ids[0, :2]]).sum(0)).sum()

        wide = widen_fixed(loss)
        size, lines = narrowing(jax.make_jaxpr(wide)(p, ids))
        first = loss.__code__.co_firstlineno
        assert size == 4 and set(lines) == {f"test_widen.py:{first + 2}"}
        np.testing.assert_allclose(jax.grad(wide)(p, ids), jax.grad(loss)(p, ids), rtol=1e-5)
        lines_of = [
            {line_of_user(site.equation) for site in every_equation(jax.make_jaxpr(each)(p, ids))}
            for each in (wide, loss)
        ]
        assert lines_of[0] == lines_of[1]
