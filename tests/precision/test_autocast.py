"""What autocast casts an operation's operands to, by the kind of the operation; what it leaves alone; gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxprs import primitive_counts

from jaxdist.errors import UserError
from jaxdist.jaxpr.walk import every_equation
from jaxdist.mesh import make_mesh
from jaxdist.nn.attention.kernels import attention
from jaxdist.precision.autocast import autocast

F64, F32, F16, BF16 = (np.dtype(jnp.dtype(name)) for name in ("float64", "float32", "float16", "bfloat16"))
A = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
H = A.astype(np.float16)


def dtypes(function: Callable[..., Any], *arguments: Any) -> dict[str, set[tuple[Any, ...]]]:
    """For each primitive, at any depth, the dtypes of its float operands and then of its first result."""
    found: dict[str, set[tuple[Any, ...]]] = {}

    for equation, *_ in every_equation(jax.make_jaxpr(function)(*arguments)):
        kinds = [x.aval.dtype for x in equation.invars if jnp.issubdtype(x.aval.dtype, jnp.floating)]
        found.setdefault(equation.primitive.name, set()).add((*kinds, equation.outvars[0].aval.dtype))
    return found


def cast(function: Callable[..., Any], *arguments: Any, half: Any = "float16") -> dict[str, set[tuple[Any, ...]]]:
    """The same, of the function under autocast, without the casts."""
    return {
        name: kinds
        for name, kinds in dtypes(autocast(function, half), *arguments).items()
        if name != "convert_element_type"
    }


def conv(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x[None, None], w[None, None], (1, 1), "SAME")


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (jnp.matmul, (A, A), {"dot_general": {(F16, F16, F16)}}),
        (conv, (A, A), {"conv_general_dilated": {(F16, F16, F16)}, "broadcast_in_dim": {(F32, F32)}}),
        (jnp.exp, (H,), {"exp": {(F32, F32)}}),
        (lax.rsqrt, (H,), {"rsqrt": {(F32, F32)}}),
        (jnp.sum, (H,), {"reduce_sum": {(F32, F32)}}),
        (lambda x: x * x, (H,), {"mul": {(F32, F32, F32)}}),
        (jnp.tanh, (H,), {"tanh": {(F16, F16)}}),
        (lax.logistic, (A,), {"logistic": {(F32, F32)}}),
        (lambda x, y: lax.add(x, lax.convert_element_type(y, F16)), (H, A), {"add": {(F16, F16, F16)}}),
        # What follows a product, in its type; with a parameter, in the parameter's.
        (lambda x: jnp.tanh(x @ x), (A,), {"dot_general": {(F16, F16, F16)}, "tanh": {(F16, F16)}}),
        (lambda x: x @ x + x, (A,), {"dot_general": {(F16, F16, F16)}, "add": {(F32, F32, F32)}}),
        (lambda x: lax.exp(x @ x), (A,), {"dot_general": {(F16, F16, F16)}, "exp": {(F32, F32)}}),
        # Constants take the type of what they meet, unless float16 cannot hold them.
        (lambda x: (x @ x) * 0.5, (A,), {"dot_general": {(F16, F16, F16)}, "mul": {(F16, F16, F16)}}),
        (lambda x: (x @ x) + 1e6, (A,), {"dot_general": {(F16, F16, F16)}, "add": {(F32, F32, F32)}}),
        (lambda x: (x @ x) + 1e-8, (A,), {"dot_general": {(F16, F16, F16)}, "add": {(F32, F32, F32)}}),
        (
            lambda x: lax.max(x @ x, jnp.zeros((4, 4))),
            (A,),
            {"dot_general": {(F16, F16, F16)}, "broadcast_in_dim": {(F32, F32)}, "max": {(F16, F16, F16)}},
        ),
        (lambda x: (x @ x) * 2, (A,), {"dot_general": {(F16, F16, F16)}, "mul": {(F16, F16, F16)}}),
        # No floats: as they are.
        (lambda x: x @ x, (np.ones((2, 2), np.int32),), {"dot_general": {(np.dtype(np.int32),)}}),
    ],
)
def test_operands_are_cast_by_kind(function: Any, arguments: Any, expected: Any) -> None:
    assert cast(function, *arguments) == expected


def test_float64_stays() -> None:
    with jax.enable_x64(True):
        assert cast(jnp.matmul, A.astype(np.float64), A.astype(np.float64)) == {"dot_general": {(F64, F64, F64)}}


def test_the_half_type_is_given() -> None:
    assert cast(jnp.matmul, A, A, half="bfloat16") == cast(jnp.matmul, A, A, half=jnp.bfloat16)
    assert cast(jnp.matmul, A, A, half="bfloat16") == {"dot_general": {(BF16, BF16, BF16)}}
    for other in ("float32", "fp16", jnp.float32, None):
        with pytest.raises(UserError, match="is not known; allowed: float16, bfloat16"):
            autocast(jnp.matmul, other)


def test_softmax_and_norms_run_in_fp32() -> None:
    def normed(x: jax.Array) -> jax.Array:
        y = x @ x
        y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
        return jax.nn.log_softmax(y @ y)

    found = cast(normed, A)
    assert found.pop("dot_general") == {(F16, F16, F16)}
    for name in ("rsqrt", "reduce_sum", "reduce_max", "exp", "log"):
        assert found.pop(name) == {(F32, F32)}, name
    assert {kinds[-1] for kinds in found.pop("sub")} == {F32}


def test_attention_over_many_keys_stays_in_the_range_of_fp16() -> None:
    q, k, v = (jnp.full((1, 2048, 1, *more, 8), value) for more, value in (((1,), 0.0), ((), 0.0), ((), 40.0)))
    attend = lambda *given: attention(*given, jax.random.key(0), dropout=0.0, causal=False)  # noqa: E731
    np.testing.assert_allclose(autocast(attend, "float16")(q, k, v), 40.0, rtol=1e-3)


def test_results_and_gradients_have_the_dtypes_of_the_function() -> None:
    def model(params: Any, x: jax.Array) -> Any:
        h = jax.nn.relu(x @ params["w"]) + params["b"]
        return {"h": h, "loss": jax.nn.softmax(h @ params["w"]).max(), "none": None, "count": h.size}

    params = {"w": A, "b": A[0].astype(jnp.bfloat16).astype(np.float32)}
    want, got = jax.eval_shape(model, params, A), jax.eval_shape(autocast(model), params, A)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), got) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), want
    )
    loss = lambda function: lambda params: function(params, A)["loss"]  # noqa: E731
    grads, exact = jax.grad(loss(autocast(model)))(params), jax.grad(loss(model))(params)
    for name in params:
        assert grads[name].dtype == np.float32
        difference = np.linalg.norm(grads[name] - exact[name])
        assert 0 < difference < 4 * 2**-11 * np.linalg.norm(exact[name])  # a few roundings of float16
    backward = cast(jax.grad(loss(autocast(model))), params)["dot_general"]
    assert backward == {(F16, F16, F16)}, "the products of the backward pass too"


def test_custom_rules_survive() -> None:
    @jax.custom_vjp
    def doubled(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    doubled.defvjp(lambda x: (jnp.sin(x), None), lambda _, grad: (7 * grad,))
    function = autocast(lambda x: doubled(x @ x).sum())
    assert dtypes(function, A)["custom_vjp_call"] == {(F32, F32)}, "in the types of its rule"
    ones = jnp.ones((4, 4))
    np.testing.assert_allclose(jax.grad(function)(ones), np.full((4, 4), 7 * 8))

    assert np.all(jax.grad(lambda x: autocast(jax.nn.relu)(x).sum())(jnp.zeros(3)) == 0), "relu's own rule at zero"
    relu = dtypes(autocast(lambda x: jnp.tanh(jax.nn.relu(x @ x))), A)
    assert relu["tanh"] == {(F16, F16)}, "as wide as what it was given"
    softplus = dtypes(autocast(lambda x: jnp.tanh(jax.nn.softplus(x @ x))), A)
    assert softplus["tanh"] == {(F32, F32)}, "exponentials inside"


def test_loops_and_conditions_are_entered() -> None:
    def steps(x: jax.Array) -> jax.Array:
        x, rows = lax.scan(lambda x, row: (x @ x, row + x[0]), x, x)
        x = lax.cond(x.sum() > 0, lambda x: x @ x, lambda x: -x, x + rows)
        return lax.while_loop(lambda x: x.sum() > 0.1, lambda x: 0.5 * (x @ x), x)

    found, start = dtypes(autocast(steps), A), np.eye(4, dtype=np.float32) / 2
    assert found["dot_general"] == {(F16, F16, F16)} and found["scan"] == {(F32, F32, F32)}
    assert primitive_counts(jax.make_jaxpr(autocast(steps))(A))["dot_general"] == 4 + 1 + 1
    np.testing.assert_allclose(autocast(steps)(start), steps(start), rtol=4 * 2**-11)
    looped = lambda x: lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, None, length=3)[0].sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(autocast(looped))(A), jax.grad(looped)(A), atol=0.02)


def test_rematerialisation_stays() -> None:
    """In the function, around it, and with a policy: what is computed again is the same."""
    inside = lambda x: jax.checkpoint(lambda x: jnp.exp(jnp.tanh(x @ x)))(x).sum()  # noqa: E731
    policy = jax.checkpoint_policies.dots_saveable
    plain = lambda x: jnp.exp(jnp.tanh(x @ x)).sum()  # noqa: E731
    grads = [
        jax.grad(f)(A)
        for f in (
            autocast(plain),
            autocast(inside),
            jax.checkpoint(autocast(plain)),
            jax.checkpoint(autocast(plain), policy=policy),
        )
    ]
    for each in grads[1:]:
        np.testing.assert_array_equal(each, grads[0])
    counts = [
        primitive_counts(jax.make_jaxpr(jax.grad(f))(A))["dot_general"]
        for f in (autocast(plain), autocast(inside), jax.checkpoint(autocast(plain), policy=policy))
    ]
    assert counts == [3, 4, 3]


def test_sums_over_the_mesh_are_as_written() -> None:
    """Inside a checked region, with a product split over `tensor`: its sum is taken in fp32, as an unsplit one's."""
    mesh = make_mesh(tensor=2, data=2)

    def region(x: jax.Array, w: jax.Array) -> jax.Array:
        h = lax.psum(x @ w, "tensor")
        h = lax.scan(lambda h, _: (h * 0.5, None), h, None, length=2)[0]
        return lax.psum((h + lax.all_gather(x, "tensor", axis=1, tiled=True)).sum(), "data")

    def loss(function: Any) -> Any:
        mapped = jax.shard_map(
            lambda x, w: lax.psum(function(x, w), "tensor"),
            mesh=mesh,
            in_specs=(P("data", "tensor"), P("tensor")),
            out_specs=P(),
        )
        return jax.jit(jax.value_and_grad(mapped))

    found = dtypes(loss(autocast(region)), A, A)
    assert found["psum_invariant"] == {(F32, F32)}
    assert all(F16 in kinds for kinds in found["dot_general"])
    (value, grads), (exact, exact_grads) = loss(autocast(region))(A, A), loss(region)(A, A)
    assert 0 < abs(value - exact) < 0.01 * abs(exact)
    np.testing.assert_allclose(grads, exact_grads, rtol=0.01)


def test_errors_are_the_functions_own() -> None:
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        autocast(jnp.dot)(A, A[:3])
