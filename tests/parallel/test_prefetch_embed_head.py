"""Embedding and head of prefetched models: the same gradients as on one device, and as without prefetching, whatever
the sizes of the model."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from layouts import SEQ, initial
from levels import levels, others_slow
from optax import MaskedNode

from jaxdist.collectives import zeros_varying_like
from jaxdist.config.rules.xla_flags import TRITON
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.init import init_state, state_target
from jaxdist.mesh import abstract_mesh, make_mesh
from jaxdist.models.gpt import Embed, Head, gpt
from jaxdist.nn import MLP, make_norm, model_def
from jaxdist.parallel.blocks.compiler_options import AT_ONCE, BY_TWO, LATENCY_HIDING, NO_ZEROS, compiler_options
from jaxdist.parallel.blocks.layers import BlockRows, OneBlock, at
from jaxdist.parallel.blocks.prefetch import (
    PrefetchedBlocks,
    largest_gradient,
    opaque_index,
    order_after,
    read_late,
    split_first_fetch,
)
from jaxdist.parallel.blocks.prefetch_embed_head import HeadSlices, first_reads
from jaxdist.parallel.options import StepOptions, StrategyOptions
from jaxdist.plan.traced.ledger import ledger
from jaxdist.precision.policy import POLICIES, Precision
from jaxdist.specs import BATCH_SPEC, only
from jaxdist.state import place_params
from jaxdist.step import make_train_step

ROWS = 16


def config(style: str, *, tied: bool, layers: int, vocab: int, width: int = 32, **more: Any) -> ModelConfig:
    return ModelConfig(
        style=style, tied=tied, layers=layers, vocab=vocab, width=width, heads=4, mlp_width=48, **more
    ).resolved()


CASES = {  # five blocks cut neither 52 rows nor 32 columns into equal slices, three not 64
    "gpt2, tied": (config("gpt2", tied=True, layers=5, vocab=52), {"fsdp": 8}),
    "llama, untied, hybrid": (config("llama", tied=False, layers=5, vocab=66, loss_chunk=3), {"data": 2, "fsdp": 4}),
    "gpt2, untied, tensor": (config("gpt2", tied=False, layers=3, vocab=64), {"fsdp": 2, "tensor": 2}),
    "llama, tied, one block": (config("llama", tied=True, layers=1, vocab=50), {"fsdp": 4}),
    # 36 columns are no 8 parts: the embedding is gathered; more blocks than columns or rows of the table: it is whole
    "gpt2, rows": (config("gpt2", tied=True, layers=3, vocab=64, width=36), {"fsdp": 8}),
    "llama, a small table": (config("llama", tied=False, layers=5, vocab=4, width=16), {"fsdp": 4}),
}


def make_batch(model: ModelConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.vocab, (ROWS, SEQ + 1)).astype(np.int32)
    weights = (rng.random((ROWS, SEQ)) < np.linspace(0.1, 1, ROWS)[:, None]).astype(np.float32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}


def gradients(
    model: ModelConfig, sizes: dict[str, int], policy: str, *, strategy: str = "zero3", **options: Any
) -> tuple[float, Any]:
    mesh, tx = make_mesh(**sizes), optax.sgd(0.1)
    made = gpt(model, max_length=SEQ, param_dtype=POLICIES[policy].param)
    layout = {"freeze": options.get("freeze", ())}
    state = place_params(initial(model, policy), tx, state_target(made, tx, mesh, strategy=strategy, **layout))
    step = make_train_step(made, tx, mesh, strategy=strategy, precision=policy, return_grads=True, **options)
    batch = jax.device_put(make_batch(model), NamedSharding(mesh, BATCH_SPEC))
    _, metrics = step(state, batch)
    return float(metrics["loss"]), jax.device_get(metrics["grads"])


def check_against_one_device(model: ModelConfig, sizes: dict[str, int], **options: Any) -> None:
    """With prefetching, in float64."""
    with jax.enable_x64(True):
        loss_of = functools.partial(oracle.loss, config=model)
        with jax.numpy_dtype_promotion("standard"):
            want = jax.jit(jax.value_and_grad(loss_of))(initial(model, "fp64"), make_batch(model))
        got = gradients(model, sizes, "fp64", prefetch=1, **options)
    assert got[0] == pytest.approx(float(want[0]), rel=1e-12)
    assert oracle.error(got[1], want[1]) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", levels(CASES, everyday=6, slow=4))
def test_gradients_are_those_of_one_device(name: str) -> None:
    check_against_one_device(*CASES[name], remat="full")


SMALL = {"gpt2, tied, small": (config("gpt2", tied=True, layers=3, vocab=52), {"fsdp": 4})}
WHOLE = [  # all but zero3 have whole parameters on a device: nothing is cut
    ("zero1", "gpt2, tied, small", {"microbatches": 2}),
    ("ddp", "gpt2, tied, small", {"microbatches": 2}),
    ("zero2", "gpt2, tied, small", {"microbatches": 2}),
    ("zero3", "gpt2, tied, small", {"microbatches": 2}),
    ("zero2", "llama, untied, hybrid", {"remat": "full"}),
    ("zero1", "llama, untied, hybrid", {}),
]


@pytest.mark.parametrize(("strategy", "name", "options"), levels(WHOLE, slow=4, common=2))
def test_gradients_under_other_strategies(strategy: str, name: str, options: dict[str, Any]) -> None:
    check_against_one_device(*(CASES | SMALL)[name], strategy=strategy, **options)


GPT2, OTHER = CASES["gpt2, tied"][0], config("llama", tied=False, layers=6, vocab=70, width=48, kv_heads=2)
PLAIN = {
    "untuned": (OTHER, {"fsdp": 4}, {"remat": "full"}),
    "two blocks": (replace(OTHER, layers=2), {"fsdp": 4}, {}),
    "four blocks, hybrid": (replace(OTHER, layers=4), {"data": 2, "fsdp": 2}, {}),
    "microbatches": (GPT2, {"fsdp": 4}, {"microbatches": 2}),
    "full": (GPT2, {"fsdp": 4}, {"remat": "full"}),
    "dropout": (replace(GPT2, dropout=0.5), {"fsdp": 4}, {}),
    "frozen": (GPT2, {"fsdp": 4}, {"freeze": ("embed.tokens.*", "head.norm.*")}),
    "blocks frozen": (replace(GPT2, layers=4), {"data": 2, "fsdp": 2}, {"freeze": ("blocks.*",)}),
    "norms frozen, tensor": (OTHER, {"fsdp": 2, "tensor": 2}, {"freeze": ("blocks.norm*",)}),
}


@pytest.mark.parametrize("name", levels(PLAIN, slow=4))
def test_gradients_are_those_without_prefetching(name: str) -> None:
    """Those of plain differentiation; of sizes that the recipe was not tuned on, among others."""
    model, sizes, options = PLAIN[name]
    plain = gradients(model, sizes, "fp32", **options)
    ahead = gradients(model, sizes, "fp32", **options, prefetch=1)
    assert ahead[0] == pytest.approx(plain[0], rel=1e-6)
    trained = list(zip(jax.tree.leaves(ahead[1]), jax.tree.leaves(plain[1]), strict=True))
    assert max(oracle.error(mine, other) for mine, other in trained if np.linalg.norm(other) > 1e-6) < 1e-6


class PostNorm(nnx.Module):
    """All that it reads first is split over tensor, what it reads last is not."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mlp = MLP(rngs, 8, 32, kind="gelu", bias=True, out_scale=1.0)
        self.norm = make_norm("layernorm", 8, eps=1e-5, bias=True)

    def __call__(self, h: jax.Array, keys: jax.Array) -> jax.Array:
        return self.norm(h + self.mlp(h))


class PostNormModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        model = config("llama", tied=False, layers=3, vocab=16, width=8)
        self.embed, self.head = Embed(model, SEQ, rngs, sequence=False), Head(model, rngs, sequence=False)
        self.blocks = nnx.List([PostNorm(rngs) for _ in range(3)])


@pytest.mark.slow
def test_a_block_that_reads_what_is_split_before_what_is_not() -> None:
    mesh, tx, made = make_mesh(fsdp=2, tensor=2), optax.sgd(0.1), model_def(PostNormModel, tied=False)
    data = make_batch(config("llama", tied=False, layers=3, vocab=16))
    found = []
    for prefetch in (0, 1):
        state = init_state(made, tx, mesh, strategy="zero3", min_shard_bytes=0)
        step = make_train_step(made, tx, mesh, strategy="zero3", prefetch=prefetch, return_grads=True)
        _, metrics = step(state, jax.device_put(data, NamedSharding(mesh, BATCH_SPEC)))
        found.append(jax.device_get(metrics["grads"]))
    assert oracle.error(found[1], found[0]) < 1e-6


@pytest.mark.slow
def test_what_is_sent() -> None:
    """Never the embedding's table; a slice of the head's beside each block."""
    model, mesh = CASES["gpt2, tied"][0], abstract_mesh(fsdp=8)
    made, tx = gpt(model, max_length=SEQ), optax.sgd(0.1)
    step = make_train_step(made, tx, mesh, strategy="zero3", remat="full", prefetch=1)
    batch = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in make_batch(model).items()}
    found = ledger(step, state_target(made, tx, mesh, strategy="zero3"), batch).collectives
    tables = [each for each in found if "table" in each.purpose]
    slices = 11 * 32 * 4  # bytes: of 52 rows, five times 11
    for op, size in (("all_gather", slices // 8), ("reduce_scatter", slices)):
        mine = [each for each in tables if each.op == op]
        assert sum(each.calls for each in mine) == model.layers and {each.bytes_per_call for each in mine} == {size}
    moved = [each for each in found if each.op == "all_to_all"]
    assert sum(each.calls for each in moved) == 2
    assert {each.bytes_per_call for each in moved} == {ROWS // 8 * SEQ * 32 * 4}


@pytest.mark.parametrize(
    ("strategy", "least"), others_slow([("ddp", 0), ("zero1", 0), ("zero2", 0), ("zero3", 2**30)], ("zero3", 2**30))
)
def test_whole_parameters_are_not_looked_up_by_columns(strategy: str, least: int) -> None:
    model, mesh = CASES["gpt2, tied"][0], abstract_mesh(fsdp=8)
    made, tx = gpt(model, max_length=SEQ), optax.sgd(0.1)
    options = StepOptions(strategy=strategy, prefetch=1, min_shard_bytes=least)
    step = make_train_step(made, tx, mesh, options)
    batch = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in make_batch(model).items()}
    found = ledger(step, state_target(made, tx, mesh, options), batch).collectives
    assert found and not any(each.op == "all_to_all" for each in found)


@pytest.mark.slow
def test_the_first_block_comes_in_two_parts_of_which_the_second_waits() -> None:
    """What is read late is gathered once the rest is there, and the rest's gradients are reduced once its own are:
    otherwise the compiler would make one collective of both."""
    w = {name: jnp.zeros((2, size)).at[1].set(1) for name, size in (("a", 2), ("b", 3), ("c", 2), ("d", 2))}

    def block(unit: Any, h: jax.Array, layer: jax.Array, keys: Any) -> jax.Array:
        return ((h + unit["d"].sum()) * unit["a"].sum() - unit["c"].sum()) * unit["b"].sum()

    def gather(diff: Any, held: Any, wanted: Any) -> Any:
        return jax.tree.map(lambda leaf: 2 * leaf, only(wanted, diff))

    late = read_late(block, at(w, 0), jnp.ones(2), jnp.int32(1), None)
    assert late == {"d": False, "a": False, "c": True, "b": True}  # 4 of 9 elements, then 6
    one, rows = OneBlock(gather, block), BlockRows(w, jax.tree.map(lambda _: MaskedNode(), w), jnp.arange(2))
    unit, reduce = split_first_fetch(one, rows, late)
    assert [float(unit[name].sum()) for name in "abcd"] == [0] * 4
    ones = [jnp.ones_like(leaf) for leaf in jax.tree.leaves(unit)]
    assert jax.tree.all(jax.tree.map(lambda leaf: (leaf == 2).all(), reduce(ones, ())[0]))
    (lost,) = reduce([ones[0], ones[1] * jnp.inf, *ones[2:]], ())
    assert {name: bool(jnp.isnan(leaf).all()) for name, leaf in lost.items()} == {
        "a": True,
        "b": False,
        "c": False,
        "d": True,
    }
    (lost,) = reduce(ones, [jnp.full(1, jnp.inf)])  # what was reduced before
    assert jnp.isnan(lost["b"]).all() and jnp.isnan(lost["c"]).all()
    spoilt = rows._replace(diff=w | {"a": w["a"].at[0].set(jnp.inf)})
    unit, _ = split_first_fetch(one, spoilt, late)  # known to be lost, another row is read
    assert [float(unit[name].sum()) for name in "bcd"] == [6, 4, 0]


def test_shards_are_summed_beside_the_other_half_of_a_block() -> None:
    """What has travelled waits for the largest gradient of the block that computes meanwhile; what has not, does not:
    there is nothing before it to be hidden."""
    lost, ones = [jnp.full(8, jnp.inf), jnp.ones(2)], {"a": jnp.ones(4)}

    def summed(sums: Any, size: int) -> Any:
        return PrefetchedBlocks(*[None] * 5, sums).summed(ones, [jnp.ones(size)], lost)["a"]  # type: ignore[arg-type]

    double = lambda tree: jax.tree.map(lambda leaf: 2 * leaf, tree)  # noqa: E731
    assert jnp.isnan(summed(double, 8)).all() and (summed(double, 4) == 2).all()
    assert summed(None, 8) is ones["a"] and summed(lambda tree: tree, 8) is ones["a"]


def stacks(jaxpr: Any, layers: int) -> set[str]:
    """Dtypes of what is written a block after the other."""
    written = [each.outvars[0].aval for _, each in equations(jaxpr) if each.primitive.name == "dynamic_update_slice"]
    return {str(aval.dtype) for aval in written if aval.shape[0] == layers}


NARROW = {"zero3": {"data": 2, "fsdp": 2}, "zero2": {"data": 2, "fsdp": 2}, "ddp": {"data": 2}}


@pytest.mark.parametrize("strategy", levels(NARROW, slow=3))
def test_gradients_rest_in_the_dtype_that_they_were_reduced_in(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At half the memory, and with the bits that they would have in the parameters' dtype."""
    model, sync = config("llama", tied=False, layers=5, vocab=64), GradSync(bucket_mb=1e-3)
    half = POLICIES["bf16"]._replace(reduce=jnp.bfloat16)

    def made(policy: Precision) -> tuple[set[str], Callable[[], Any]]:
        mesh, tx, definition = make_mesh(**NARROW[strategy]), optax.sgd(0.1), gpt(model, max_length=SEQ)
        target = state_target(definition, tx, mesh, strategy=strategy, min_shard_bytes=0)
        step = make_train_step(
            definition, tx, mesh, strategy=strategy, precision=policy, prefetch=1, grad_sync=sync, return_grads=True
        )
        batch = jax.device_put(make_batch(model), NamedSharding(mesh, BATCH_SPEC))
        grads = lambda: step(place_params(initial(model, "bf16"), tx, target), batch)[1]["grads"]  # noqa: E731
        return stacks(step.jitted(target).trace(target, batch).jaxpr, 5), grads

    found, grads = made(half)
    assert found == {"bfloat16"} and made(POLICIES["bf16"])[0] == {"float32"}
    got = grads()
    monkeypatch.setattr(PrefetchedBlocks, "stored", lambda self, diff: zeros_varying_like(diff))
    wide, want = made(half)
    assert wide == {"float32"}
    jax.tree.map(np.testing.assert_array_equal, got, want())


def test_what_waits_waits_for_the_largest_leaf() -> None:
    """A small one may not have travelled at all: nothing would wait for the others."""
    done = {"bias": jnp.full(2, jnp.inf), "kernel": jnp.ones((2, 3))}
    assert int(opaque_index(done, 5)) == 5 and not jnp.isnan(order_after({"x": jnp.ones(2)}, done)["x"]).any()
    lost = {"bias": jnp.ones(2), "kernel": jnp.full((2, 3), jnp.inf)}
    assert int(opaque_index(lost, 5)) == 6 and jnp.isnan(order_after({"x": jnp.ones(2)}, lost)["x"]).all()


@pytest.mark.slow
def test_what_cannot_wait_for_the_largest_leaf_waits_for_none() -> None:
    """Which is split over tensor parallelism, say: a gradient that is not may be a block's last."""
    mesh = make_mesh(fsdp=2, tensor=2)

    def region(wide: jax.Array, narrow: jax.Array) -> Any:
        grads = {"kernel": jnp.full((2, 3), jnp.inf) + wide.sum(), "bias": jnp.full(2, jnp.inf) + narrow.sum()}
        return order_after({"wide": wide, "narrow": narrow}, largest_gradient(grads))

    specs = P("fsdp", "tensor"), P("fsdp")
    run = jax.shard_map(region, mesh=mesh, in_specs=specs, out_specs=dict(zip(("wide", "narrow"), specs, strict=True)))
    found = run(jnp.ones((2, 2)), jnp.ones(2))
    assert jnp.isnan(found["wide"]).all() and not jnp.isnan(found["narrow"]).any()


@pytest.mark.parametrize(("data", "limit"), [(1, 2), (2, 3)])
def test_what_the_compiler_is_told(data: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's collectives become one, two blocks' do not; two may be under way."""
    model = config("llama", tied=False, layers=3, vocab=64, width=1024)
    made, tx = gpt(replace(model, mlp_width=4096), max_length=SEQ), optax.sgd(0.1)
    mesh = abstract_mesh(data=data, fsdp=8 // data)
    params = state_target(made, tx, mesh, strategy="zero3").params
    told = compiler_options(params, StrategyOptions(POLICIES["bf16"], GradSync(), prefetch=1), mesh)
    assert told is not None and told[AT_ONCE] == limit and told[BY_TWO] is told[LATENCY_HIDING] is True
    block = sum(leaf.size // 3 for leaf in jax.tree.leaves(params["blocks"]))
    ops = ("all_gather", "reduce_scatter", "all_reduce")
    thresholds = {op: told.get(f"xla_gpu_{op}_combine_threshold_bytes", 0) for op in ops}
    assert block * 2 < thresholds["all_gather"] < 2 * block * 2  # bf16 gathers in bf16 and reduces in fp32
    # A reduction counts by what comes out of it, so that two blocks' shards would still be little.
    shards = block * 4 // mesh.shape["fsdp"]
    assert shards < thresholds["reduce_scatter"] < 2 * shards
    assert thresholds["all_reduce"] == 0 if data == 1 else thresholds["all_reduce"] >= max(shards, 30 * 2**20)
    assert compiler_options(params, StrategyOptions(POLICIES["bf16"], GradSync()), mesh) == {NO_ZEROS: True}
    assert compiler_options(params, StrategyOptions(POLICIES["bf16"], GradSync(), prefetch=1), make_mesh()) is None
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/tmp --{AT_ONCE}=1 --{LATENCY_HIDING}_not=1")
    less = compiler_options(params, StrategyOptions(POLICIES["bf16"], GradSync(), prefetch=1), mesh)
    assert less == {name: value for name, value in told.items() if name != AT_ONCE}  # a flag wins


def test_some_products_are_not_taken_from_triton() -> None:
    """XLA:GPU would choose between its kernels for minutes."""
    mesh = abstract_mesh(data=1)
    params = state_target(
        gpt(config("gpt2", tied=True, layers=2, vocab=64), max_length=SEQ), optax.sgd(0.1), mesh
    ).params

    def told(policy: str) -> dict[str, int | bool] | None:
        return compiler_options(params, StrategyOptions(POLICIES[policy], GradSync()), mesh)

    assert told("fp8") == {NO_ZEROS: True, TRITON: False}
    assert told("fp32") == told("bf16") == {NO_ZEROS: True}
    for precision in ("highest", "float32"):
        with jax.default_matmul_precision(precision):
            assert told("fp32") == {NO_ZEROS: True, TRITON: False}
            assert told("bf16") == {NO_ZEROS: True}


def test_slices_cover_a_leaf_that_rounds_do_not_divide() -> None:
    leaf = np.arange(14.0).reshape(7, 2)
    slices = HeadSlices(lambda tree: tree, {"a": 0}, 3)
    whole = {"a": jnp.zeros((7, 2))}
    for i in range(3):
        whole = slices.paste(whole, i, slices.cut({"a": leaf}, i))
    np.testing.assert_array_equal(whole["a"], leaf)
    with jax.numpy_dtype_promotion("standard"):
        traced = jax.jit(lambda i: slices.cut({"a": leaf}, i))(2)
    np.testing.assert_array_equal(traced["a"], leaf[4:])


def test_what_a_function_reads() -> None:
    tree = {name: np.ones(2, np.float32) for name in "abcd"}
    read = first_reads(lambda tree: (tree["b"] * 2 + tree["a"], tree["c"]), tree)
    assert read["b"] < read["a"] < read["c"] < read["d"] == float("inf")
