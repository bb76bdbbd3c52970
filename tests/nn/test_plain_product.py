"""`jaxdist.nn.matmul.plain`: the products of linear layers, and their gradients without a transpose."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import make_mesh
from jaxdist.nn.matmul.plain import one_core, plain_product
from jaxdist.precision.autocast import autocast

Product = Callable[[jax.Array, jax.Array], jax.Array]


def tensordot(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.tensordot(x, kernel, 1)


def results(product: Product, features: tuple[int, ...], x_split: Any, kernel_split: Any) -> list[np.ndarray]:
    """The product and both gradients, on a mesh of data=2 and tensor=4."""
    rng = np.random.default_rng(0)
    x, kernel = rng.standard_normal((4, 8, 12)), rng.standard_normal((12, *features))

    def loss(x: jax.Array, kernel: jax.Array) -> Any:
        y = product(x, kernel)
        return jax.lax.psum((jnp.sin(y)).sum(), tuple(jax.typeof(y).manual_axis_type.varying))

    both = jax.shard_map(
        lambda *given: (loss(*given), *jax.grad(loss, argnums=(0, 1))(*given)),
        mesh=make_mesh(data=2, tensor=4),
        in_specs=(x_split, kernel_split),
        out_specs=(P(), x_split, kernel_split),
        check_vma=True,
    )
    return [np.asarray(each) for each in jax.jit(both)(x, kernel)]


@pytest.mark.parametrize("features", [(8,), (4, 3), (2, 4)])
@pytest.mark.parametrize("x_split", [P("data"), P("data", "tensor"), P()])
def test_it_is_tensordot_in_any_layout(features: tuple[int, ...], x_split: Any) -> None:
    split = P(None, None, "tensor") if features == (2, 4) else P(None, "tensor") if x_split == P("data") else P()
    with jax.enable_x64(True):
        got, want = (results(each, features, x_split, split) for each in (plain_product, tensordot))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("inputs", "wanted"), [(6, 0), (4, 0), (8, 1)])
def test_only_gradients_of_wide_inputs_are_transposed(inputs: int, wanted: int) -> None:
    """XLA:CPU is faster so. JAX itself transposes each."""

    def transposes(product: Product) -> int:
        loss = lambda x, kernel: jnp.sin(product(x, kernel)).sum()  # noqa: E731
        traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(jnp.ones((2, 4, inputs)), jnp.ones((inputs, 6)))
        return str(traced).count(" transpose[")

    assert transposes(plain_product) == wanted
    assert transposes(tensordot) == 1


@pytest.mark.parametrize(("features", "copied"), [((32,), (12, 8)), ((5,), (5, 8)), ((16,), None)])
def test_one_core_multiplies_a_transposed_copy_of_the_narrower(
    features: tuple[int, ...], copied: tuple[int, ...] | None
) -> None:
    with one_core(True), jax.enable_x64(True):
        got, want = (results(each, features, P("data"), P()) for each in (plain_product, tensordot))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    loss = lambda x, kernel: jnp.sin(plain_product(x, kernel)).sum()  # noqa: E731
    with one_core(True):
        traced = str(jax.make_jaxpr(jax.grad(loss, argnums=1))(jnp.ones((2, 4, 12)), jnp.ones((12, *features))))
    barriers = [line.partition(" = ")[0] for line in traced.splitlines() if "optimization_barrier" in line]
    assert any(f"f32[{copied[0]},{copied[1]}]" in line for line in barriers) if copied else not barriers


@pytest.mark.parametrize("product", [plain_product, tensordot])
def test_both_passes_have_the_precision_of_the_caller(product: Product) -> None:
    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return jnp.sin(product(x, kernel)).sum()

    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(jnp.ones((2, 4, 8)), jnp.ones((8, 6))))
    assert text.count("HIGHEST") >= text.count("dot_general") == 3


@pytest.mark.parametrize("shapes", [((2, 0), (0, 3)), ((0, 4), (4, 3)), ((2, 4), (4, 0)), ((4,), (4, 2, 3))])
def test_sizes_of_any_kind(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    x, kernel = (jnp.arange(float(np.prod(shape))).reshape(shape) for shape in shapes)
    np.testing.assert_array_equal(plain_product(x, kernel), tensordot(x, kernel))


def test_a_wrong_width_is_told_as_by_jax() -> None:
    with pytest.raises(TypeError, match="contracting dimensions"):
        plain_product(jnp.ones((2, 4, 16)), jnp.ones((8, 6)))


def test_forward_mode_is_refused_and_a_hessian_is_not() -> None:
    kernel, x = jnp.ones((3, 2)), jnp.ones((4, 3))
    loss = lambda kernel: jnp.sin(plain_product(x, kernel)).sum()  # noqa: E731
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (kernel,), (kernel,))
    want = jax.hessian(lambda kernel: jnp.sin(x @ kernel).sum())(kernel)
    np.testing.assert_allclose(jax.hessian(loss)(kernel), want, rtol=1e-5)


def test_autocast_multiplies_in_half_precision() -> None:
    text = str(jax.make_jaxpr(autocast(plain_product, "bfloat16"))(jnp.ones((2, 4, 8)), jnp.ones((8, 6))))
    assert "custom_vjp" not in text and "dot_general" in text and "bf16[8,6]" in text
