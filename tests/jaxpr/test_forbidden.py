"""Which programs must be differentiated to see what their derivative holds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from jaxdist.jaxpr.forbidden import has_rules


def ruled(x: jax.Array) -> jax.Array:
    own = jax.custom_vjp(lambda x: x)
    own.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "data"),))
    return own(x)


def of_ones_own(x: Any) -> Any:
    own = Primitive("add")  # the name of one of jax's
    own.def_abstract_eval(lambda aval: aval)
    ad.deflinear2(own, lambda g, x: [lax.psum(g, "data")])
    return own.bind(x)


def attention(x: jax.Array) -> jax.Array:
    qkv = jnp.split(jnp.concatenate([x, x, x], -1).reshape(1, 4, 3, 4), 3, axis=2)
    return jax.nn.dot_product_attention(*qkv, is_causal=True)


CASES: dict[str, tuple[Callable[..., Any], bool]] = {
    "a layer": (lambda x: nnx.gelu(x @ x.T + jax.random.normal(jax.random.key(0), (4, 4))), False),
    "attention": (attention, False),
    "loops": (lambda x: lax.scan(lambda h, _: (jax.checkpoint(jnp.tanh)(h), None), x, length=2)[0], False),  # type: ignore[attr-defined]
    "a custom_vjp": (ruled, True),
    "one in loops": (lambda x: lax.scan(lambda h, _: (jax.jit(ruled)(h), None), x, length=2)[0], True),
    "a custom_jvp": (nnx.relu, True),
    "a linear solve": (lambda x: lax.custom_linear_solve(lambda v: 2 * v, x, lambda _, b: b / 2, symmetric=True), True),
    "a primitive of one's own": (of_ones_own, True),
}


@pytest.mark.parametrize("name", CASES)
def test_what_has_rules_of_its_own(name: str) -> None:
    function, found = CASES[name]
    assert has_rules(jax.make_jaxpr(function)(jnp.ones((4, 4)))) == found
