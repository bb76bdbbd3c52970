"""Every algorithm in the folder against numpy, bit for bit, for every operation and all group sizes; the types of the
results, and the errors."""

import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_cases import (
    BY_HAND,
    NAMES,
    OPERATIONS,
    SIZES,
    Call,
    all_calls,
    check_exact,
    devices,
    draw,
    draw_pairs,
    empty_calls,
    everyday_calls,
    has,
    on_every_device,
    run,
    values,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jaxprs import collectives
from levels import levels, others_slow

from jaxdist.collectives import (
    all_gather,
    all_reduce,
    all_reduce_with_feedback,
    broadcast,
    claim_replicated,
    cost,
    in_buckets,
    make_link,
    psum,
    reduce_scatter,
    send_recv,
    stack,
    stacked_specs,
    to_varying,
    varying_axes,
)
from jaxdist.collectives.bucket import plan_buckets
from jaxdist.errors import UserError
from jaxdist.mesh import abstract_mesh, make_mesh

EVERYDAY = [{"data": 3}, {"data": 4}, {"data": 2, "fsdp": 4}]
SEVERAL_AXES = [
    {"data": 4, "fsdp": 2},
    {"data": 2, "fsdp": 3},
    {"data": 3, "fsdp": 2},
    {"pipe": 2, "data": 2, "fsdp": 2},
]


@pytest.mark.parametrize(("sizes", "name"), levels(itertools.product(EVERYDAY, NAMES), everyday=5), ids=str)
def test_every_operation_is_exact(name: str, sizes: dict[str, int]) -> None:
    check_exact(everyday_calls(name, devices(sizes)), algorithm=name, **sizes)


@pytest.mark.parametrize(("name", "n"), levels(itertools.product(NAMES, range(1, 9)), slow=5))
def test_every_op_and_size_is_exact(name: str, n: int) -> None:
    check_exact(all_calls(name, n), algorithm=name, data=n)


@pytest.mark.parametrize(("name", "sizes"), levels(itertools.product(NAMES, SEVERAL_AXES), slow=5), ids=str)
def test_every_operation_is_exact_over_several_axes(name: str, sizes: dict[str, int]) -> None:
    check_exact(everyday_calls(name, devices(sizes)), algorithm=name, **sizes)


def test_turns_on_a_shared_link_are_exact() -> None:
    choice, link = random.Random(0), make_link("200mbit")
    calls = [draw(choice, "all_reduce", op, size, 4, devices=4) for op in ("sum", "max", "min") for size in SIZES]
    calls = [call._replace(options={**call.options, "link": link}) for call in calls]
    check_exact(calls, algorithm="two_level", data=2, fsdp=2)


@pytest.mark.parametrize("name", others_slow(NAMES, *NAMES[::3]))
def test_nothing_stays_nothing(name: str) -> None:
    check_exact(empty_calls(name, 4, devices=4), algorithm=name, data=4)
    check_exact(empty_calls(name, 2, devices=4), algorithm=name, groups=((0, 2), (1, 3)), data=4)


@pytest.mark.parametrize(
    ("name", "n", "size"),
    levels(((name, *sizes) for name in NAMES for sizes in ((3, 131_072), (5, 270_001))), everyday=3),
)
def test_large_arrays_are_exact(name: str, n: int, size: int) -> None:
    """These travel in several pieces where an algorithm cuts them into pieces."""
    check_exact([Call("all_reduce", values((n, size), jnp.int32, 0), {})], algorithm=name, data=n)


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("name", others_slow(NAMES, NAMES[0], "native"))
def test_an_extremum_keeps_nan(name: str, op: str) -> None:
    rows = np.array([[1, -1, np.nan, np.inf], [-np.nan, 2, -3, -np.inf], [0, -0.0, 5, 1], [7, -8, 9, np.nan]])
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        for chosen in ({}, {"groups": ((0, 2), (1, 3))}):
            x = rows.astype(dtype)
            got = on_every_device(lambda x, c=chosen: all_reduce(x, "data", op=op, algorithm=name, **c), x, data=4)
            for group in chosen.get("groups", ((0, 1, 2, 3),)):
                want = {"max": np.max, "min": np.min}[op](x[list(group)].astype(np.float32), axis=0)
                for rank in group:
                    np.testing.assert_array_equal(got[rank].astype(np.float32), want)


def test_gpus_keep_nan_by_themselves() -> None:
    def sent(platform: str) -> set[str]:
        mesh = abstract_mesh(data=2, platform=platform)
        run = jax.shard_map(lambda x: all_reduce(x, "data", op="max"), mesh=mesh, in_specs=P("data"), out_specs=P())
        text = str(jax.make_jaxpr(run)(jax.ShapeDtypeStruct((2,), jnp.float32)))
        return {line.partition(":")[2].split("[")[0] for line in text.splitlines() if "= pmax" in line}

    assert (sent("gpu"), sent("cpu")) == ({"f32"}, {"i32"})


@pytest.mark.parametrize("n", range(1, 9))
def test_send_recv_moves_and_leaves_zeros(n: int) -> None:
    check_exact(draw_pairs(n), algorithm="native", data=n)


@pytest.mark.parametrize("name", others_slow(NAMES, *NAMES[1::3]))
def test_trees_of_arrays_keep_their_structure(name: str) -> None:
    tree = {"a": values((4, 8), jnp.int32, 0), "b": [values((4,), jnp.float32, 1), None, values((4, 0), jnp.int8, 2)]}
    got = on_every_device(lambda tree: all_reduce(tree, "data", algorithm=name), tree, data=4)
    want = jax.tree.map(lambda x: np.broadcast_to(x.sum(0, dtype=x.dtype), x.shape), tree)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_types_of_results() -> None:
    mesh = make_mesh(data=4)

    def region(x: jax.Array) -> jax.Array:
        x = to_varying(x, ("data",))
        assert varying_axes(all_reduce(x, "data", algorithm="ring")) == {"data"}
        assert varying_axes(all_reduce(x, "data", algorithm="native")) == set()
        return all_reduce(x, "data")

    jax.make_jaxpr(jax.shard_map(region, mesh=mesh, in_specs=P(), out_specs=P()))(jnp.zeros(4))


@pytest.mark.parametrize("name", others_slow(BY_HAND, *BY_HAND[2::3]))
def test_hand_written_results_are_varying_and_made_by_ppermute_alone(name: str) -> None:
    mesh = make_mesh(data=3, fsdp=2)
    operations = [operation for operation in OPERATIONS if has(name, operation)]

    def region(x: jax.Array) -> list[jax.Array]:
        calls = everyday_calls(name, 6)
        results = [run(call, to_varying(jnp.asarray(call.x[0]), ("data",)), algorithm=name) for call in calls]
        assert {call.operation for call in calls} == set(operations)
        assert all(varying_axes(result) == {"data", "fsdp"} for result in results)
        floats = [jnp.sum(result.astype(jnp.float32)) for result in results]
        gradients = jax.grad(lambda x: jnp.sum(jnp.sin(all_reduce(x, ("data", "fsdp"), algorithm=name))))(x)
        return [value[None] for value in [*floats, gradients]]

    rows = P(("data", "fsdp"))
    jaxpr = jax.make_jaxpr(jax.shard_map(region, mesh=mesh, in_specs=rows, out_specs=rows))(jnp.zeros(6))
    for axis in ("data", "fsdp"):
        assert {primitive for primitive, _ in collectives(jaxpr, axis)} == {"ppermute"}


@pytest.mark.slow
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
    with pytest.raises(UserError, match="'rong' is not known.*native, ordered, ring"):
        on_every_device(lambda x: all_reduce(x, "data", algorithm="rong"), np.zeros((2, 3)), data=2)
    with pytest.raises(UserError, match="not divisible by data=2"):
        on_every_device(lambda x: reduce_scatter(x, "data"), np.zeros((2, 3)), data=2)
    with pytest.raises(UserError, match=r"not divisible by data\*fsdp=4"):
        on_every_device(lambda x: reduce_scatter(x, ("fsdp", "data")), np.zeros((4, 6)), data=2, fsdp=2)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: broadcast(x, "data", algorithm="ring"), "'ring' has no broadcast; these have: .*native.*tree"),
        (lambda x: broadcast(x, "data", root=2), "root=2: allowed are the ranks 0 to 1"),
        (lambda x: broadcast(x, "data", root=-1), "root=-1: allowed are the ranks 0 to 1"),
        (lambda x: all_reduce(x, "data", op="prod"), "op='prod' is not known; allowed: sum, mean, max, min"),
        (lambda x: all_reduce(x.astype(jnp.int32), "data", op="mean"), "op='mean': int32 has no fractions"),
        (lambda x: all_reduce(x > 0, "data"), "op='sum' of bool: use max"),
        (lambda x: all_gather(x, "data", dim=1), r"all_gather: dim 1 of \(3,\) does not exist; allowed: -1 to 0"),
        (lambda x: all_gather(x[0], "data"), r"all_gather: dim 0 of \(\) does not exist"),
        (lambda x: send_recv(x, "data", [(0, 1), (1, 1)]), "pairs=.*each rank from 0 to 1 once as source"),
        (lambda x: send_recv(x, "data", [(0, 2)]), "pairs=.*each rank from 0 to 1 once as source"),
        (lambda x: send_recv(x, "data", [(0, 1, 2)]), "pairs=.*each rank from 0 to 1 once as source"),
        (lambda x: send_recv(x, "data", [(0, 1), 1]), "pairs=.*each rank from 0 to 1 once as source"),
        (lambda x: cost("allreduce", 5, 8), "'ring' has no allreduce; operations: all_reduce, .*scatter"),
        (lambda x: cost("all_reduce", 5, 0), r"cost: 5 bytes on \(0,\) devices; allowed: bytes >= 0, "),
        (lambda x: cost("all_reduce", -5, 8), r"cost: -5 bytes on \(8,\) devices; allowed: bytes >= 0, "),
        (
            lambda x: all_reduce_with_feedback(x, x, "data", algorithm="tree"),
            "'int8' is not for .*algorithm tree; allowed algorithms: .*balanced_fusion, .*ring",
        ),
    ],
)
def test_mistakes_are_named_in_one_line(function: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        on_every_device(function, np.zeros((2, 3), np.float32), data=2)
    assert "\n" not in str(error.value)


def test_outside_of_shard_map() -> None:
    text = (
        "^axis='data': not an axis of the mesh; allowed: none here; call it inside jax.shard_map over the axis 'data'"
    )
    for function in (all_reduce, reduce_scatter, all_gather, broadcast):
        with pytest.raises(UserError, match=text):
            jax.jit(lambda x, f=function: f(x, "data"))(jnp.ones(4))
    assert psum(1, "data") == 1  # it is for layers, which run on whole arrays, too
    with jax.set_mesh(make_mesh(data=8)), pytest.raises(UserError, match=text):
        all_reduce(jnp.ones(4), "data")
    with pytest.raises(UserError, match="^axis=3: not an axis of the mesh; allowed: pipe, data"):
        on_every_device(lambda x: all_reduce(x, 3), np.zeros((2, 3)), data=2)  # type: ignore[arg-type]


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

    def double(flat: jax.Array) -> tuple[jax.Array]:
        calls.append(flat.shape)
        return (2 * flat,)

    leaves = [jnp.ones((2, 3)), jnp.arange(4.0), jnp.ones((), jnp.int32), jnp.zeros((0,))]
    (results,) = in_buckets(double, leaves, limit=1000)
    assert calls == [(10,), (1,)]
    for got, leaf in zip(results, leaves, strict=True):
        np.testing.assert_array_equal(got, 2 * leaf)
    calls.clear()
    in_buckets(double, leaves, limit=1)
    assert len(calls) == 4
