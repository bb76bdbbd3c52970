"""Gradients of the collectives, first and second: those of the native ones, and finite differences, in float64."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_cases import BY_HAND, NAMES, OPERATIONS, REDUCTIONS, Call, Groups, has, on_every_device, run
from jax.sharding import PartitionSpec as P
from levels import levels

from jaxdist.collectives import all_reduce, reduce_scatter, send_recv, to_varying
from jaxdist.config.entries import AlgorithmFacts
from jaxdist.mesh import make_mesh

LOSSY = AlgorithmFacts.with_fact(int8=True)

PLACES: dict[str, dict[str, Any]] = {
    "reduce_scatter": {"dim": 1},
    "reduce": {"root": 2},
    "all_gather": {"dim": 1},
    "all_to_all": {"split_dim": 1, "concat_dim": 0},
    "broadcast": {"root": 1},
    "gather": {"root": 2, "dim": 0},
    "scatter": {"root": 1, "dim": 1},
}


Rows = dict[str, np.ndarray]


def calls_of(algorithm: str, n: int, *, devices: int, every_op: bool, seed: int = 0) -> dict[str, Call]:
    """Every operation that the algorithm has, with every op or a few: each device puts in [2, n]."""
    rng, calls = np.random.default_rng(seed), {}
    for operation in OPERATIONS:
        kinds: list[dict[str, Any]] = [PLACES.get(operation, {})]
        if operation in REDUCTIONS:
            ops = ("sum", "max") if operation == "all_reduce" else ("sum",)
            kinds = [{"op": op, **kinds[0]} for op in (("sum", "mean", "max", "min") if every_op else ops)]
        for kind in kinds:
            x = rng.standard_normal((devices, 2, n))
            if has(algorithm, operation):
                calls[f"{operation} {kind.get('op', '')}"] = Call(operation, x, kind)
    calls["send_recv"] = Call("send_recv", rng.standard_normal((devices, 2, n)), {"pairs": [(0, 1), (1, n - 1)]})
    return calls


@functools.cache
def derivatives(
    algorithm: str, n: int, *, second: bool, every_op: bool, groups: Groups | None = None
) -> tuple[Any, Rows, Rows]:
    """(a function of x and v that gives losses, gradients, and second derivatives along v; x; v), by call.

    The loss of a call is a sum over all devices, outside shard_map, of a nonlinear function of what each device has.
    """
    kinds = {"devices": n, "every_op": every_op}
    calls = calls_of(algorithm, len(groups[0]) if groups else n, **kinds)
    rows = P("data")

    def region(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
        results = {key: run(call, x[key][0], algorithm=algorithm, groups=groups) for key, call in calls.items()}
        return {key: to_varying(result, ("data",))[None] for key, result in results.items()}

    def losses(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
        results = jax.shard_map(region, mesh=make_mesh(data=n), in_specs=rows, out_specs=rows)(x)
        phases = {key: jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) for key, y in results.items()}
        return {key: jnp.sum(jnp.sin(y + phases[key]) + y**3 / 7) for key, y in results.items()}

    def total(x: dict[str, jax.Array]) -> Any:
        each = losses(x)
        return sum(each.values()), each

    def along(x: dict[str, jax.Array], v: dict[str, jax.Array]) -> Any:
        gradients, each = jax.grad(total, has_aux=True)(x)
        return sum(jnp.vdot(gradient, v[key]) for key, gradient in gradients.items()), (each, gradients)

    def first(x: Any, v: Any) -> Any:
        return along(x, v)[1]

    def both(x: Any, v: Any) -> Any:
        seconds, (each, gradients) = jax.grad(along, has_aux=True)(x, v)
        return each, gradients, seconds

    x = {key: call.x for key, call in calls.items()}
    v = {key: call.x for key, call in calls_of(algorithm, x["send_recv"].shape[-1], **kinds, seed=1).items()}
    evaluate = jax.jit(both if second else first)
    return lambda x, v: jax.tree.map(np.asarray, evaluate(x, v)), x, v


def plus(x: Rows, step: float, v: Rows) -> Rows:
    return {key: x[key] + step * v[key] for key in x}


def check_gradients(algorithm: str, n: int, *, second: bool, every_op: bool = True, groups: Any = None) -> None:
    """Against the native operations, and against central differences of the losses and of the gradients."""
    kinds, step = {"second": second, "every_op": every_op, "groups": groups}, 1e-5
    with jax.enable_x64(True):
        evaluate, x, v = derivatives(algorithm, n, **kinds)
        there, further, back = evaluate(x, v), evaluate(plus(x, step, v), v), evaluate(plus(x, -step, v), v)
        native, native_x, native_v = derivatives("native", n, **kinds)
        expected = native({**native_x, **x}, {**native_v, **v})
    for key in x:
        gradient = there[1][key]
        assert gradient.dtype == np.float64
        assert np.abs(gradient).max() > 0.1, key
        slope = (further[0][key] - back[0][key]) / (2 * step)
        np.testing.assert_allclose(np.vdot(gradient, v[key]), slope, rtol=1e-6, atol=1e-7, err_msg=key)
        if second:
            curvature = (further[1][key] - back[1][key]) / (2 * step)
            assert np.abs(curvature).max() > 0.01, key
            np.testing.assert_allclose(there[2][key], curvature, rtol=1e-6, atol=1e-6, err_msg=key)
        for got, want in zip(there, expected, strict=True):
            np.testing.assert_allclose(got[key], want[key], rtol=1e-12, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("name", levels(NAMES, everyday=7, slow=2))  # slow runs have those of every op
def test_first_derivatives(name: str) -> None:
    check_gradients(name, 3, second=False, every_op=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring"])
def test_second_derivatives(name: str) -> None:
    check_gradients(name, 3, second=True, every_op=False)


@pytest.mark.parametrize("name", levels(NAMES, slow=2))
def test_derivatives_of_every_op(name: str) -> None:
    """First and second."""
    check_gradients(name, 4, second=True)


@pytest.mark.parametrize(
    ("name", "n", "groups"),
    levels(
        (
            (name, *groups)
            for groups in ((6, ((0, 2, 4), (5, 3, 1))), (8, ((3, 1, 0, 2), (4, 6, 5, 7))))
            for name in NAMES
        ),
        slow=3,
    ),
    ids=str,
)
def test_derivatives_in_groups(name: str, n: int, groups: Groups) -> None:
    check_gradients(name, n, second=False, groups=groups)


def gradient_of(function: Any, x: Any, weights: Any) -> np.ndarray:
    """On n devices: the gradient of the sum over devices of the sum of weights * function(x)."""

    def own(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        x = to_varying(rows[0], ("data",))
        return jax.vjp(lambda x: to_varying(function(x), ("data",)), x)[1](rows[1])[0]

    return on_every_device(own, (x, weights), data=len(x))


@pytest.mark.parametrize(("op", "name"), levels(itertools.product(("max", "min"), NAMES), everyday=12, slow=2), ids=str)
def test_ties_share_the_gradient(name: str, op: str) -> None:
    """all_reduce: equally. The others: all of it, and nothing to a device that does not attain the extremum."""
    rng, n = np.random.default_rng(0), 4
    x = rng.integers(0, 2, (n, n)).astype(np.float32)
    x[:, 0], x[:, 1] = 1, [1, 0, 0, 0]
    weights = rng.integers(1, 9, (n, n)).astype(np.float32)
    attained = x == (x.max(0) if op == "max" else x.min(0))
    gradient = gradient_of(lambda x: all_reduce(x, "data", op=op, algorithm=name), x, weights)
    np.testing.assert_allclose(gradient, attained * weights.sum(0) / attained.sum(0), rtol=1e-6)
    whole = weights[:, 0]
    gradient = gradient_of(lambda x: reduce_scatter(x, "data", op=op, algorithm=name), x, weights[:, :1])
    np.testing.assert_allclose(gradient.sum(0), whole, rtol=1e-6)
    assert np.all(gradient >= 0)
    assert np.all(gradient[~attained] == 0)


BF16 = {
    "send_recv": (lambda x, name: send_recv(x, "data", 1), lambda w: np.roll(w, -1, axis=0)),
    "all_reduce": (lambda x, name: all_reduce(x, "data", algorithm=name), lambda w: np.broadcast_to(w.sum(0), w.shape)),
    "max": (
        lambda x, name: all_reduce(x, "data", op="max", algorithm=name),
        lambda w: np.stack([0 * w[0], 0 * w[0], w.sum(0)]),
    ),
    "reduce_scatter": (
        lambda x, name: jnp.tile(reduce_scatter(x, "data", algorithm=name), 3) / 3,
        lambda w: np.broadcast_to(w.reshape(3, 3, -1).sum(1).ravel() / 3, w.shape),
    ),
    "reduce_scatter max": (
        lambda x, name: jnp.tile(reduce_scatter(x, "data", op="max", algorithm=name), 3) / 3,
        lambda w: np.stack([0 * w[0], 0 * w[0], w.reshape(3, 3, -1).sum(1).ravel() / 3]),
    ),
}


@pytest.mark.parametrize("name", levels(NAMES, everyday=6))
def test_bf16_gradients_are_not_lost(name: str) -> None:
    """Bits are what travels, and bits have no derivative."""
    x = np.random.default_rng(0).permutation(18).reshape(3, 6)
    x[2] = 20 + np.arange(6)  # the largest
    w = 3 * np.random.default_rng(1).integers(1, 9, (3, 6))
    for key, (function, expected) in BF16.items():
        got = gradient_of(lambda x, f=function: f(x, name), x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(np.float64), expected(w.astype(float)), rtol=0.01, err_msg=key)


@pytest.mark.parametrize("name", levels(BY_HAND, everyday=3))
def test_gradients_with_fewer_bytes_on_the_wire(name: str) -> None:
    """They travel in the same format: small integers come through exactly, others nearly."""
    x = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    w = np.random.default_rng(1).integers(1, 9, (3, 6)).astype(np.float32)

    def function(x: jax.Array, wire_dtype: str) -> jax.Array:
        return all_reduce(x, "data", algorithm=name, wire_dtype=wire_dtype)

    want = np.broadcast_to(w.sum(0), w.shape)
    np.testing.assert_array_equal(gradient_of(lambda x: function(x, "bfloat16"), x, w), want)
    if name in LOSSY:
        np.testing.assert_allclose(gradient_of(lambda x: function(x, "int8"), x, w), want, atol=3 * want.max() / 254)


@pytest.mark.parametrize("name", levels(NAMES, everyday=6))
def test_vmap_and_checkpoint(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((3, 2, 5)).astype(np.float32)

    def total(x: jax.Array) -> jax.Array:
        return to_varying(all_reduce(x, "data", algorithm=name), ("data",))

    def gradient(function: Any, x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(jnp.sin(function(x))))(x)

    def function(x: jax.Array) -> list[jax.Array]:
        rows = jax.vmap(total)
        return [rows(x), gradient(rows, x), gradient(jax.checkpoint(lambda x: jnp.cos(total(x))), x)]

    mapped, of_mapped, of_checkpoint = on_every_device(function, x, data=3)
    y = np.broadcast_to(x.astype(np.float64).sum(0), x.shape)
    np.testing.assert_allclose(mapped, y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_mapped, 3 * np.cos(y), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_checkpoint, -3 * np.cos(np.cos(y)) * np.sin(y), rtol=1e-5, atol=1e-5)


def test_devices_of_no_group_have_no_gradient() -> None:
    x, w = np.ones((4, 6), np.float32), np.random.default_rng(0).integers(1, 9, (4, 6)).astype(np.float32)
    got = gradient_of(lambda x: all_reduce(x, "data", algorithm="ring", groups=((3, 1),)), x, w)
    total = w[1] + w[3]
    np.testing.assert_array_equal(got, np.stack([0 * total, total, 0 * total, total]))
