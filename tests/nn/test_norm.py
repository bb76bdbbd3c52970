"""`jaxdist.nn.norm`: layer norm and RMS norm, beside jax's own gradient of their formulas."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import make_mesh
from jaxdist.nn.norm.normalize import normalize

KINDS = {"layer": (True, True), "layer, no bias": (True, False), "rms": (False, False)}  # centred, bias
kinds = pytest.mark.parametrize(("centred", "bias"), KINDS.values(), ids=KINDS.keys())
Norm = Callable[..., jax.Array]


def formula(x: jax.Array, scale: jax.Array, bias: Any, *, centred: bool, eps: float) -> jax.Array:
    wide = x.astype(scale.dtype)
    wide = wide - wide.mean(-1, keepdims=True) if centred else wide
    y = wide / jnp.sqrt((wide**2).mean(-1, keepdims=True) + eps) * scale
    return (y if bias is None else y + bias).astype(x.dtype)


def inputs(bias: bool, *, width: int = 512, dtype: Any = np.float64) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    x, scale, shift = rng.normal(size=(4, 8, width)), rng.normal(size=width) + 1, rng.normal(size=width)
    wide = np.float64 if dtype == np.float64 else np.float32
    return jnp.asarray(x * 3 + 1, dtype), jnp.asarray(scale, wide), jnp.asarray(shift, wide) if bias else None


def results(norm: Norm, split: Any, given: tuple[Any, ...], **options: Any) -> list[np.ndarray]:
    """The result and all gradients, on a mesh of data=2 and tensor=4."""

    def loss(x: jax.Array, *parameters: Any) -> Any:
        y = jnp.sin(norm(x, *parameters, **options))
        return jax.lax.psum(y.sum(), tuple(jax.typeof(y).manual_axis_type.varying))

    specs = (split, P(), P())
    both = jax.shard_map(
        lambda *given: (norm(*given, **options), *jax.grad(loss, argnums=(0, 1, 2))(*given)),
        mesh=make_mesh(data=2, tensor=4),
        in_specs=specs,
        out_specs=(split, *specs),
        check_vma=True,
    )
    return [np.asarray(each) for each in jax.tree.leaves(jax.jit(both)(*given))]


@kinds
@pytest.mark.parametrize("split", [P("data"), P("data", "tensor"), P()], ids=str)
def test_gradients_are_those_of_the_formula_in_any_layout(centred: bool, bias: bool, split: Any) -> None:
    with jax.enable_x64(True):
        given = inputs(bias)
        got, want = (results(each, split, given, centred=centred, eps=1e-2) for each in (normalize, formula))
    assert len(got) == 3 + bias
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)


@kinds
def test_bf16_is_rounded_once(centred: bool, bias: bool) -> None:
    options = {"centred": centred, "eps": 1e-5}
    x, *parameters = inputs(bias, width=512, dtype=jnp.bfloat16)
    weights = jax.random.normal(jax.random.key(0), x.shape)

    def gradients(norm: Norm, x: jax.Array) -> Any:
        total = lambda *given: (norm(*given, **options) * weights.astype(x.dtype)).astype(jnp.float32).sum()  # noqa: E731
        return jax.tree.leaves(jax.grad(total, argnums=(0, 1, 2))(x, *parameters))

    for got, want in zip(gradients(normalize, x), gradients(formula, x.astype(jnp.float32)), strict=True):
        assert np.linalg.norm(got.astype(np.float32) - want) < 3e-3 * np.linalg.norm(want)  # 1.7e-3: bf16's rounding


@kinds
def test_the_input_is_all_that_is_kept(centred: bool, bias: bool) -> None:
    """And two numbers a position."""
    x, *parameters = inputs(bias, width=512, dtype=jnp.bfloat16)
    norm = lambda *given: normalize(*given, centred=centred, eps=1e-5)  # noqa: E731
    kept = jax.tree.leaves(jax.vjp(norm, x, *parameters)[1])
    assert sum(each.nbytes for each in kept if each.size >= x.size) == x.nbytes
    assert sum(each.size for each in kept if each.size < x.size) <= (1 + centred) * 32 + 512 + 1


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    """As it would if the variance were the mean of squares less the square of the mean."""
    x, scale, bias = inputs(True, dtype=np.float32)
    far = normalize(x + 2.0**12, scale, bias, centred=True, eps=1e-5)
    np.testing.assert_allclose(far, normalize(x, scale, bias, centred=True, eps=1e-5), atol=2e-3)


def test_second_derivatives() -> None:
    with jax.enable_x64(True):
        x, scale, bias = inputs(True)
        second = [
            jax.hessian(lambda x, norm=norm: jnp.sin(norm(x, scale, bias, centred=True, eps=1e-2)).sum())(x[0, 0])
            for norm in (normalize, formula)
        ]
    np.testing.assert_allclose(*second, rtol=1e-10, atol=1e-10)


@kinds
def test_parameters_may_vary_over_other_axes_than_the_input(centred: bool, bias: bool) -> None:
    def gradients(*given: Any) -> Any:
        total = lambda *given: jax.lax.psum(  # noqa: E731
            jnp.sin(normalize(*given, centred=centred, eps=1e-2)).sum(), ("data", "tensor") if bias else "data"
        )
        return jax.grad(total, argnums=(0, 1, 2))(*given)

    with jax.enable_x64(True):
        x, scale, shift = inputs(bias)
        specs = P("data"), P(), P("tensor")
        region = jax.shard_map(gradients, mesh=make_mesh(data=2, tensor=4), in_specs=specs, out_specs=specs)
        got = jax.jit(region)(x, scale, None if shift is None else jnp.tile(shift, 4))
        copies = 4 if bias else 1
        want = jax.grad(lambda x: copies * jnp.sin(formula(x, scale, shift, centred=centred, eps=1e-2)).sum())(x)
    np.testing.assert_allclose(got[0], want, rtol=1e-11, atol=1e-11)
