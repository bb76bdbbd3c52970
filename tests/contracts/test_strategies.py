"""Contracts of every strategy in the folder: where parameters rest, what is communicated, in which dtype."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import ancestors, collectives, scans_with
from levels import levels, others_slow

from jaxdist import registry
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.errors import UserError
from jaxdist.init import init_state, state_target
from jaxdist.mesh import abstract_mesh, make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.options import StrategyOptions
from jaxdist.parallel.strategies._sharded import place_sharded
from jaxdist.precision.policy import POLICIES
from jaxdist.specs import (
    BATCH_SPEC,
    Shard,
    active_specs,
    bytes_per_device,
    marked_specs,
    placed_specs,
    shard_of,
    spec_axes,
)
from jaxdist.step import make_train_step

NAMES = registry.names("jaxdist.parallel.strategies")
ALGORITHMS = [name for name in registry.names("jaxdist.collectives.algorithms") if name not in ("native", "ring")]
LAYERS = 3
LLAMA = ModelConfig(style="llama", layers=LAYERS, width=16, heads=4, vocab=32, mlp_width=32)
GPT2 = ModelConfig(style="gpt2", layers=LAYERS, width=16, heads=4, vocab=32)
WIDE = dataclasses.replace(LLAMA, width=128, mlp_width=256)
# Leaves of a Llama-style unit: norms of 16, and matrices.
BLOCK, EMBED, HEAD = 6, 1, 2


def batch(size: int = 16, length: int = 8) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, 32, (size, length + 1)).astype(np.int32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((size, length), np.float32)}


def jaxpr_of(strategy: str, *, data: int = 1, fsdp: int = 1, model: ModelConfig = LLAMA, **options: Any) -> Any:
    mesh, tx, definition = make_mesh(data=data, fsdp=fsdp), optax.sgd(1.0), gpt(model, max_length=8)
    step = make_train_step(definition, tx, mesh, strategy=strategy, **options)
    target = state_target(definition, tx, mesh, strategy=strategy)
    return step.jitted(target).trace(target, batch()).jaxpr


def wide_block() -> int:
    shapes = gpt(dataclasses.replace(WIDE, layers=1), max_length=4).shapes["blocks"]
    return sum(4 * leaf.size for leaf in jax.tree.leaves(shapes))


def temporary_of(strategy: str, layers: int, *, rows: int, length: int, prefetch: int = 0) -> int:
    """Bytes beside the state, on 8 devices with full remat."""
    mesh, tx = make_mesh(fsdp=8), optax.sgd(0.1)
    model = gpt(dataclasses.replace(WIDE, layers=layers), max_length=length)
    step = make_train_step(model, tx, mesh, strategy=strategy, remat="full", prefetch=prefetch)
    data = jax.device_put(batch(rows, length), NamedSharding(mesh, BATCH_SPEC))
    program = step.lower(state_target(model, tx, mesh, strategy=strategy), data).compile()
    return int(program.memory_analysis().temp_size_in_bytes)


def test_zero3_gathers_each_block_forward_and_backward_and_reduces_each_unit_once() -> None:
    counts = collectives(jaxpr_of("zero3", fsdp=8), "fsdp")
    leaves = LAYERS * BLOCK + EMBED + HEAD
    # The gradient of a look-up does not read the table, and the head's backward pass is next: not gathered again.
    assert counts.pop(("all_gather", "float32")) == leaves + LAYERS * BLOCK
    assert counts.pop(("reduce_scatter", "float32")) == leaves
    # Loss and weight, together. Every parameter is a shard, so `finish` has nothing to add.
    assert counts == {("psum", "float32"): 1}


def test_zero3_reduces_once_a_microbatch() -> None:
    counts = collectives(jaxpr_of("zero3", fsdp=4, microbatches=4), "fsdp")
    assert counts["reduce_scatter", "float32"] == 4 * (LAYERS * BLOCK + EMBED + HEAD)


def test_zero3_keeps_what_it_gathered_if_told_so() -> None:
    counts = collectives(jaxpr_of("zero3", fsdp=4, reshard_after_forward=False), "fsdp")
    leaves = LAYERS * BLOCK + EMBED + HEAD
    assert (counts["all_gather", "float32"], counts["reduce_scatter", "float32"]) == (leaves, leaves)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_zero1_gathers_once_and_reduces_once(microbatches: int) -> None:
    counts = collectives(jaxpr_of("zero1", fsdp=4, microbatches=microbatches), "fsdp")
    assert counts.pop(("all_gather", "float32")) == LAYERS * BLOCK + EMBED + HEAD
    assert counts.pop(("reduce_scatter", "float32")) == BLOCK + EMBED + HEAD  # of whole stacks
    assert counts == {("psum", "float32"): 1}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_zero2_gathers_once_and_reduces_every_unit_once_a_microbatch(microbatches: int) -> None:
    counts = collectives(jaxpr_of("zero2", fsdp=4, microbatches=microbatches), "fsdp")
    leaves = LAYERS * BLOCK + EMBED + HEAD
    assert counts.pop(("all_gather", "float32")) == leaves
    assert counts.pop(("reduce_scatter", "float32")) == microbatches * leaves
    assert counts == {("psum", "float32"): 1}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_ddp_reduces_once_a_step_in_one_bucket(microbatches: int) -> None:
    counts = collectives(jaxpr_of("ddp", data=4, microbatches=microbatches), "data")
    # The gradients; loss and weight.
    assert counts == {("psum", "float32"): 2}


def test_ddp_reduces_blocks_that_fill_a_bucket_in_the_backward_pass() -> None:
    small = GradSync(bucket_mb=1e-6)  # every leaf goes alone
    counts = collectives(jaxpr_of("ddp", data=4, grad_sync=small), "data")
    assert counts == {("psum", "float32"): LAYERS * BLOCK + EMBED + HEAD + 1}
    counts = collectives(jaxpr_of("ddp", data=4, microbatches=4, grad_sync=small), "data")
    assert counts == {("psum", "float32"): BLOCK + EMBED + HEAD + 1}  # of whole stacks, once a step


@pytest.mark.parametrize("microbatches", others_slow([1, 4], 4))
def test_prefetching_gathers_two_blocks_and_the_head_once_and_the_embedding_never(microbatches: int) -> None:
    """The head's matrix in as many slices as there are blocks; its norm has no dim left to cut."""
    counts = collectives(jaxpr_of("zero3", fsdp=4, microbatches=microbatches, prefetch=1), "fsdp")
    slices = LAYERS * (HEAD - 1) + 1
    assert counts == {
        ("all_gather", "float32"): microbatches * (2 * LAYERS * BLOCK - min(LAYERS, 2) * BLOCK + slices),
        ("reduce_scatter", "float32"): microbatches * (LAYERS * BLOCK + slices),
        ("all_gather", "int32"): microbatches,  # everybody's tokens
        ("all_to_all", "float32"): 2 * microbatches,  # columns of h, and of its gradient
        ("psum", "float32"): 1,
    }


@pytest.mark.slow
def test_what_a_prefetching_round_waits_for() -> None:
    """A gather of the forward loop, and a reduction, only for what is carried; a gather of the backward loop for the
    reduction, and for a gradient of the block beside it. No product waits for a collective of its own round."""
    deep = dataclasses.replace(LLAMA, layers=6)
    jaxpr = jaxpr_of("zero3", fsdp=4, prefetch=1, remat="full", model=deep)

    def loops(primitive: str) -> list[Any]:
        return [scan.params["jaxpr"].jaxpr for scan in scans_with(jaxpr, primitive)]

    forward, backward = loops("all_gather")
    assert loops("reduce_scatter") == [backward]
    assert not ancestors(forward, "all_gather") & {"dot_general", "reduce_scatter"}
    assert not ancestors(backward, "reduce_scatter") & {"dot_general", "all_gather"}
    assert ancestors(backward, "all_gather") >= {"dot_general", "reduce_scatter"}
    assert not any(ancestors(body, "dot_general") & {"all_gather", "reduce_scatter"} for body in (forward, backward))
    plain = jaxpr_of("zero3", fsdp=4, remat="full", model=deep)  # there they are part of the block that is recomputed
    assert not list(scans_with(plain, "reduce_scatter"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch": 2}, "parallel.prefetch: 2 is out of range; allowed: 0, 1"),
        ({"prefetch": 1, "reshard_after_forward": False}, "set parallel.reshard_after_forward to true"),
        ({"prefetch": 1, "grad_sync": GradSync(deterministic=True)}, "deterministic"),
    ],
)
def test_what_does_not_go_with_prefetching_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        jaxpr_of("zero3", fsdp=4, **options)


def test_hybrid_sharding_reduces_shards_over_data() -> None:
    jaxpr = jaxpr_of("zero3", data=2, fsdp=4)
    assert collectives(jaxpr, "data") == {("psum", "float32"): 2}
    assert collectives(jaxpr, "fsdp")["reduce_scatter", "float32"] == LAYERS * BLOCK + EMBED + HEAD


@pytest.mark.parametrize("name", others_slow(NAMES, "ddp", "zero3"))
def test_bf16_gathers_in_bf16_and_reduces_in_fp32(name: str) -> None:
    counts = collectives(jaxpr_of(name, precision="bf16", data=2, fsdp=4), "fsdp")
    dtypes = {"all_gather": "bfloat16", "reduce_scatter": "float32", "psum": "float32"}
    assert counts and all(dtypes[op] == dtype for op, dtype in counts)


CUBE, ODD = {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 3}
EVERYDAY = [("zero3", CUBE, GPT2), ("zero1", ODD, GPT2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "config"),
    [
        *levels(EVERYDAY, everyday=2),
        *levels(itertools.product(NAMES, (CUBE, ODD, {}, {"data": 8}, {"fsdp": 8}), (GPT2, LLAMA)), slow=8),
    ],
    ids=lambda value: value.style if isinstance(value, ModelConfig) else str(value),
)
def test_state_bytes_are_exact_and_fully_aliased(name: str, sizes: dict[str, int], config: ModelConfig) -> None:
    mesh, tx = make_mesh(**sizes), optax.adamw(1e-3)
    model = gpt(config, max_length=8)
    state = init_state(model, tx, mesh, strategy=name)
    target = state_target(model, tx, mesh, strategy=name)
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == wanted.sharding
        assert leaf.shape == wanted.shape
    expected = sum(bytes_per_device(leaf, leaf.sharding.spec, mesh) for leaf in jax.tree.leaves(target))
    for device in mesh.devices.flat:
        held = [s.data.nbytes for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards if s.device == device]
        assert sum(held) == expected
    data = jax.device_put(batch(24 if sizes.get("fsdp") == 3 else 16), NamedSharding(mesh, BATCH_SPEC))
    step = make_train_step(model, tx, mesh, strategy=name)
    assert step.lower(state, data).compile().memory_analysis().alias_size_in_bytes == expected


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("zero")])
def test_zero_shrinks_the_state_by_the_axis(name: str) -> None:
    model, tx = gpt(LLAMA, max_length=8), optax.adamw(1e-3)

    def held(**sizes: int) -> int:
        mesh = make_mesh(**sizes)
        target = state_target(model, tx, mesh, strategy=name)
        return sum(bytes_per_device(leaf, leaf.sharding.spec, mesh) for leaf in jax.tree.leaves(target))

    counters = 24  # TrainState.step, the four numbers of its guard, and Adam's count, four bytes each
    assert held(fsdp=8) - counters == (held() - counters) // 8


@pytest.mark.parametrize("name", levels(reversed(NAMES), everyday=4))
def test_nothing_compiles_after_the_first_step(name: str) -> None:
    mesh, tx = make_mesh(data=2, fsdp=2, tensor=2), optax.adamw(1e-3)
    model = gpt(GPT2, max_length=8)
    state, step = init_state(model, tx, mesh, strategy=name), make_train_step(model, tx, mesh, strategy=name)
    for _ in range(3):
        state, _ = step(state, jax.device_put(batch(), NamedSharding(mesh, BATCH_SPEC)))
    assert step.jitted(state)._cache_size() == 1


def test_sharding_takes_the_first_free_dim_and_leaves_the_stack_alone() -> None:
    mesh = make_mesh(fsdp=4, tensor=2)

    def place(shape: tuple[int, ...], *spec: Any, small: int = 0) -> P:
        leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
        return place_sharded(leaf, P(*spec), mesh, min_shard_bytes=small)

    assert place((8, 16), None, None) == P("fsdp", None)
    assert place((6, 16), None, None) == P(None, "fsdp")
    assert place((16, 8), "tensor", None) == P("tensor", "fsdp")
    assert place((32, 6), "tensor", None) == P(("tensor", "fsdp"), None)  # 6 is not divisible by 4
    assert place((8, 3), "pipe", None) == P("pipe", None)  # nothing fits: whole
    assert place((7,), None) == P(None)
    assert place((8, 16, 4), "pipe", None, None, small=257) == P("pipe", None, None)  # 256 bytes a block
    assert place((8, 16, 4), "pipe", None, None, small=256) == P("pipe", "fsdp", None)


def test_a_shard_over_expert_is_told_from_a_layers_own() -> None:
    alone, both = abstract_mesh(expert=4), abstract_mesh(expert=4, context=2)
    place = lambda shape, mesh, *spec: place_sharded(  # noqa: E731
        jax.ShapeDtypeStruct(shape, jnp.float32), P(*spec), mesh, min_shard_bytes=0
    )
    assert place((8, 16), alone, None, None) == P(("fsdp", "expert"), None)  # fsdp has one device: it tells
    assert place((8, 16), alone, "expert", None) == P("expert", None)
    assert place((8, 16), both, "expert", None) == P("expert", "context")
    assert place((6, 10), both, None, None) == P("context", None)  # 4 divides neither
    assert place((4, 3), both, None, None) == P(("fsdp", "expert"), None)
    assert shard_of(P("expert", None)) is None
    assert shard_of(P(("fsdp", "expert"))) == Shard(0, ("fsdp", "expert"))
    assert shard_of(P(("expert", "fsdp", "context"))) == Shard(0, ("fsdp", "context"))
    specs = [P(("fsdp", "expert"), None), P("expert", "fsdp"), P(("tensor", "fsdp", "expert", "context"))]
    stored = placed_specs(specs, alone)
    assert stored == [P(("fsdp", "expert"), None), P("expert", None), P(("fsdp", "expert"))]
    assert active_specs(specs, alone) == [P("expert", None), P("expert", None), P("expert")]
    assert marked_specs(active_specs(specs, alone), [P(), P("expert", None), P("tensor")]) == stored


@pytest.mark.parametrize(
    ("name", "sizes"), levels([("zero3", CUBE), ("zero3", {"fsdp": 8}), ("ddp", {"tensor": 4})], everyday=3)
)
def test_every_init_is_the_same_array(name: str, sizes: dict[str, int]) -> None:
    model, tx = gpt(GPT2, max_length=8), optax.adamw(1e-3)
    want = jax.device_get(init_state(model, tx, make_mesh(), strategy="ddp").params)
    got = jax.device_get(init_state(model, tx, make_mesh(**sizes), strategy=name).params)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_layer_specs_that_do_not_divide_are_named() -> None:
    model, tx = gpt(LLAMA, max_length=8), optax.sgd(1.0)
    with pytest.raises(UserError, match=r"blocks.*kernel: dim . of .* not divisible by tensor=3"):
        init_state(model, tx, make_mesh(tensor=3), strategy="ddp")


def test_unknown_strategy_lists_the_folder() -> None:
    with pytest.raises(UserError, match="'zero33' is not known; allowed: .*ddp, .*zero1, .*did you mean 'zero3'"):
        get_strategy(StrategyOptions(POLICIES["fp32"], strategy="zero33"))


def test_optimizer_state_is_sharded_like_its_parameter() -> None:
    mesh, tx = make_mesh(fsdp=8), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    target = state_target(gpt(LLAMA, max_length=8), tx, mesh, strategy="zero3")
    sharded = [leaf for leaf in jax.tree.leaves(target.opt_state) if "fsdp" in spec_axes(leaf.sharding.spec)]
    assert len(sharded) == 2 * len(jax.tree.leaves(target.params))


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        *levels(itertools.product(NAMES, ("native", "ring")), everyday=3),
        *levels(itertools.product(NAMES, ALGORITHMS), slow=4),
    ],
)
def test_the_step_lowers_for_gpus(name: str, algorithm: str) -> None:
    """As far as a machine without a GPU can take it: StableHLO for CUDA, with every collective in it."""
    mesh, tx = make_mesh(data=2, fsdp=2, tensor=2), optax.adamw(1e-3)
    model = gpt(GPT2, max_length=8)
    state = state_target(model, tx, mesh, strategy=name)
    step = make_train_step(model, tx, mesh, strategy=name, precision="bf16", grad_sync=GradSync(algorithm))
    text = step.jitted(state).trace(state, batch()).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.all_reduce" in text
    assert ("stablehlo.collective_permute" in text) == (algorithm != "native")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "blocks"), [("zero1", 2.0), ("zero2", 1 + 1 / 8), ("zero3", 1 / 8)])
def test_temporary_memory_grows_by_what_a_block_must_leave(name: str, blocks: float) -> None:
    """Compiled, not run. With full remat a block leaves its input, and its gradient: whole (zero1) or a shard; zero1
    and zero2 also hold its copy."""
    rows, length, block = 32, 32, wide_block()
    temporary = functools.partial(temporary_of, name, rows=rows, length=length)
    given = rows // 8 * length * WIDE.width * 4
    sizes = [temporary(layers) for layers in (4, 8, 16)]
    for slope in ((sizes[1] - sizes[0]) / 4, (sizes[2] - sizes[1]) / 8):
        assert slope == pytest.approx(given + blocks * block, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("prefetch", "whole"), [(0, 2), (1, 3)])
def test_few_blocks_are_whole_at_a_time(prefetch: int, whole: int) -> None:
    """zero3: one gathered and its gradients; with prefetching also one gathered ahead. So few tokens that activations
    do not count."""
    temporary = functools.partial(temporary_of, "zero3", rows=8, length=4, prefetch=prefetch)
    sizes, block, given = [temporary(layers) for layers in (8, 16)], wide_block(), 4 * WIDE.width * 4
    slope = (sizes[1] - sizes[0]) / 8
    # The compiler leaves gaps between temporary arrays, which differ from depth to depth by 0.1 block in all.
    assert slope == pytest.approx(given + block / 8, abs=0.1 * block / 8)
    assert whole - 1 < (sizes[0] - 8 * slope) / block < whole
