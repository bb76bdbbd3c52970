"""Every algorithm in the folder against sums computed on the host, for all group sizes, and the types of its
results."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jaxprs import primitive_counts

from jaxdist import registry
from jaxdist.collectives import (
    all_gather,
    all_reduce,
    claim_replicated,
    get_algorithm,
    in_buckets,
    reduce_scatter,
    stack,
    stacked_specs,
    to_varying,
    varying_axes,
)
from jaxdist.collectives.bucket import plan_buckets
from jaxdist.errors import UserError
from jaxdist.mesh import BATCH_LIKE, make_mesh
from jaxdist.specs import batch_spec

NAMES = registry.names("jaxdist.collectives.algorithms")
GROUPS = [*({"data": n} for n in (1, 2, 3, 4, 8)), {"data": 2, "fsdp": 3}, {"data": 4, "fsdp": 2}]


def on_every_device(function: Any, x: np.ndarray, **sizes: int) -> np.ndarray:
    """x [devices, ...]: row i goes to device i; the results come back stacked the same way."""
    mesh = make_mesh(**sizes)

    def region(x: jax.Array) -> jax.Array:
        return to_varying(function(x[0]), BATCH_LIKE)[None]

    rows = batch_spec(mesh)
    return np.asarray(jax.jit(jax.shard_map(region, mesh=mesh, in_specs=rows, out_specs=rows))(x))


def devices(sizes: dict[str, int]) -> int:
    return int(np.prod(list(sizes.values())))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", GROUPS, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5)], ids=str)
def test_all_reduce_is_the_exact_sum(name: str, sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).integers(-50, 50, (devices(sizes), *shape)).astype(np.int32)
    got = on_every_device(lambda x: all_reduce(x, ("fsdp", "data"), algorithm=name), x, **sizes)
    np.testing.assert_array_equal(got, np.broadcast_to(x.sum(0), x.shape))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", GROUPS, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_scatter_and_all_gather_are_exact(name: str, sizes: dict[str, int], dim: int) -> None:
    n = devices(sizes)
    shape = (2 * n, 3) if dim == 0 else (3, 2 * n)
    x = np.random.default_rng(1).integers(-50, 50, (n, *shape)).astype(np.int32)
    axes = ("data", "fsdp")
    got = on_every_device(lambda x: reduce_scatter(x, axes, dim=dim, algorithm=name), x, **sizes)
    np.testing.assert_array_equal(got, np.stack(np.split(x.sum(0), n, axis=dim)))
    got = on_every_device(lambda x: all_gather(x, axes, dim=dim, algorithm=name), x, **sizes)
    np.testing.assert_array_equal(got, np.broadcast_to(np.concatenate(list(x), axis=dim), got.shape))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint32], ids=str)
def test_dtype_is_kept(name: str, dtype: Any) -> None:
    x = np.arange(8 * 5).reshape(8, 5).astype(dtype) % 3
    got = on_every_device(lambda x: all_reduce(x, "data", algorithm=name), x.astype(dtype), data=8)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.int32)[0], x.astype(np.int32).sum(0))


@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 3}, {"data": 8}, {"data": 2, "fsdp": 4}], ids=str)
def test_ring_takes_the_rounds_its_cost_says(sizes: dict[str, int]) -> None:
    n, mesh = devices(sizes), make_mesh(**sizes)
    specs = P()

    def region(x: jax.Array) -> jax.Array:
        return stack(specs, all_reduce(x, ("data", "fsdp"), algorithm="ring"))

    run = jax.shard_map(region, mesh=mesh, in_specs=specs, out_specs=stacked_specs(specs, mesh))
    counts = primitive_counts(jax.make_jaxpr(run)(jnp.zeros(8 * n)))
    cost = get_algorithm("ring").cost("all_reduce", 32 * n, n)
    assert counts["ppermute"] == cost.rounds == 2 * (n - 1)
    assert cost.wire_bytes == 2 * (n - 1) / n * 32 * n
    assert "psum" not in counts


def test_types_of_results() -> None:
    mesh = make_mesh(data=4)

    def region(x: jax.Array) -> jax.Array:
        x = to_varying(x, ("data",))
        assert varying_axes(all_reduce(x, "data", algorithm="ring")) == {"data"}
        assert varying_axes(all_reduce(x, "data", algorithm="native")) == set()
        return all_reduce(x, "data")

    jax.make_jaxpr(jax.shard_map(region, mesh=mesh, in_specs=P(), out_specs=P()))(jnp.zeros(4))


def test_a_ring_result_leaves_through_the_claim_only() -> None:
    mesh, specs = make_mesh(data=4, tensor=2), {"a": P(None, "tensor"), "b": P()}
    tree = {"a": jnp.arange(8.0).reshape(2, 4), "b": jnp.arange(3.0)}

    def region(tree: Any) -> Any:
        return all_reduce(tree, "data", algorithm="ring")

    with pytest.raises(ValueError, match="out_specs"):
        jax.shard_map(region, mesh=mesh, in_specs=(specs,), out_specs=specs)(tree)
    run = jax.shard_map(
        lambda tree: stack(specs, region(tree)), mesh=mesh, in_specs=(specs,), out_specs=stacked_specs(specs, mesh)
    )
    got = jax.jit(lambda tree: claim_replicated(run(tree), specs, mesh))(tree)
    jax.tree.map(lambda got, want: np.testing.assert_array_equal(got, 4 * want), got, tree)


def test_unknown_axis_and_algorithm_and_size_are_named() -> None:
    with pytest.raises(UserError, match="axis='dat'.*data"):
        on_every_device(lambda x: all_reduce(x, "dat"), np.zeros((2, 3)), data=2)
    with pytest.raises(UserError, match="'rong' is not known.*native, ring"):
        on_every_device(lambda x: all_reduce(x, "data", algorithm="rong"), np.zeros((2, 3)), data=2)
    with pytest.raises(UserError, match="not divisible by data=2"):
        on_every_device(lambda x: reduce_scatter(x, "data"), np.zeros((2, 3)), data=2)


@given(st.lists(st.tuples(st.integers(0, 100), st.sampled_from("ab")), max_size=30), st.integers(1, 120))
@settings(deadline=None)
def test_buckets_hold_one_kind_and_no_more_than_the_limit(items: list[tuple[int, str]], limit: int) -> None:
    sizes, kinds = [size for size, _ in items], [kind for _, kind in items]
    buckets = plan_buckets(sizes, kinds, limit)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(items)))
    for bucket in buckets:
        assert len({kinds[i] for i in bucket}) == 1
        assert len(bucket) == 1 or sum(sizes[i] for i in bucket) <= limit


def test_in_buckets_calls_once_a_bucket_and_restores_shapes() -> None:
    calls = []

    def double(flat: jax.Array) -> jax.Array:
        calls.append(flat.shape)
        return 2 * flat

    leaves = [jnp.ones((2, 3)), jnp.arange(4.0), jnp.ones((), jnp.int32), jnp.zeros((0,))]
    results = in_buckets(double, leaves, limit=1000)
    assert calls == [(10,), (1,)]
    for got, leaf in zip(results, leaves, strict=True):
        np.testing.assert_array_equal(got, 2 * leaf)
    calls.clear()
    in_buckets(double, leaves, limit=1)
    assert len(calls) == 4
