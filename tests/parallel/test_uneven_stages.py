"""Stages with different numbers of blocks train like one device, and rows that hold no block stay zero."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import oracle
import pipelines
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from levels import levels, others_slow
from pipelines import Case

from jaxdist.collectives import to_varying
from jaxdist.config.sections.optimizer import OptimizerConfig
from jaxdist.errors import UserError
from jaxdist.generation.forward import make_logits
from jaxdist.mesh import BATCH_LIKE, make_mesh
from jaxdist.optim.make import make_optimizer
from jaxdist.parallel.blocks.branch import by_condition, by_mask
from jaxdist.parallel.blocks.layers import BlockRows, OneBlock, ScannedBlocks
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.options import StepOptions, StrategyOptions
from jaxdist.parallel.pipeline.relay import blocks_of_chunk
from jaxdist.parallel.pipeline.stages import arrange, arrange_rows, order_of_blocks
from jaxdist.precision.policy import POLICIES
from jaxdist.specs import BATCH_SPEC, batch_spec
from jaxdist.step import make_train_step
from jaxdist.trainer.evaluation import make_eval_step

# With biases: a block of zeros would be the identity, but not its gradients.
FIRST = Case("one_f_one_b", 2, "gpt2", True, "zero1", 2, (1, 2, 1), layers=3, stages=(1, 2))
CASES = [
    Case("zero_bubble", 2, "llama", False, "zero3", 2, (1, 2, 1), layers=3, stages=(2, 1)),
    *(
        Case(
            schedule,
            pipe,
            ("llama", "gpt2")[(i + j) % 2],
            (i + j) % 3 == 0,
            strategy,
            4,
            mesh,
            layers=sum(stages),
            stages=stages,
            remat=("none", "full")[j % 2],
        )
        for i, schedule in enumerate(pipelines.SCHEDULES)
        for j, (pipe, stages, strategy, mesh) in enumerate(
            (
                (2, (3, 1), "zero2", (1, 2, 2)),
                (4, (2, 1, 1, 1), "ddp", (2, 1, 1)),
                (3, (1, 3, 1), "zero3", (1, 2, 1)),
                (2, (1, 2), "zero1", (2, 2, 1)),
                (2, (1, 4), "zero3", (1, 1, 2)),
            )
        )
        if (j - i) % 5 < 2  # each layout and each schedule, not their product
    ),
    *(
        Case(schedule, 2, "llama", True, "zero3", 4, (1, 2, 1), layers=3, stages=(1, 2), pipeline_cond=False)
        for schedule in ("one_f_one_b", "zero_bubble")
    ),
    Case("one_f_one_b", 2, "gpt2", True, "zero3", 4, (1, 2, 1), layers=9, stages=(5, 4), remat="sqrt"),
    Case("gpipe", 2, "llama", False, "ddp", 2, (1, 1, 2), layers=4, stages=(1, 3), remat="sqrt", pipeline_cond=False),
    *(
        Case(schedule, 4, "gpt2", True, "ddp", 4, (1, 1, 2), layers=5, stages=(1, 2, 1, 1), dropout=0.2, remat=remat)
        for schedule, remat in zip(pipelines.SCHEDULES, ("none", "full") * 2, strict=True)
    ),
    Case("interleaved", 2, "gpt2", True, "zero2", 4, (1, 2, 1), layers=5, chunks=2, stages=(1, 2, 1, 1), dropout=0.2),
    Case("interleaved", 2, "llama", False, "ddp", 4, (1, 1, 2), layers=6, chunks=2, stages=(1, 3, 1, 1), remat="full"),
    Case("interleaved", 1, "gpt2", True, "ddp", 4, (1, 2, 1), layers=3, chunks=2, stages=(1, 2)),
]


@pytest.mark.parametrize("case", levels(CASES, slow=12, common=3), ids=str)  # everyday: the first, below
def test_uneven_stages_equal_one_device(case: Case) -> None:
    pipelines.check_wide(case)


def empty_rows(tree: Any, case: Case) -> list[np.ndarray]:
    """Of every leaf of blocks in the tree, the rows that hold no block."""
    order = order_of_blocks(case.layers, stages=case.pipe, chunks=case.chunks, blocks=case.stages)
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
    return [leaf[order < 0] for path, leaf in leaves if "blocks" in jax.tree_util.keystr(path)]


def unreadable(params: Any, case: Case) -> Any:
    """With nan for zero in rows that hold no block."""
    order = order_of_blocks(case.layers, stages=case.pipe, chunks=case.chunks, blocks=case.stages)
    blocks = jax.tree.map(lambda leaf: leaf.at[np.flatnonzero(order < 0)].set(np.nan), params["blocks"])
    return {**params, "blocks": jax.device_put(blocks, jax.tree.map(lambda leaf: leaf.sharding, params["blocks"]))}


@pytest.mark.slow
def test_a_run_on_uneven_stages() -> None:
    """Gradients, parameters, evaluation and logits are one device's; what holds no block is zero after weight decay."""
    case = FIRST
    with jax.enable_x64(True):
        want = layouts.reference(pipelines.config_of(case), 32, "fp64")
        model, state, step, back = pipelines.start(case)
        mesh, specs = make_mesh(pipe=2, fsdp=2), jax.tree.map(lambda leaf: leaf.sharding.spec, state.params)
        strategy = get_strategy(StrategyOptions(POLICIES["fp64"], strategy=case.strategy))
        batch = jax.device_put(layouts.make_batch(32, 0), NamedSharding(mesh, BATCH_SPEC))
        total, weight = make_eval_step(model, mesh, specs, strategy)(unreadable(state.params, case), batch)["loss"]
        assert float(total / weight) == pytest.approx(want.losses[0], rel=1e-10)
        for i in range(3):
            state, metrics = step(state, layouts.make_batch(32, i))
            grads = jax.device_get(metrics["grads"])
            assert float(metrics["loss"]) == pytest.approx(want.losses[i], rel=1e-10)
            assert oracle.error(pipelines.reordered(grads, back), want.grads[i]) < 1e-10
            assert metrics["grad_norm"] == pytest.approx(optax.tree.norm(want.grads[i]), rel=1e-10)
            assert not any(rows.any() for rows in empty_rows(grads, case))
        assert oracle.error(pipelines.reordered(jax.device_get(state.params), back), want.params) < 1e-10
        empty = empty_rows((state.params, state.opt_state), case)
        assert len(empty) == 3 * len(jax.tree.leaves(state.params["blocks"])) and all(len(rows) == 1 for rows in empty)
        assert not any(rows.any() for rows in empty)
        got = logits_of(model, mesh, specs, strategy, unreadable(state.params, case))
        plain, alone = pipelines.model_of(case._replace(pipe=1, stages=())), make_mesh()
        there = jax.device_put(want.params, NamedSharding(alone, P()))
        whole = jax.tree.map(lambda _: P(), plain.shapes)
        assert oracle.error(got, logits_of(plain, alone, whole, strategy, there)) < 1e-10


def logits_of(model: Any, mesh: Any, specs: Any, strategy: Any, params: Any) -> jax.Array:
    keys = jax.random.split(jax.random.key(0), 32)
    logits = make_logits(model, strategy, specs)

    def region(params: Any, inputs: jax.Array, keys: jax.Array) -> jax.Array:
        return logits(params, to_varying({"inputs": inputs, "keys": keys}, BATCH_LIKE), jnp.int32(3))

    rows = batch_spec(mesh)
    run = jax.jit(jax.shard_map(region, mesh=mesh, in_specs=(specs, rows, rows), out_specs=rows))
    return run(params, layouts.make_batch(32, 0)["inputs"], keys)


CHOICES = pytest.mark.parametrize("choose", [by_condition, by_mask])


@CHOICES
def test_rows_without_a_block_are_passed_over(choose: Callable[..., Any]) -> None:
    """Forward, backward and the two halves of backward; a row that is read would spoil everything with its nan."""
    layers_SL = np.array([[1, 0, 0], [2, 3, 4]], np.int32)
    rng = np.random.default_rng(0)
    weights_SL = np.where(layers_SL[..., None, None] > 0, rng.normal(size=(2, 3, 4, 4)), np.nan)
    h_S, dh_S = rng.normal(size=(2, 2, 5, 4))

    def block(params: Any, h: jax.Array, layer: jax.Array, keys: Any) -> jax.Array:
        return jnp.tanh(h @ params["w"]) * layer.astype(h.dtype)

    def region(w: jax.Array, layers: jax.Array, h: jax.Array, dh: jax.Array) -> Any:
        w, layers, h, dh = w[0], layers[0], h[0], dh[0]
        blocks = ScannedBlocks(OneBlock(lambda diff, captured, wanted: diff, block, choose))
        rows = BlockRows({"w": w}, {"w": ()}, layers)
        out, saved = blocks.forward(rows, h, None)
        grads, before = blocks.backward(rows, saved, dh)
        crossing, again = blocks.backward_input(rows, saved, dh)
        split = blocks.backward_weights(rows, saved, crossing, dh)
        return jax.tree.map(lambda x: x[None], (out, grads["w"], before, split["w"], again))

    with jax.enable_x64(True):
        mesh, spec = make_mesh(pipe=2), P("pipe")
        run = jax.jit(jax.shard_map(region, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 5))
        got = jax.device_get(run(weights_SL, layers_SL, h_S, dh_S))
        for stage, held in enumerate(layers_SL > 0):

            def plain(w: jax.Array, h: jax.Array, layers: Any = layers_SL[stage][held]) -> jax.Array:
                for each, layer in zip(w, layers, strict=True):
                    h = block({"w": each}, h, layer, None)
                return h

            out, pull = jax.vjp(plain, weights_SL[stage][held], h_S[stage])
            grads, before = pull(jnp.asarray(dh_S[stage]))
            for result, want in zip(got, (out, grads, before, grads, before), strict=True):
                rows = result[stage] if want.shape == result[stage].shape else result[stage][held]
                np.testing.assert_allclose(rows, want, rtol=1e-12)
            assert not got[1][stage][~held].any() and not got[3][stage][~held].any()


@pytest.mark.slow
def test_rows_and_numbers() -> None:
    """By hand: two stages of two chunks. Numbers are those of the model, which dropout keys fold."""
    order = order_of_blocks(6, stages=2, chunks=2, blocks=(1, 2, 1, 2))
    assert order.tolist() == [0, -1, 3, -1, 1, 2, 4, 5]
    assert order_of_blocks(30, stages=4, blocks=(7, 8, 8, 7))[[6, 7, 8, 30, 31]].tolist() == [6, -1, 7, 29, -1]
    rows = arrange_rows({"a": np.arange(1, 13, dtype=np.int32).reshape(6, 2)}, order)["a"]
    assert rows[:3].tolist() == [[1, 2], [0, 0], [7, 8]]

    def numbers(leaf: jax.Array) -> jax.Array:
        parts = [blocks_of_chunk(leaf, (), chunk, chunks=2, counts=(1, 2, 1, 2)).layers for chunk in range(2)]
        return jnp.concatenate(parts)

    run = jax.shard_map(numbers, mesh=make_mesh(pipe=2), in_specs=P("pipe"), out_specs=P("pipe"))
    assert run(jnp.asarray(order)).tolist() == (order + 1).tolist()


def test_equal_stages_are_as_without() -> None:
    plain = pipelines.model_of(FIRST._replace(layers=4, stages=()), "fp32")
    assert arrange(plain, stages=2, blocks=(2, 2)) is plain
    chunked = arrange(plain, stages=2, chunks=2, blocks=(1, 1, 1, 1))
    assert chunked.stages == () and chunked.empty_rows == 0 and chunked.shapes == plain.shapes


def test_parameters_are_counted_without_rows_that_hold_none() -> None:
    plain, uneven = (
        pipelines.model_of(FIRST._replace(stages=stages, pipe=pipe), "fp32") for stages, pipe in (((), 1), ((1, 2), 2))
    )
    held = sum(leaf.size for leaf in jax.tree.leaves(plain.shapes))
    assert plain.parameters == uneven.parameters == held
    assert (plain.empty_rows, uneven.empty_rows) == (0, 1)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(uneven.shapes["blocks"])} == {4}


OPTIMIZERS = ("adamw", "sgd", "lion", "muon", "adafactor")


@pytest.mark.parametrize("name", others_slow(OPTIMIZERS, "adamw"))
def test_what_optimizers_do_to_zeros(name: str) -> None:
    """Zeros stay zeros, and blocks train as without them."""
    order = order_of_blocks(3, stages=2, blocks=(1, 2))
    tx = make_optimizer(OptimizerConfig(name=name, lr=0.1, weight_decay=0.1, clip_norm=0.5), steps=3)
    rng = np.random.default_rng(0)
    shapes = {"mlp": {"kernel": (3, 4, 6), "bias": (3, 6)}}

    def tree() -> Any:
        blocks = jax.tree.map(
            lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
            shapes,
            is_leaf=lambda node: isinstance(node, tuple),
        )
        head = {"kernel": jnp.asarray(rng.normal(size=(4, 2)), jnp.float32)}
        return {"embed": {}, "blocks": blocks, "head": head}

    def rows(tree: Any) -> Any:
        return pipelines.reordered(tree, order)

    @jax.jit
    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    plain = tree()
    padded = rows(plain)
    states = [tx.init(plain), tx.init(padded)]
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(3):
            grads = tree()
            plain, states[0] = update(plain, states[0], grads)
            padded, states[1] = update(padded, states[1], rows(grads))
    assert not any(np.asarray(leaf)[order < 0].any() for leaf in jax.tree.leaves(padded["blocks"]))
    assert oracle.error(padded["blocks"], rows(plain)["blocks"]) < 1e-6


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((1, 1), r"parallel.stages: \[1, 1\] has 2 sizes, 2 blocks in all; allowed: 2 sizes .*, 3 in all .*\[2,1\]"),
        ((1, 1, 1), r"parallel.stages: \[1, 1, 1\] has 3 sizes.*allowed: 2 sizes \(mesh.pipe 2\)"),
        ((3, 0), r"parallel.stages: \[3, 0\] .* 1 and more"),
        ((), r"mesh.pipe: 2 does not divide model.layers 3; .*; or parallel.stages=\[2,1\]"),
    ],
)
def test_sizes_that_do_not_fit_are_named(blocks: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        pipelines.model_of(FIRST._replace(stages=blocks), "fp32")
    assert "\n" not in str(error.value)


CHUNKED = FIRST._replace(layers=4, stages=(), chunks=2)


@pytest.mark.parametrize(("case", "sizes"), [(FIRST, r"blocks=\[1, 2\]"), (CHUNKED, "chunks=2")])
@pytest.mark.parametrize("pipe", [1, 4])
def test_another_number_of_stages_than_the_model_was_arranged_for_is_named(case: Case, sizes: str, pipe: int) -> None:
    """Four rows can be cut into four stages, too; chunks ran their blocks in another order than the model's."""
    model, mesh, tx = pipelines.model_of(case, "fp32"), make_mesh(pipe=pipe), layouts.optimizer()
    told = f"mesh.pipe: {pipe} is given, but .* 2 stages, with {sizes}; give both the same$"
    with pytest.raises(UserError, match=told):
        make_train_step(model, tx, mesh)
    with pytest.raises(UserError, match=told):
        make_eval_step(model, mesh, model.specs, get_strategy(StepOptions()))
