"""Arithmetic that rounds the same way in every layout.

A compiler fuses a product with a sum, which then round once together. Whether it does, and of a * b + c * d which
product, depends on the shape of the loop, hence of the shard. So products are kept apart from sums here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

PRODUCTS = {"mul", "div", "square", "integer_pow", "pow"}  # a quotient by a constant becomes a product

# erf_inv(x) = x p(w), w = -log((1 - x)(1 + x)): Giles 2010, "Approximating the erfinv function", table 1.
NEAR = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
        0.246640727, 1.50140941)  # fmt: skip  # of w - 2.5, for w < 5
FAR = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
       1.00167406, 2.83297682)  # fmt: skip  # of sqrt(w) - 3


def rounded(x: jax.Array) -> jax.Array:
    """x itself: max(x, min(x, 0)), which no compiler sees through. A rounded product is no product any more.

    (An optimization_barrier does not do on jax 0.10, whose CPU compiler drops it before it fuses.)
    """
    return jnp.maximum(x, jnp.minimum(x, jnp.zeros_like(x)))


def erf_inv(x: jax.Array) -> jax.Array:
    """The inverse error function, computed in fp32: equal to `jax.lax.erf_inv` but for the last bits.

    On CPUs, that of jax 0.12 rounds differently if the last dim is below 8.
    """
    wide = x.astype(jnp.float32)
    w = -jnp.log(rounded((1 - wide) * (1 + wide)))
    near = w < 5
    z = jnp.where(near, w - 2.5, jnp.sqrt(w) - 3)
    p = jnp.zeros_like(z)
    for one, other in zip(NEAR, FAR, strict=True):
        p = jnp.where(near, jnp.float32(one), jnp.float32(other)) + rounded(p * z)
    return jnp.where(jnp.abs(wide) == 1, wide * jnp.inf, p * wide).astype(x.dtype)


def products_rounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with every product rounded before anything is added to it.

    Its results are then the same bits for shards of any shape. Loops and conditions in it stay as they are.
    """
    from jaxdist.jaxpr import evaluate  # only deterministic steps come here

    def rounding(equation: Any, operands: Sequence[Any]) -> list[Any]:
        name = equation.primitive.name
        if name == "erf_inv" and jnp.finfo(equation.invars[0].aval.dtype).bits <= 32:
            with evaluate.where_written(equation), equation.ctx.manager:
                return [erf_inv(jnp.asarray(operands[0], equation.invars[0].aval.dtype))]
        results = evaluate.bind(equation, operands)
        if name in PRODUCTS:
            results = [rounded(x) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in results]
        return results

    def apart(*arguments: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = evaluate.evaluate(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(arguments), rounding)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return apart
