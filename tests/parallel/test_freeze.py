"""Frozen parameters: no gradient, no optimizer state, no communication; the others train as ever."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from batches import random_tokens
from jax.sharding import NamedSharding
from jaxprs import collectives
from levels import levels

from jaxdist import GradSync, init_state, make_mesh, make_optimizer, make_train_step, registry, state_target
from jaxdist.checkpoint import Checkpoints
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.optimizer import OptimizerConfig
from jaxdist.errors import UserError
from jaxdist.models.gpt import gpt
from jaxdist.specs import BATCH_SPEC, path_name

NAMES = registry.names("jaxdist.parallel.strategies")
FREEZE = ("embed.*", "blocks.mlp.*", "*.norm1.scale")
LEAVES = 2 * 6 + 1 + 2  # of two blocks, the embedding, the head; untied
SIZES = {"data": 2, "fsdp": 2, "tensor": 2}


def is_frozen(name: str) -> bool:
    return name.startswith(("embed.", "blocks.mlp.")) or name.endswith("norm1.scale")


def names_of(tree: Any) -> set[str]:
    return {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


def model(tied: bool = True, dtype: Any = jnp.float32) -> Any:
    config = ModelConfig(style="llama", layers=2, width=16, heads=4, vocab=32, mlp_width=32, tied=tied)
    return gpt(config, max_length=8, param_dtype=dtype)


def train(strategy: str, sizes: dict[str, int], freeze: tuple[str, ...], steps: int = 3, **options: Any) -> Any:
    mesh, tx = make_mesh(**sizes), optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    wide = model(dtype=jnp.float64)
    state = init_state(wide, tx, mesh, strategy=strategy, freeze=freeze)
    before = jax.device_get(state)
    step = make_train_step(
        wide, tx, mesh, strategy=strategy, precision="fp64", freeze=freeze, return_grads=True, **options
    )
    grads = []
    for i in range(steps):
        state, metrics = step(state, random_tokens(seed=i))
        grads.append(jax.device_get(metrics["grads"]))
    return before, jax.device_get(state), grads


@pytest.mark.parametrize("strategy", levels(reversed(NAMES), slow=4))
def test_the_others_train_as_on_one_device(strategy: str) -> None:
    with jax.enable_x64(True):
        _, want, want_grads = train("ddp", {}, FREEZE)
        before, after, grads = train(strategy, SIZES, FREEZE, microbatches=2, prefetch=int(strategy == "zero3"))
        _, _, all_grads = train("ddp", {}, (), steps=1)
    trained = {name for name in names_of(after.params) if not is_frozen(name)}
    assert len(trained) >= 3 and names_of(grads[0]) == trained
    for old, new in ((before, after), (before, want)):
        pairs = zip(jax.tree_util.tree_leaves_with_path(old.params), jax.tree.leaves(new.params), strict=True)
        for (path, leaf), other in pairs:
            assert (leaf.tobytes() == other.tobytes()) == is_frozen(path_name(path)), path_name(path)
    assert oracle.error(after.params, want.params) < 1e-10
    assert max(oracle.error(got, grad) for got, grad in zip(grads, want_grads, strict=True)) < 1e-10
    whole = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(all_grads[0])}
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads[0]):  # frozen or not, the same function
        np.testing.assert_allclose(leaf, whole[path_name(path)], rtol=1e-9, atol=1e-12)
    moments = [leaf for leaf in jax.tree.leaves(after.opt_state) if leaf.ndim]
    assert len(moments) == 2 * len(trained)


@pytest.mark.parametrize("strategy", NAMES)
def test_frozen_gradients_are_not_communicated(strategy: str) -> None:
    """Beside loss and weight nothing is summed but the gradient of the one parameter that is left."""
    everything_else = ("embed.*", "blocks.*", "head.norm.*")
    untied, mesh, tx = model(tied=False), make_mesh(data=2, fsdp=4), optax.sgd(0.1)
    state = state_target(untied, tx, mesh, strategy=strategy, freeze=everything_else)
    step = make_train_step(untied, tx, mesh, strategy=strategy, freeze=everything_else)
    jaxpr = step.jitted(state).trace(state, random_tokens(seed=0)).jaxpr
    assert collectives(jaxpr, "data") == {("psum", "float32"): 2}
    counts = collectives(jaxpr, "fsdp")
    assert counts.get(("reduce_scatter", "float32"), 0) == (strategy != "ddp")
    # Nothing below the head has a gradient, so that nothing is gathered again.
    assert counts.get(("all_gather", "float32"), 0) == (0 if strategy == "ddp" else LEAVES)


def test_zero3_gathers_frozen_blocks_again_for_the_backward_pass() -> None:
    """As it does others: it must not keep them."""
    untied, mesh, tx = model(tied=False), make_mesh(fsdp=4), optax.sgd(0.1)
    state = state_target(untied, tx, mesh, strategy="zero3", freeze=("blocks.*",))
    step = make_train_step(untied, tx, mesh, strategy="zero3", freeze=("blocks.*",))
    counts = collectives(step.jitted(state).trace(state, random_tokens(seed=0)).jaxpr, "fsdp")
    assert counts["all_gather", "float32"] == 2 * LEAVES - 3  # those of embedding and head once
    assert counts["reduce_scatter", "float32"] == 3


@pytest.mark.parametrize("strategy", levels(reversed(NAMES), slow=4))
def test_frozen_blocks_take_no_memory_of_gradients(strategy: str) -> None:
    config = ModelConfig(style="llama", layers=8, width=64, heads=4, vocab=32, mlp_width=128)
    deep, mesh, tx = gpt(config, max_length=8), make_mesh(fsdp=4), optax.sgd(0.1)

    def temporary(*freeze: str) -> int:
        state = state_target(deep, tx, mesh, strategy=strategy, freeze=freeze)
        step = make_train_step(deep, tx, mesh, strategy=strategy, freeze=freeze)
        data = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, BATCH_SPEC)), random_tokens(seed=0))
        return int(step.lower(state, data).compile().memory_analysis().temp_size_in_bytes)

    blocks = sum(leaf.size * 4 for leaf in jax.tree.leaves(deep.shapes["blocks"]))
    saved = temporary() - temporary("blocks.*")
    assert saved > {"ddp": 0.9, "zero1": 0.9, "zero2": 0.2, "zero3": 0.2}[strategy] * blocks


@pytest.mark.slow
def test_a_loss_of_ones_own_and_int8() -> None:
    params = {"body": jnp.ones((8, 8)), "head": jnp.ones((8, 8))}
    data = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        return ((batch @ params["body"] @ params["head"]) ** 2).sum(), jnp.float32(batch.size)

    int8, pairwise = GradSync("ring", wire_dtype="int8"), GradSync(deterministic=True)
    cases = [*((name, GradSync()) for name in NAMES), ("ddp", int8), ("zero1", int8), ("zero3", pairwise)]
    for strategy, sync in cases:
        mesh, tx = make_mesh(data=2, fsdp=2), optax.adam(1e-2)
        options: Any = {"strategy": strategy, "grad_sync": sync, "freeze": ("body",)}
        state, step = init_state(params, tx, mesh, **options), make_train_step(loss, tx, mesh, **options)
        for _ in range(2):
            state, _ = step(state, data)
        assert (np.asarray(state.params["body"]) == 1).all() and (np.asarray(state.params["head"]) != 1).all()
        assert names_of(state.residual) == ({"head"} if sync.wire_dtype else set())


@pytest.mark.slow
def test_checkpoint_with_a_residual(tmp_path: Path) -> None:
    body, head = (np.random.default_rng(i).normal(size=(8, 8)).astype(np.float32) for i in (1, 2))
    params, mesh, tx = {"body": body, "head": head}, make_mesh(data=4), optax.adam(1e-2)
    options: Any = {"grad_sync": GradSync("ring", wire_dtype="int8"), "freeze": ("body",)}

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        return ((batch @ params["body"] @ params["head"]) ** 2).sum(), jnp.float32(batch.size)

    state, _ = make_train_step(loss, tx, mesh, **options)(
        init_state(params, tx, mesh, **options), np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    )
    want = jax.device_get(state)
    with Checkpoints(tmp_path / "saved", keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        got = checkpoints.restore(1, state_target(params, tx, mesh, **options))
    assert jax.tree.structure(got) == jax.tree.structure(want) and np.abs(want.residual["head"]).max() > 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), want)


def test_another_freeze_in_the_step_than_in_the_state() -> None:
    state = init_state(model(), optax.adam(0.1), make_mesh(), freeze=("embed.*",))
    with pytest.raises(UserError, match="the same freeze"):
        make_train_step(model(), optax.adam(0.1), make_mesh())(state, random_tokens(seed=0))


@pytest.mark.slow
def test_muon_and_adafactor_with_frozen_parameters() -> None:
    for name in ("muon", "adafactor"):
        tx, mesh = make_optimizer(OptimizerConfig(name=name), steps=3), make_mesh(fsdp=4)
        state = init_state(model(), tx, mesh, strategy="zero2", freeze=FREEZE)
        state, metrics = make_train_step(model(), tx, mesh, strategy="zero2", freeze=FREEZE)(
            state, random_tokens(seed=0)
        )
        assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("embed.*", "blokcs.*"), r"optimizer.freeze: 'blokcs.\*' fits no parameter.*blocks.mlp.up.kernel"),
        (("*",), "optimizer.freeze: .* leaves nothing to train"),
        ("embed.*", r"optimizer.freeze: 'embed.\*' is one text; give a list"),
    ],
)
def test_patterns_that_make_no_sense(patterns: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        init_state(model(), optax.sgd(0.1), make_mesh(), freeze=patterns)
