"""Muon's matrices are whole where they are orthogonalised, by one exchange each way, which the ledger knows."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from batches import token_shapes
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from levels import levels

from jaxdist import make_mesh, make_train_step
from jaxdist.build import assemble
from jaxdist.config.schema import Config, DataConfig, MeshConfig, ModelConfig, ParallelConfig
from jaxdist.config.sections.optimizer import OptimizerConfig
from jaxdist.init import init_state, state_target
from jaxdist.mesh import abstract_mesh
from jaxdist.models.gpt import gpt
from jaxdist.optim.make import make_optimizer
from jaxdist.optim.muon import on_whole_matrices
from jaxdist.plan.compiled.hlo import compare, compiled_collectives
from jaxdist.plan.compiled.memory import batch_of
from jaxdist.plan.remedies.table import flops_of_passes
from jaxdist.plan.traced.ledger import ledger, pytorch_term

OPTIONS = OptimizerConfig(name="muon", lr=1e-2, clip_norm=0.5, weight_decay=0.1)


def products(x: jax.Array) -> jax.Array:
    """Each matrix by its own squares: wrong where a matrix is not whole, or where two are mixed."""
    matrices = x.reshape(*x.shape[: x.ndim - 2 if x.ndim < 4 else 1], x.shape[1] if x.ndim > 2 else x.shape[0], -1)
    return (matrices @ jnp.swapaxes(matrices, -1, -2) @ matrices).reshape(x.shape)


SPECS = [
    P(None, "fsdp", "tensor"),
    P(None, ("tensor", "fsdp")),
    P("pipe", "fsdp", "tensor"),
    P(None, "tensor", "fsdp"),
    P(None, "fsdp"),
    P(),
]


@pytest.mark.parametrize(("spec", "rows"), levels(itertools.product(SPECS, (3, 4, 1, 8)), everyday=10, slow=3), ids=str)
def test_matrices_of_a_stack(spec: P, rows: int) -> None:
    mesh = make_mesh(pipe=2, fsdp=2, tensor=2)
    shape = (rows * 2 if "pipe" in spec else rows, 8, 4, 3)
    sharding = NamedSharding(mesh, spec)
    x = jnp.asarray(np.random.default_rng(0).integers(-3, 4, shape), jnp.float32)
    run = jax.jit(lambda x: on_whole_matrices(products, x, sharding, lead=1), out_shardings=sharding)
    np.testing.assert_array_equal(run(jax.device_put(x, sharding)), products(x))
    text = run.lower(jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)).compile().as_text()
    assert not any(name in text for name in ("all-reduce", "all-gather", "collective-permute"))
    assert ("all-to-all" in text) == any(axis in str(spec) for axis in ("fsdp", "tensor"))


@pytest.mark.parametrize("spec", [P("fsdp", "tensor"), P(None, ("fsdp", "tensor")), P("tensor")], ids=str)
def test_a_single_matrix_is_gathered(spec: P) -> None:
    sharding = NamedSharding(make_mesh(data=2, fsdp=2, tensor=2), spec)
    x = jnp.asarray(np.random.default_rng(0).integers(-3, 4, (8, 12)), jnp.float32)
    run = jax.jit(lambda x: on_whole_matrices(products, x, sharding, lead=0), out_shardings=sharding)
    np.testing.assert_array_equal(run(jax.device_put(x, sharding)), products(x))


@pytest.mark.slow
def test_all_that_the_optimizer_sends_is_in_the_ledger() -> None:
    """Each sharded kernel goes to its device and back; the compiler adds sums of numbers, and nothing else."""
    mesh, tx = make_mesh(data=2, fsdp=2, tensor=2), make_optimizer(OPTIONS, steps=3)
    model = gpt(ModelConfig(layers=4, width=32, heads=4, vocab=64), max_length=8)
    target = state_target(model, tx, mesh, strategy="zero3", min_shard_bytes=0)
    step, batch = make_train_step(model, tx, mesh, strategy="zero3"), token_shapes(8)
    whole = ledger(step, target, batch)
    rows = [each for each in whole.collectives if each.purpose.startswith("optimizer.")]
    kernels = [model.shapes["blocks"][a][b] for a, b in (("attention", "out"), ("mlp", "up"), ("mlp", "down"))]
    kernels = [leaf["kernel"] for leaf in (*kernels, model.shapes["blocks"]["attention"]["qkv"]["linear"])]
    assert {pytorch_term(each) for each in rows} == {"distributed Muon"}
    assert {each.op for each in rows} == {"all_to_all"} and len({each.purpose for each in rows}) == len(kernels)
    # A device has a quarter of every kernel, and sends half of it at each of four exchanges, over fsdp and tensor.
    assert sum(each.wire_bytes for each in rows) == 4 * 4 * sum(leaf.size for leaf in kernels) / 4 / 2
    compiled = compiled_collectives(step.lower(target, batch).compile().as_text())
    assert compare(whole, compiled)["all_to_all"].agrees
    added = [each for each in compiled if each.added]
    assert added and sum(each.wire_bytes for each in added) < 1000


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [("blocks.mlp.*",), pytest.param((), marks=pytest.mark.slow)])
def test_a_users_tree_and_frozen_parameters(freeze: tuple[str, ...]) -> None:
    """Matrices of somebody else's tree are gathered; the step is that of one device."""
    rng = np.random.default_rng(0)
    params = {"blocks": {"mlp": {"w": rng.normal(size=(8, 16))}}, "out": rng.normal(size=(16, 4)), "b": np.zeros(4)}

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        h = jnp.tanh(batch["x"] @ params["blocks"]["mlp"]["w"]) @ params["out"] + params["b"]
        return ((h - batch["y"]) ** 2).sum(), batch["y"].shape[0]

    batch = {"x": rng.normal(size=(16, 8)), "y": rng.normal(size=(16, 4))}

    def after(**sizes: int) -> Any:
        tx, mesh = make_optimizer(OPTIONS, steps=3), make_mesh(**sizes)
        options: dict[str, Any] = {"strategy": "zero3", "freeze": freeze}
        state = init_state(jax.tree.map(jnp.asarray, params), tx, mesh, min_shard_bytes=0, **options)
        step = make_train_step(loss, tx, mesh, precision="fp64", **options)
        for _ in range(3):
            state, _ = step(state, batch)
        return jax.device_get(state.params)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert oracle.error(after(data=2, fsdp=4), after()) < 1e-10


@pytest.mark.slow
def test_a_step_without_shardings_is_the_compilers() -> None:
    """`optimizer.update(grads, state, params)`, as any loop of one's own calls it."""
    tx = make_optimizer(OPTIONS, steps=3)
    params = {"w": jnp.ones((4, 6))}
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = tx.update({"w": jnp.eye(4, 6)}, tx.init(params), params)
    assert optax.tree.norm(updates) > 0


@pytest.mark.slow
def test_products_of_the_optimizer_are_none_of_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs the update is in no condition; its products still are not those of forward and backward pass."""
    monkeypatch.setattr("jaxdist.step.on_cpu", lambda mesh: False)
    config = Config(
        model=ModelConfig(layers=2, width=32, heads=4),
        data=DataConfig(seq_len=8, global_batch=8),
        mesh=MeshConfig(fsdp=2, tensor=2),
        parallel=ParallelConfig(strategy="zero3", min_shard_bytes=0),
    )
    found, mesh = [], abstract_mesh(fsdp=2, tensor=2)
    for name in ("muon", "adamw"):
        config = dataclasses.replace(config, optimizer=OptimizerConfig(name=name))
        found.append(flops_of_passes(assemble(config, mesh), batch_of(config, mesh)))
    assert found[0] == found[1] > 0
