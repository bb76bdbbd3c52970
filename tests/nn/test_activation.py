"""`activation` of `jaxdist.nn.mlp`, beside jax's own gradients, and the gradient of q, k and v together."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from levels import levels

from jaxdist.mesh import make_mesh
from jaxdist.nn.attention.layers import _split
from jaxdist.nn.mlp import NONLINEARITIES, activation

FIRST_PASS = {"gelu": "tanh", "gelu_erf": "erf", "swiglu": "exponential"}  # the costly operation of each
FIRST_PASS_ON_GPUS = {**FIRST_PASS, "gelu": "exponential"}
kinds = pytest.mark.parametrize("kind", NONLINEARITIES)


@pytest.fixture(params=[False, True], ids=["on CPUs", "on GPUs"])
def on_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The form that is traced for GPUs, with shorter sigmoids."""
    monkeypatch.setattr("jaxdist.nn.mlp.traced_for_gpus", lambda: request.param)
    return bool(request.param)


def plain(y: jax.Array, kind: str, bias: Any = None) -> jax.Array:
    y = y if bias is None else y + bias
    gelu = lambda y: jax.nn.gelu(y, approximate=kind == "gelu")  # noqa: E731
    return jax.nn.silu(y[..., 0, :]) * y[..., 1, :] if kind == "swiglu" else gelu(y)


def inputs(kind: str, *, width: int = 8) -> tuple[jax.Array, jax.Array]:
    rng, features = np.random.default_rng(0), (2, width) if kind == "swiglu" else (width,)
    return jnp.asarray(2 * rng.normal(size=(4, 6, *features))), jnp.asarray(rng.normal(size=features))


@kinds
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("tensor", [None, "tensor"])
def test_gradients_are_jaxs_own_in_any_layout(kind: str, biased: bool, tensor: str | None, on_gpus: bool) -> None:
    dims = (None, tensor) if kind == "swiglu" else (tensor,)
    specs = P("data", None, *dims), P(*dims)

    def results(function: Any) -> list[np.ndarray]:
        def loss(y: jax.Array, bias: jax.Array) -> Any:
            out = jnp.sin(function(y, kind, bias if biased else None))
            return jax.lax.psum(out.sum(), tuple(jax.typeof(out).manual_axis_type.varying))

        mesh = make_mesh(data=2, tensor=4)
        gradients = jax.grad(loss, argnums=(0, 1))
        both = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=function is activation)
        return [np.asarray(each) for each in jax.jit(both)(*inputs(kind))]

    with jax.enable_x64(True):
        got = results(activation)
        y, bias = inputs(kind)
        want = jax.grad(lambda y, bias: jnp.sin(plain(y, kind, bias if biased else None)).sum(), argnums=(0, 1))(
            y, bias
        )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)


@kinds
def test_bf16_is_rounded_once(kind: str, on_gpus: bool) -> None:
    y, bias = (each.astype(jnp.bfloat16) for each in inputs(kind, width=512))
    out, pull = jax.vjp(lambda *given: activation(given[0], kind, given[1]), y, bias)
    dout = jax.random.normal(jax.random.key(0), out.shape, jnp.bfloat16)
    wide = [each.astype(jnp.float32) for each in (y, bias, dout)]
    want, plain_pull = jax.vjp(lambda *given: plain(given[0], kind, given[1]), *wide[:2])
    for one, other in zip((out, *pull(dout)), (want, *plain_pull(wide[2])), strict=True):
        assert np.linalg.norm(one.astype(np.float32) - other) < 2.5e-3 * np.linalg.norm(other)


@kinds
def test_nothing_but_the_product_is_kept(kind: str, on_gpus: bool) -> None:
    """And the compiler computes the rest a second time, where both passes are one program."""
    y, bias = inputs(kind)
    narrow = y.astype(jnp.bfloat16)
    kept = jax.tree.leaves(jax.vjp(lambda *given: activation(given[0], kind, given[1]), narrow, bias)[1])
    assert sum(each.nbytes for each in kept) == narrow.nbytes + bias.nbytes

    def times(function: Any) -> int:
        both = jax.jit(jax.value_and_grad(lambda y: (function(y, kind, bias) ** 2).sum()))
        text = both.lower(y).compile().as_text()
        return text.count(f" {(FIRST_PASS_ON_GPUS if on_gpus else FIRST_PASS)[kind]}(")

    assert times(activation) == 2 * times(lambda y, kind, bias: NONLINEARITIES[kind](y + bias)) > 0


@kinds
def test_second_derivatives(kind: str, on_gpus: bool) -> None:
    with jax.enable_x64(True):
        y, bias = inputs(kind)
        second = [
            jax.hessian(lambda y, function=function: function(y, kind, bias).sum())(y[0, 0])
            for function in (activation, plain)
        ]
    np.testing.assert_allclose(*second, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
def test_extreme_values(dtype: Any, on_gpus: bool) -> None:
    """Far from zero GELU is 0 or its argument, and its slope 0 or 1; near it, jax's own."""
    with jax.enable_x64(True):
        far = jnp.asarray([-1e4, -300, -30, 30, 300, 1e4], dtype)
        value = activation(far, "gelu")
        assert value.dtype == dtype
        np.testing.assert_array_equal(value, jnp.where(far > 0, far, 0))
        slope = jax.grad(lambda y: activation(y, "gelu").sum())(far)
        np.testing.assert_array_equal(slope, jnp.where(far > 0, 1, 0).astype(dtype))
        near = jnp.linspace(-6, 6, 401).astype(dtype)
        want = plain(near.astype(jnp.float64), "gelu")
        error = 2 * max(float(jnp.finfo(dtype).eps), 1e-15)
        np.testing.assert_allclose(activation(near, "gelu").astype(jnp.float64), want, rtol=error, atol=4 * error)


def test_a_bias_may_vary_over_other_axes_than_the_product() -> None:
    def gradients(y: jax.Array, bias: jax.Array) -> Any:
        total = lambda *given: jax.lax.psum(activation(given[0], "gelu", given[1]).sum(), ("data", "tensor"))  # noqa: E731
        return jax.grad(total, argnums=(0, 1))(y, bias)

    y, bias = inputs("gelu")
    specs, mesh = (P("data"), P("tensor")), make_mesh(data=2, tensor=4)
    got = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs))(y, jnp.tile(bias, 4))
    want = jax.grad(lambda y: 4 * plain(y, "gelu", bias).sum())(y)
    np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-4)


def test_the_split_has_a_hessian() -> None:
    loss = lambda qkv: sum((part**3).sum() for part in _split(qkv))  # noqa: E731
    qkv = jax.random.normal(jax.random.key(0), (1, 1, 1, 3, 2))
    np.testing.assert_allclose(jax.hessian(loss)(qkv).reshape(6, 6), np.diag(6 * qkv.reshape(6)), rtol=1e-5)


@pytest.mark.parametrize(("dtype", "width"), levels(itertools.product((jnp.float32, jnp.bfloat16), (4, 3)), everyday=3))
def test_queries_keys_and_values_have_the_gradients_of_slices(dtype: Any, width: int) -> None:
    """The second one too."""
    qkv = jax.random.normal(jax.random.key(0), (2, 3, 2, 5, width), dtype)
    slices = lambda qkv: (qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :])  # noqa: E731
    weights = slices(jax.random.normal(jax.random.key(1), qkv.shape, dtype))

    def gradients(split: Any) -> Any:
        def loss(qkv: jax.Array) -> jax.Array:
            return sum((part**3 * weight).sum() for part, weight in zip(split(qkv), weights, strict=True))

        first = jax.grad(loss)
        return split(qkv), first(qkv), jax.grad(lambda qkv: (first(qkv) ** 2).sum())(qkv)

    for one, other in zip(*map(jax.tree.leaves, (gradients(_split), gradients(slices))), strict=True):
        assert np.any(one)
        np.testing.assert_array_equal(one, other)
