"""Every layout trains like one device: gradients and parameters in float64 to 1e-10, losses and gradients in fp32 to
1e-5."""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from jax.sharding import NamedSharding
from levels import levels

from jaxdist import registry
from jaxdist.config.grad_sync import GradSync
from jaxdist.config.resolve import resolve_model
from jaxdist.config.schema import ModelConfig
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.optim import clip_by_ordered_norm
from jaxdist.precision.policy import POLICIES
from jaxdist.specs import BATCH_SPEC
from jaxdist.state import place_params
from jaxdist.step import make_train_step

SEQ, VOCAB = 8, 48
STRATEGIES = tuple(registry.names("jaxdist.parallel.strategies"))
POWERS = [shape for shape in itertools.product((1, 2, 4, 8), repeat=3) if np.prod(shape) <= 8]
ODD = {
    (3, 1, 1): "ddp",
    (1, 3, 1): "zero1",
    (1, 1, 3): "ddp",
    (2, 3, 1): "zero2",
    (1, 2, 3): "zero3",
    (3, 1, 2): "zero3",
    (7, 1, 1): "ddp",
    (1, 5, 1): "zero2",
}


class Case(NamedTuple):
    style: str
    tied: bool
    strategy: str
    microbatches: int
    mesh: tuple[int, int, int]  # data, fsdp, tensor
    algorithm: str = "native"
    remat: str | tuple[str, ...] = "none"
    prefetch: int = 0
    overlap: bool = False  # buckets so small that every block fills one, and is summed in the backward pass
    loss_chunk: int | None = None
    sequence: bool = False
    pipe: int = 1
    schedule: str = "accumulate"
    scan_blocks: int = 1
    collective_matmul: bool = False  # in a pipeline without conditions

    def __str__(self) -> str:
        later = self[10:14] if self[10:14] != (False, 1, "accumulate", 1) else ()
        last = ("collective_matmul",) if self.collective_matmul else ()
        return "-".join(str(part) for part in (*self[:4], "x".join(map(str, self.mesh)), *self[5:10], *later, *last))


def strategies(mesh: tuple[int, int, int]) -> tuple[str, ...]:
    """Without fsdp, ZeRO has nothing to shard: one of the three stands for all."""
    return STRATEGIES if mesh[1] > 1 else ("ddp", "zero3")


OPTIONS = list(itertools.product(("gpt2", "llama"), (True, False), (1, 4)))
EVERY = [
    Case(style, tied, strategy, microbatches, mesh)
    for mesh in POWERS
    for strategy in strategies(mesh)
    for style, tied, microbatches in OPTIONS
]


def each_mesh() -> list[Case]:
    """Once: strategies in turn, apart for meshes with fsdp and without, and options so that all pairs of
    options and strategies occur."""
    cases, seen = [], {True: 0, False: 0}
    for i, mesh in enumerate(POWERS):
        choice, sharded = strategies(mesh), mesh[1] > 1
        strategy, seen[sharded] = choice[seen[sharded] % len(choice)], seen[sharded] + 1
        style, tied, microbatches = OPTIONS[(i + 2 * seen[sharded]) % len(OPTIONS)]
        cases.append(Case(style, tied, strategy, microbatches, mesh))
    return cases


EACH_MESH = each_mesh()
EXTRA = [
    *(
        Case(("gpt2", "llama")[i % 2], i % 3 == 0, strategy, 1 + 3 * (i % 2), mesh)
        for i, (mesh, strategy) in enumerate(ODD.items())
    ),
    Case("gpt2", True, "ddp", 4, (2, 2, 2), "ring"),
    Case("llama", False, "zero3", 4, (2, 4, 1), "ring"),
    Case("gpt2", True, "zero3", 1, (3, 2, 1), "ring"),
    Case("llama", True, "zero3", 1, (1, 4, 2), "native", "full"),
    Case("gpt2", False, "ddp", 4, (2, 1, 4), "native", "full"),
]


ALGORITHMS = [
    *(
        Case(("gpt2", "llama")[i % 2], i % 4 < 2, ("ddp", "zero3")[i // 2 % 2], 1 + i % 2, mesh, algorithm)
        for i, (algorithm, mesh) in enumerate(
            {
                "auto": (2, 2, 1),
                "balanced_fusion": (1, 3, 1),
                "bidirectional_ring": (3, 1, 1),
                "deterministic": (2, 2, 1),
                "double_tree": (5, 1, 1),
                "halving_doubling": (1, 4, 2),
                "master_worker": (3, 1, 1),
                "ordered": (1, 4, 1),
                "tree": (1, 3, 2),
                "two_level": (2, 2, 2),
            }.items()
        )
    )
]
SOME = [case for case in ALGORITHMS if case.algorithm in ("deterministic", "two_level")]
# Communication away from the computation that it is for, under every strategy of the folder.
APART = [
    Case(style, tied, strategy, microbatches, mesh, algorithm, remat, prefetch, microbatches == 1)
    for strategy in STRATEGIES
    for style, tied, microbatches, mesh, algorithm, remat, prefetch in (
        ("gpt2", True, 1, (2, 2, 2), "native", "full", 1),
        ("llama", False, 1, (2, 4, 1), "ring", "none", 1),
        ("llama", True, 4, (1, 4, 2), "native", "none", 1),
        ("gpt2", False, 1, (4, 2, 1), "native", "none", 0),
        ("llama", False, 1, (8, 1, 1), "native", "full", 1),
        ("gpt2", True, 2, (2, 3, 1), "native", "full", 1),
    )
]
SOME_APART = [
    case
    for case in APART
    if case[2:5] in {("zero3", 1, (2, 2, 2)), ("ddp", 1, (2, 4, 1)), ("zero3", 4, (1, 4, 2)), ("zero2", 1, (4, 2, 1))}
]


def sync_of(case: Case) -> GradSync:
    """By an algorithm; "deterministic" is a way of running as well."""
    if case.algorithm == "deterministic":
        return GradSync(deterministic=True)
    return GradSync(case.algorithm, **({"bucket_mb": 0.001} if case.overlap else {}))


def model_config(case: Case) -> ModelConfig:
    odd = any(size % 2 and size > 1 for size in case.mesh)
    heads, width = (12, 48) if odd else (16, 32)
    return resolve_model(
        ModelConfig(
            style=case.style,
            tied=case.tied,
            layers=layers_of(case),
            width=width,
            heads=heads,
            vocab=VOCAB,
            mlp_width=width * 2,
            loss_chunk=case.loss_chunk,
            kv_heads=heads // 2 if case.style == "llama" else None,
            scan_blocks=case.scan_blocks,
        )
    )


def layers_of(case: Case) -> int:
    """Five blocks are two segments of two and one of one, or two rounds of a loop and one block more."""
    return 5 if case.remat == "sqrt" or case.scan_blocks == 2 else 2 + 3 * case.prefetch


def batch_size(case: Case) -> int:
    return 32 if case.mesh[0] * case.mesh[1] in (1, 2, 4, 8) else 4 * case.mesh[0] * case.mesh[1]


def make_batch(size: int, step: int) -> dict[str, np.ndarray]:
    """Ragged masks: the share of counted tokens grows along the batch, and one row counts none."""
    rng = np.random.default_rng(step)
    ids = rng.integers(0, VOCAB, (size, SEQ + 1)).astype(np.int32)
    weights = (rng.random((size, SEQ)) < np.linspace(0.02, 1, size)[:, None]).astype(np.float32)
    weights[size // 2] = 0
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}


def optimizer(*, deterministic: bool = False) -> optax.GradientTransformation:
    clip = clip_by_ordered_norm if deterministic else optax.clip_by_global_norm
    return optax.chain(clip(0.5), optax.adamw(1e-2, weight_decay=0.1, eps=1e-6))


class Reference(NamedTuple):
    losses: list[float]
    grads: list[Any]
    params: Any


@functools.cache
def initial(config: ModelConfig, policy: str) -> Any:
    model = gpt(config, max_length=SEQ, param_dtype=POLICIES[policy].param)
    return oracle.drawn(jax.eval_shape(model.init, jax.random.key(0)))


@functools.cache
def reference(config: ModelConfig, size: int, policy: str) -> Reference:
    """Three steps on one device, with the oracle's loss and plain optax."""
    params, tx = initial(config, policy), optimizer()

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            loss, grads = jax.value_and_grad(functools.partial(oracle.loss, config=config))(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
        return loss, grads, optax.apply_updates(params, updates), opt_state

    losses, all_grads, opt_state = [], [], jax.jit(tx.init)(params)
    for i in range(3):
        loss, grads, params, opt_state = step(params, opt_state, make_batch(size, i))
        losses.append(float(loss))
        all_grads.append(jax.device_get(grads))
    return Reference(losses, all_grads, jax.device_get(params))


def run(case: Case, policy: str, steps: int) -> Reference:
    mesh = make_mesh(data=case.mesh[0], fsdp=case.mesh[1], tensor=case.mesh[2], pipe=case.pipe)
    model = gpt(
        model_config(case),
        max_length=SEQ,
        param_dtype=POLICIES[policy].param,
        sequence_parallel=case.sequence,
        collective_matmul=case.collective_matmul,
    )
    tx = optimizer(deterministic=case.algorithm == "deterministic")
    target = state_target(model, tx, mesh, strategy=case.strategy)
    state = place_params(initial(model_config(case), policy), tx, target)
    step = make_train_step(
        model,
        tx,
        mesh,
        strategy=case.strategy,
        schedule=case.schedule,
        microbatches=case.microbatches,
        precision=policy,
        grad_sync=sync_of(case),
        remat=case.remat,
        prefetch=case.prefetch,
        return_grads=True,
        pipeline_cond=not case.collective_matmul,
    )
    losses, grads = [], []
    for i in range(steps):
        batch = jax.device_put(make_batch(batch_size(case), i), NamedSharding(mesh, BATCH_SPEC))
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        grads.append(jax.device_get(metrics["grads"]))
    return Reference(losses, grads, jax.device_get(state.params))


def check_wide(case: Case) -> None:
    with jax.enable_x64(True):
        want = reference(model_config(case), batch_size(case), "fp64")
        got = run(case, "fp64", 3)
        assert max(abs(a - b) / b for a, b in zip(got.losses, want.losses, strict=True)) < 1e-10
        for step in range(3):
            assert oracle.error(got.grads[step], want.grads[step]) < 1e-10
        assert oracle.error(got.params, want.params) < 1e-10


def check_fp32(case: Case) -> None:
    with jax.enable_x64(True):
        want = reference(model_config(case), batch_size(case), "fp64")
        got = run(case, "fp32", 1)
    assert got.losses[0] == pytest.approx(want.losses[0], rel=1e-5)
    assert jax.tree.leaves(got.grads[0])[0].dtype == jnp.float32
    assert oracle.error(got.grads[0], want.grads[0]) < 1e-5


@pytest.mark.parametrize("case", levels([*EACH_MESH, *SOME, *SOME_APART, *EXTRA], everyday=4), ids=str)
def test_layout_equals_one_device(case: Case) -> None:
    check_wide(case)


@pytest.mark.parametrize("case", levels([*EACH_MESH, *EXTRA, *SOME], everyday=12, slow=5), ids=str)
def test_layout_equals_one_device_in_fp32(case: Case) -> None:
    check_fp32(case)


def crossed() -> list[Case]:
    """Every strategy on every mesh, each with all values of all options somewhere."""
    cases: list[Case] = []
    for j, mesh in enumerate(POWERS):
        for i, strategy in enumerate(strategies(mesh)):
            style, tied, microbatches = OPTIONS[(5 * i + 3 * j) % len(OPTIONS)]
            cases.append(Case(style, tied, strategy, microbatches, mesh))
    return cases


CROSSED = [case for case in crossed() if case not in EACH_MESH]


@pytest.mark.parametrize(
    "case",
    [
        *levels(CROSSED, slow=4),
        *levels(case for case in ALGORITHMS if case not in SOME),
        *levels((case for case in APART if case not in SOME_APART), slow=2),
    ],
    ids=str,
)
def test_every_strategy_on_every_mesh_equals_one_device(case: Case) -> None:
    check_wide(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_layout_equals_one_device(case: Case) -> None:
    if case not in EACH_MESH:
        check_wide(case)
    check_fp32(case)


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt2", True, "zero3", 4, (2, 2, 2)),
        pytest.param(Case("llama", False, "ddp", 1, (1, 1, 8)), marks=pytest.mark.slow),
        pytest.param(Case("llama", True, "ddp", 4, (8, 1, 1)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_dropout_masks_depend_on_the_sample_not_on_the_device(case: Case) -> None:
    def grads(case: Case) -> Any:
        mesh = make_mesh(data=case.mesh[0], fsdp=case.mesh[1], tensor=case.mesh[2])
        config = dataclasses.replace(model_config(case), dropout=0.3)
        model, tx = gpt(config, max_length=SEQ, param_dtype=jnp.float64), optax.sgd(0.0)
        state = place_params(initial(config, "fp64"), tx, state_target(model, tx, mesh, strategy=case.strategy))
        step = make_train_step(
            model, tx, mesh, strategy=case.strategy, microbatches=case.microbatches, precision="fp64", return_grads=True
        )
        first = step(state, make_batch(32, 0))[1]
        return jax.device_get(first["grads"])

    with jax.enable_x64(True):
        got, want = grads(case), grads(case._replace(strategy="ddp", microbatches=1, mesh=(1, 1, 1)))
        assert oracle.error(got, want) < 1e-10
        assert oracle.error(want, reference(model_config(case), 32, "fp64").grads[0]) > 0.1  # dropout did something


def test_crossed_cases_hold_every_value_of_every_option() -> None:
    """Every strategy on every mesh once, and each strategy with every value of every option."""
    cases = crossed()
    wanted = [(mesh, strategy) for mesh in POWERS for strategy in strategies(mesh)]
    assert [(case.mesh, case.strategy) for case in cases] == wanted
    for strategy in {case.strategy for case in cases}:
        found = [case for case in cases if case.strategy == strategy]
        for values in zip(*((case.style, case.tied, case.microbatches) for case in found), strict=True):
            assert len(set(values)) == 2


def test_one_case_a_mesh_covers_every_pair_of_options() -> None:
    columns = list(zip(*((case.style, case.tied, case.strategy, case.microbatches) for case in EACH_MESH), strict=True))
    for one, other in itertools.combinations(columns, 2):
        assert set(zip(one, other, strict=True)) == set(itertools.product(one, other))
    assert {case.mesh for case in EACH_MESH} == set(POWERS)
