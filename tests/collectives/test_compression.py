"""Fewer bytes on the wire: how far off sums then are, that all devices agree on them, and error feedback."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_cases import BY_HAND, on_every_device
from jax.sharding import PartitionSpec as P
from jaxprs import collectives
from levels import levels, others_slow

from jaxdist.collectives import all_gather, all_reduce, all_reduce_with_feedback, broadcast, make_link, reduce_scatter
from jaxdist.collectives.compression import SCALE_BLOCK, decode, encode, encoded_bytes
from jaxdist.config.entries import AlgorithmFacts
from jaxdist.errors import UserError
from jaxdist.mesh import make_mesh

LOSSY = AlgorithmFacts.with_fact(int8=True)

BF16, FP32 = 2.0**-8, 2.0**-24  # unit roundoffs
ROW = 8 * 170 + 3  # no device count and no block divides it


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("n", "name"), levels(itertools.product([3, 8], BY_HAND), everyday=7))
def test_bf16_is_within_its_bound_and_the_same_on_all_devices(name: str, n: int) -> None:
    """A value is rounded at most n-1 times on its way into a sum, and once on the way back."""
    x = normal((n, n * 50 + 1))

    def function(x: jax.Array) -> list[jax.Array]:
        kind = {"algorithm": name, "wire_dtype": "bfloat16"}
        return [
            all_reduce(x, "data", **kind),
            reduce_scatter(x[:-1], "data", **kind),
            all_reduce(x, "data", op="max", **kind),
        ]

    whole, parts, largest = on_every_device(function, x, data=n)
    assert whole.dtype == parts.dtype == np.float32
    assert len({row.tobytes() for row in whole}) == len({row.tobytes() for row in largest}) == 1
    exact, absolute = x.astype(np.float64).sum(0), np.abs(x).astype(np.float64).sum(0)
    bound = ((1 + BF16) ** n * (1 + FP32) ** (n - 1) - 1) * absolute
    assert np.all(np.abs(whole[0] - exact) <= bound)
    assert np.all(np.abs(parts.ravel() - exact[:-1]) <= bound[:-1])
    assert np.abs(whole[0] - exact).max() > 10 * FP32 * absolute.max()  # it was rounded, that is
    np.testing.assert_array_equal(largest[0], x.astype(jnp.bfloat16).max(0).astype(np.float32))


def test_turns_on_a_shared_link_leave_the_same_in_bf16_on_all_devices() -> None:
    x, axes = normal((4, 1003)), ("data", "fsdp")
    kind = {"algorithm": "two_level", "wire_dtype": "bfloat16", "link": make_link("200mbit")}
    whole = on_every_device(lambda x: all_reduce(x, axes, **kind), x, data=2, fsdp=2)
    assert len({row.tobytes() for row in whole}) == 1
    exact, absolute = x.astype(np.float64).sum(0), np.abs(x).astype(np.float64).sum(0)
    assert np.all(np.abs(whole[0] - exact) <= ((1 + BF16) ** 4 * (1 + FP32) ** 3 - 1) * absolute)


@pytest.mark.parametrize("dtype", levels([jnp.bfloat16, np.float32, np.float16], everyday=3))
def test_bf16_is_what_travels_and_fp32_what_is_summed(dtype: Any) -> None:
    """256 + 1 is 256 in bf16, and so are seven more of them."""
    x = np.ones((8, 8), dtype)
    x[0] = 256

    def function(x: jax.Array) -> list[jax.Array]:
        kinds = [{"algorithm": name, "wire_dtype": "bfloat16"} for name in ("balanced_fusion", "master_worker")]
        return [f(x, "data", **kind) for kind in kinds for f in (all_reduce, reduce_scatter)]

    results = on_every_device(function, x, data=8)
    assert all(result.dtype == dtype for result in results)
    fused, fused_parts, master, master_parts = (result.astype(np.float64) for result in results)
    rounded = 264.0  # 263, as bf16 has it: even all_reduce's way back costs one rounding only
    assert np.all(fused == rounded)
    assert np.all(master == rounded)
    assert np.all(fused_parts == (rounded if dtype == jnp.bfloat16 else 263))
    assert np.all(master_parts.ravel()[1:] == rounded)  # travelled from the master


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "int8"])
def test_only_narrow_values_travel(wire_dtype: str) -> None:
    def dtypes(function: Any) -> set[str]:
        mapped = jax.shard_map(function, mesh=make_mesh(data=4), in_specs=P("data"), out_specs=P("data"))
        jaxpr = jax.make_jaxpr(mapped)(jnp.zeros(4 * 1024))
        found = collectives(jaxpr, "data")
        assert {primitive for primitive, _ in found} == {"ppermute"}
        return {dtype for _, dtype in found}

    names = {"bfloat16": BY_HAND, "int8": LOSSY}[wire_dtype]
    for name in names:
        kind = {"algorithm": name, "wire_dtype": wire_dtype}
        sent = {"bfloat16": "uint16", "int8": "int8"}[wire_dtype]  # bf16 goes as its bits
        assert dtypes(lambda x, kind=kind: all_reduce(x, "data", **kind)) == {sent}
        assert dtypes(lambda x, kind=kind: reduce_scatter(x, "data", **kind)) == {sent}


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (np.float32, {"wire_dtype": "bfloat16", "algorithm": "native"}, "native sums in the type that it sends"),
        (np.float32, {"wire_dtype": "int8", "algorithm": "native"}, "native sums in the type that it sends"),
        (np.float32, {"wire_dtype": "int4", "algorithm": "ring"}, "'int4' is not known; allowed: bfloat16, int8"),
        (np.float32, {"wire_dtype": "float16", "algorithm": "ring"}, "'float16' is not known"),
        (np.int32, {"wire_dtype": "bfloat16", "algorithm": "ring"}, "for floats, not for int32"),
        (np.int32, {"wire_dtype": "int8", "algorithm": "ring"}, "for floats, not for int32"),
        (np.float32, {"wire_dtype": "int8", "algorithm": "ring", "op": "max"}, "not with op='max'"),
        *[
            (np.float32, {"wire_dtype": "int8", "algorithm": name}, "allowed algorithms: .*balanced_fusion, .*ring")
            for name in BY_HAND
            if name not in LOSSY
        ],
    ],
)
def test_wrong_wire_formats_are_named_in_one_line(dtype: Any, options: dict[str, str], message: str) -> None:
    for function in (all_reduce, reduce_scatter):
        with pytest.raises(UserError, match=f"wire_dtype.*{message}") as error:
            on_every_device(lambda x, f=function: f(x, "data", **options), np.zeros((2, 4), dtype), data=2)
        assert "\n" not in str(error.value)


def in_blocks(x: np.ndarray, n: int) -> np.ndarray:
    """The largest magnitude in each element's block: parts of a row are cut into blocks, each with a scale."""
    parts = np.pad(np.abs(x), (0, -x.size % n)).reshape(n, -1)
    length = parts.shape[1]
    blocks = np.pad(parts, ((0, 0), (0, -length % SCALE_BLOCK))).reshape(n, -1, SCALE_BLOCK)
    largest = np.broadcast_to(blocks.max(2, keepdims=True), blocks.shape)
    return largest.reshape(n, -1)[:, :length].ravel()[: x.size]


@pytest.mark.parametrize("size", levels([3 * SCALE_BLOCK + 7, 0, 1, SCALE_BLOCK], everyday=4))
def test_int8_blocks_are_within_half_a_level(size: int) -> None:
    x = normal((size,)) * np.linspace(1e-6, 1e6, size, dtype=np.float32)
    code = encode(jnp.asarray(x))
    assert code.dtype == jnp.int8
    assert code.size == encoded_bytes(size)
    error = np.abs(np.asarray(decode(code, size)) - x.astype(np.float64))
    assert np.all(error <= in_blocks(x, 1) / 254 * (1 + 1e-4))


SIZES = [1, ROW, 8 * 3 * SCALE_BLOCK]


@pytest.mark.parametrize(("size", "n", "name"), levels(itertools.product(SIZES, [2, 5, 8], LOSSY), everyday=7))
def test_int8_is_within_half_a_level_of_each_block_and_trip(name: str, n: int, size: int) -> None:
    """A level is 1/127 of the largest value of the block. A part of the sum is encoded n times on its way, each time no
    larger than the sum of magnitudes."""
    x = normal((n, size)) * np.linspace(0.01, 10, size, dtype=np.float32)
    x[:, : size // 10] = 0
    result = on_every_device(lambda x: all_reduce(x, "data", algorithm=name, wire_dtype="int8"), x, data=n)
    assert len({row.tobytes() for row in result}) == 1
    error = np.abs(result[0] - x.astype(np.float64).sum(0))
    level = in_blocks(np.abs(x).sum(0), n) / 127
    assert np.all(error <= level / 2 * n * (1 + 1 / 127) ** n)
    assert np.all(result[0, : size // 10] == 0)
    if name == "balanced_fusion":  # every contribution once, and the sum once
        levels = (sum(in_blocks(row, n) for row in x) + in_blocks(x.sum(0), n)) / 127
        assert np.all(error <= levels / 2 * (1 + 1 / 127))


@pytest.mark.parametrize("name", LOSSY)
def test_int8_reduce_scatter(name: str) -> None:
    x = normal((3, 3 * 300, 2))
    for dim in (0, 1):
        rows = np.moveaxis(x, 1, 1 + dim)
        function = lambda x, dim=dim: reduce_scatter(x, "data", dim=dim, algorithm=name, wire_dtype="int8")  # noqa: E731
        parts = on_every_device(function, rows, data=3)
        exact = np.stack(np.split(rows.sum(0), 3, axis=dim))
        assert np.abs(parts - exact).max() <= 2 / 2 * np.abs(x).sum(0).max() / 127 * (1 + 1 / 127) ** 2
        assert np.abs(parts - exact).max() > 0


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize(("bad", "each"), [(np.inf, 2), (-np.inf, 2), (np.nan, 2), (np.nan, 64)])
def test_a_block_with_a_value_that_is_not_finite_is_nan(name: str, bad: float, each: int) -> None:
    """XLA:CPU drops NaN in the maxima of many blocks."""
    n, x = 4, normal((4, 4 * each * SCALE_BLOCK))
    x[1, SCALE_BLOCK + 5] = bad
    result = on_every_device(lambda x: all_reduce(x, "data", algorithm=name, wire_dtype="int8"), x, data=n)
    assert len({np.isnan(row).tobytes() for row in result}) == 1
    blocks = np.isnan(result[0]).reshape(-1, SCALE_BLOCK)
    assert blocks[1].all()
    assert not np.delete(blocks, 1, axis=0).any()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("n", levels([3, 8], everyday=2))
def test_error_feedback_loses_nothing(name: str, n: int) -> None:
    """Results and residuals together are the exact sums, so the mean of k results is off by residuals / k only."""
    calls, x = 50, normal((n, ROW))
    exact, residual = x.astype(np.float64).sum(0), np.zeros_like(x)

    def function(rows: tuple[jax.Array, jax.Array]) -> Any:
        def step(lost: jax.Array, _: None) -> tuple[jax.Array, Any]:
            result, lost = all_reduce_with_feedback(rows[0], lost, "data", algorithm=name)
            return lost, (result, lost)

        return jax.lax.scan(step, rows[1], length=calls)[1]

    results, residuals = on_every_device(function, (x, residual), data=n)
    assert np.array_equal(results, np.broadcast_to(results[:1], results.shape))  # on all devices, in every call
    total, lost = results[0].astype(np.float64), residuals.astype(np.float64).sum(0)  # [calls, ROW]
    before = np.concatenate([np.zeros_like(lost[:1]), lost[:-1]])
    rounding = 4 * n * FP32 * (np.abs(x).sum(0) + np.abs(residuals).sum(0).max())
    assert np.all(np.abs(total + lost - (exact + before)) <= rounding)
    single = np.abs(total[0] - exact).max()
    errors = [np.abs(total[:k].mean(0) - exact).max() for k in (1, 10, 50)]
    assert single > 1e-3
    assert errors[1] < 0.25 * single
    assert errors[2] < 0.05 * single


def test_the_first_call_with_feedback_is_the_plain_one() -> None:
    x = normal((8, ROW))
    result = on_every_device(lambda x: all_reduce(x, "data", algorithm="ring", wire_dtype="int8"), x, data=8)
    again, _ = on_every_device(lambda x: all_reduce_with_feedback(x, jnp.zeros_like(x), "data"), x, data=8)
    assert np.array_equal(result, again)


def test_feedback_on_one_device_and_of_the_mean_and_of_a_tree() -> None:
    tree = {"a": normal((2, 30)), "b": [normal((2, 300), 1)]}
    nothing = jax.tree.map(np.zeros_like, tree)

    def function(trees: Any) -> Any:
        return all_reduce_with_feedback(*trees, "data", op="mean")

    result, lost = on_every_device(function, (tree, nothing), data=2)
    for y, x, e in zip(*map(jax.tree.leaves, (result, tree, lost)), strict=True):
        np.testing.assert_allclose(2 * y[0] + e.sum(0), x.sum(0), atol=1e-5)
    one = jax.tree.map(lambda x: x[:1], (tree, nothing))
    jax.tree.map(np.testing.assert_array_equal, on_every_device(function, one, data=1), one)


@pytest.mark.parametrize(
    ("name", "wire_dtype"),
    others_slow(
        [("ring", "int8"), ("balanced_fusion", "int8"), ("tree", "bfloat16")],
        ("balanced_fusion", "int8"),
        ("tree", "bfloat16"),
    ),
)
def test_the_gradient_of_a_lossy_reduce_scatter_is_the_gathered_cotangent(name: str, wire_dtype: str) -> None:
    """0.3 is no integer, and no number of bf16 either."""

    def gradient(x: jax.Array) -> jax.Array:
        scattered = lambda x: reduce_scatter(x, "data", algorithm=name, wire_dtype=wire_dtype)  # noqa: E731
        return jax.grad(lambda x: 0.3 * scattered(x).sum())(x)

    got = on_every_device(gradient, normal((4, 8)), data=4)
    np.testing.assert_allclose(got, 0.3, rtol=2.0**-8)


@pytest.mark.parametrize("op", others_slow(["max", "min"], "min"))
def test_the_gradient_of_an_extremum_in_bf16_finds_who_has_it(op: str) -> None:
    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: all_reduce(x, "data", op=op, algorithm="ring", wire_dtype="bfloat16").sum())(x)

    got = on_every_device(gradient, normal((4, 8)), data=4)
    np.testing.assert_allclose(got.sum(0), 4.0)  # each of the four devices counts its copy
    assert set(np.unique(got)) <= {0.0, 1.0, 4 / 3, 2.0, 4.0}


def test_the_gradient_of_all_reduce_with_feedback_is_that_of_the_sum() -> None:
    def gradient(x: jax.Array) -> jax.Array:
        zeros = jnp.zeros_like(x)
        return jax.grad(lambda x: 0.3 * all_reduce_with_feedback(x, zeros, "data")[0].sum())(x)

    np.testing.assert_allclose(on_every_device(gradient, normal((4, 8)), data=4), 1.2, rtol=1e-2)


@pytest.mark.parametrize("name", LOSSY)
def test_what_is_not_finite_is_not_carried_on(name: str) -> None:
    x = normal((4, 8))
    x[1, 3] = np.inf
    total, lost = on_every_device(
        lambda x: all_reduce_with_feedback(x, jnp.zeros_like(x), "data", algorithm=name), x, data=4
    )
    assert not np.isfinite(total).all()
    assert np.isfinite(lost).all()


def test_on_one_device_the_residual_is_added_and_the_same_is_refused() -> None:
    x = np.ones((1, 4), np.float32)
    total, lost = on_every_device(lambda x: all_reduce_with_feedback(x, jnp.full_like(x, 0.5), "data"), x, data=1)
    np.testing.assert_array_equal(total, 1.5)
    np.testing.assert_array_equal(lost, 0)
    for call, message in (
        (lambda x: all_reduce(x, "data", op="avg"), "'avg' is not known"),
        (lambda x: broadcast(x, "data", root=1), "root=1"),
        (lambda x: all_gather(x, "data", dim=3), "dim 3"),
        (lambda x: all_reduce(x.astype(jnp.int32), "data", algorithm="ring", wire_dtype="int8"), "is for floats"),
    ):
        with pytest.raises(UserError, match=message):
            on_every_device(call, x, data=1)
