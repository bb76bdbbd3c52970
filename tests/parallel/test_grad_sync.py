"""`GradSync` in training: wire formats, the residual of int8 in the state and in checkpoints, the order of buckets."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from levels import levels

from jaxdist import init_state, make_mesh, make_train_step, registry, state_target
from jaxdist.checkpoint import Checkpoints
from jaxdist.collectives.algorithm import ALGORITHMS, get_algorithm
from jaxdist.collectives.cost import LINKS
from jaxdist.config.entries import AlgorithmFacts
from jaxdist.config.rules.grad_sync import LINK_NAMES
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.errors import UserError
from jaxdist.mesh import BATCH_LIKE
from jaxdist.models.gpt import gpt
from jaxdist.parallel.grad_sync import finish
from jaxdist.specs import map_specs
from jaxdist.state import TrainState

INT8 = GradSync("ring", wire_dtype="int8")
ROWS, LENGTH, VOCAB = 12, 8, 32  # 12 rows divide over 2, 3 and 4 devices
Mesh = dict[str, int]


def model() -> Any:
    return gpt(ModelConfig(layers=2, width=32, heads=4, vocab=VOCAB, mlp_width=64), max_length=LENGTH)


def batch(step: int) -> dict[str, np.ndarray]:
    """Each token follows from the one before: something to learn."""
    tokens = (np.random.default_rng(step).integers(0, VOCAB, (ROWS, 1)) + 5 * np.arange(LENGTH + 1)) % VOCAB
    inputs, targets = tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)
    return {"inputs": inputs, "targets": targets, "weights": np.ones((ROWS, LENGTH), np.float32)}


def train(sync: GradSync, sizes: Mesh, strategy: str, steps: int) -> tuple[TrainState, list[float]]:
    mesh, optimizer = make_mesh(**sizes), optax.adam(3e-3)
    state = init_state(model(), optimizer, mesh, strategy=strategy, grad_sync=sync)
    step = make_train_step(model(), optimizer, mesh, strategy=strategy, grad_sync=sync)
    losses = []
    for i in range(steps):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
    return state, losses


def test_a_configuration_allows_what_the_collectives_have() -> None:
    """The configuration is checked before jax is imported, from lists of its own."""
    assert tuple(LINKS) == LINK_NAMES
    lossy = [name for name in registry.names(ALGORITHMS) if get_algorithm(name).int8 is not None]
    assert AlgorithmFacts.with_fact(int8=True) == lossy


@pytest.mark.parametrize(
    ("strategy", "sizes", "sync"),
    levels(
        [
            ("zero3", {"data": 2, "fsdp": 2}, INT8),
            ("ddp", {"data": 3}, INT8),
            ("ddp", {"data": 3}, GradSync("ring", wire_dtype="bfloat16")),
            ("zero3", {"data": 2, "fsdp": 2}, GradSync("ring", wire_dtype="bfloat16")),
        ],
        slow=2,
    ),
    ids=str,
)
def test_training_with_fewer_bytes_reaches_the_same_loss(strategy: str, sizes: Mesh, sync: GradSync) -> None:
    _, want = train(GradSync(), sizes, strategy, 60)
    state, got = train(sync, sizes, strategy, 60)
    assert want[-1] < 0.5 * want[0]
    assert got != want  # something was rounded
    assert np.mean(got[-5:]) == pytest.approx(np.mean(want[-5:]), rel=0.02)
    residual = [float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(state.residual)]
    assert bool(residual) == (sync is INT8)
    assert all(value > 0 for value in residual)


@pytest.mark.slow
def test_a_state_without_the_residual_is_refused() -> None:
    mesh, optimizer = make_mesh(data=2), optax.adam(1e-3)
    step = make_train_step(model(), optimizer, mesh, grad_sync=INT8)
    with pytest.raises(UserError, match="residual.*one grad_sync"):
        step(init_state(model(), optimizer, mesh), batch(0))


def targets(sync: GradSync, sizes: Mesh, strategy: str) -> TrainState:
    return state_target(model(), optax.adam(3e-3), make_mesh(**sizes), strategy=strategy, grad_sync=sync)


@pytest.mark.slow
def test_the_residual_is_saved_and_goes_on(tmp_path: Path) -> None:
    """On the same mesh bit for bit; on another one as the sum over the copies, which is what the next step adds."""
    state, _ = train(INT8, {"data": 4}, "ddp", 3)
    with Checkpoints(tmp_path / "c", keep=1) as checkpoints:
        checkpoints.save(3, state, {})
        checkpoints.wait()
        same = checkpoints.restore(3, targets(INT8, {"data": 4}, "ddp"))
        jax.tree.map(np.testing.assert_array_equal, same.residual, state.residual)
        for sizes, strategy in (({"data": 2}, "ddp"), ({"data": 2, "fsdp": 2}, "zero3"), ({"data": 1}, "ddp")):
            target = targets(INT8, sizes, strategy)
            other = checkpoints.restore(3, target)
            for before, after, asked in zip(
                jax.tree.leaves(state.residual),
                jax.tree.leaves(other.residual),
                jax.tree.leaves(target.residual),
                strict=True,
            ):
                assert after.shape == asked.shape
                assert after.sharding == asked.sharding
                if after.shape[0] > 1:
                    np.testing.assert_allclose(np.asarray(after).sum(0), np.asarray(before).sum(0), atol=1e-9)
        assert checkpoints.restore(3, targets(GradSync(), {"data": 4}, "ddp")).residual == ()


@pytest.mark.slow
def test_a_checkpoint_without_residual_starts_one_at_zero(tmp_path: Path) -> None:
    state, _ = train(GradSync(), {"data": 2}, "ddp", 1)
    with Checkpoints(tmp_path / "c", keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        restored = checkpoints.restore(1, targets(INT8, {"data": 2}, "ddp"))
    assert {float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(restored.residual)} == {0.0}


def reduction(sizes: Mesh, sync: GradSync, shapes: dict[str, Any], specs: Any) -> Any:
    """The jitted end-of-step sums of gradients of these shapes, and their arguments."""
    mesh = make_mesh(**sizes)

    def region(grads: Any) -> Any:
        summed, _ = finish(jax.tree.map(lambda leaf: leaf[0], grads), (), specs, sync=sync, reduce_dtype=jnp.float32)
        return jax.tree.map(lambda leaf: leaf[None], summed)

    varying = map_specs(lambda spec: P(tuple(axis for axis in BATCH_LIKE if mesh.shape[axis] > 1)), specs)
    grads = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct((mesh.size, *shape), jnp.float32, sharding=NamedSharding(mesh, P("data"))),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    return jax.jit(jax.shard_map(region, mesh=mesh, in_specs=(varying,), out_specs=varying)), grads


SHAPES = {"blocks": {"a": (64, 64), "b": (64,)}, "embed": {"t": (128, 8)}, "head": {"n": (64,)}}
SPECS = jax.tree.map(lambda _: P(), SHAPES, is_leaf=lambda node: isinstance(node, tuple))


def test_buckets_are_filled_in_the_order_of_the_backward_pass() -> None:
    """head, blocks, embed: a limit that holds blocks and head leaves the embedding for the second bucket."""
    run, grads = reduction({"data": 4}, GradSync(bucket_mb=(64 * 64 + 128) * 4 / 2**20), SHAPES, SPECS)
    text = run.lower(grads).as_text()
    sizes = [int(size) for size in re.findall(r"stablehlo.all_reduce.*?tensor<(\d+)xf32>", text, re.DOTALL)]
    assert sizes == [64 * 64 + 128, 128 * 8]


def test_fusing_copies_each_gradient_once_at_most() -> None:
    """A bucket is one concatenation; a leaf that fills its bucket is not copied at all."""
    run, grads = reduction({"data": 4}, GradSync(), SHAPES, SPECS)
    text = run.lower(grads).compile().as_text()
    assert len(re.findall(r" all-reduce\(", text)) == 1
    assert len(re.findall(r" concatenate\(", text)) <= 1
    assert not re.findall(r"= f32\[\d+\]\S* copy\(", text)
    run, grads = reduction({"data": 4}, GradSync(bucket_mb=1e-6), SHAPES, SPECS)
    text = run.lower(grads).compile().as_text()
    assert not re.findall(r" (?:concatenate|copy)\(", text)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "sizes"), [("zero3", {"fsdp": 4}), ("ddp", {"data": 1})], ids=str)
def test_a_residual_of_parameters_without_copies_is_saved(strategy: str, sizes: Mesh, tmp_path: Path) -> None:
    """Nothing is summed over copies there, and orbax saves no empty arrays."""
    state, _ = train(INT8, sizes, strategy, 1)
    with Checkpoints(tmp_path / "c", keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        restored = checkpoints.restore(1, targets(INT8, {"data": 2}, "ddp"))
    assert {float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(restored.residual)} == {0.0}
