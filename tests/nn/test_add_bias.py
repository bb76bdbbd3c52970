"""`add_bias`: sums in fp32, and the order in memory of what has learned positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.nn import add_bias


@pytest.mark.parametrize(
    ("shapes", "fixed"),
    [
        (((4, 6, 8), (6, 8)), True),  # learned positions
        (((4, 6, 8), (8,)), False),
        (((4, 6, 2, 3, 8), (2, 3, 8)), False),  # of queries, keys and values
        (((4, 8), (8,)), False),
        (((4,), ()), False),
    ],
)
def test_only_what_is_summed_over_samples_alone_has_a_fixed_order(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], fixed: bool
) -> None:
    y, bias = (jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.bfloat16) for shape in shapes)
    gradient = jax.grad(lambda y, bias: (add_bias(y, bias).astype(jnp.float32) ** 2).sum(), argnums=(0, 1))
    traced = str(jax.make_jaxpr(gradient)(y, bias))
    assert traced.count("layout_constraint") == 2 * fixed  # and of its gradient, which the sum reads
    total = y.astype(jnp.float32) + bias.astype(jnp.float32)
    np.testing.assert_array_equal(add_bias(y, bias), total.astype(jnp.bfloat16))
    of_y, of_bias = gradient(y, bias)
    np.testing.assert_allclose(of_y.astype(jnp.float32), 2 * total, rtol=2e-2, atol=1e-2)
    summed = (2 * total).sum(axis=tuple(range(y.ndim - bias.ndim)))
    np.testing.assert_allclose(of_bias.astype(jnp.float32), summed, rtol=3e-2, atol=0.3)
