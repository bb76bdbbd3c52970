"""Every layout trains like one device: gradients and parameters in float64 to 1e-10, losses and gradients in fp32 to
1e-5."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from layouts import SEQ, STRATEGIES, Case, check_fp32, check_wide, initial, make_batch, model_config, reference
from levels import levels

from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.state import place_params
from jaxdist.step import make_train_step

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


EVERYDAY = [Case("llama", True, "zero3", 1, (1, 4, 2), "native", "full")]


def without(cases: list[Case]) -> list[Case]:
    return [case for case in cases if case not in EVERYDAY]


@pytest.mark.parametrize(
    "case", [*EVERYDAY, *levels(without([*EACH_MESH, *SOME, *SOME_APART, *EXTRA]), slow=8, common=3)], ids=str
)
def test_layout_equals_one_device(case: Case) -> None:
    check_wide(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*EVERYDAY, *levels(without([*EACH_MESH, *EXTRA, *SOME]), slow=20, common=5)], ids=str)
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
        *levels(CROSSED, slow=16, common=8),
        *levels((case for case in ALGORITHMS if case not in SOME), slow=4, common=2),
        *levels((case for case in APART if case not in SOME_APART), slow=8, common=4),
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
        pytest.param(Case("gpt2", True, "zero3", 4, (2, 2, 2)), marks=pytest.mark.slow),
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
