"""`model.scan_blocks`: blocks in a loop, in a loop of several a round, or without one, train like one device."""

import itertools

import pytest
from batches import token_shapes
from layouts import Case, check_wide
from levels import levels

from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.optimizer import OptimizerConfig
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.optim.make import make_optimizer
from jaxdist.plan.traced.ledger import ledger
from jaxdist.step import make_train_step

CASES = [
    Case("gpt2", False, "zero3", 1, (1, 2, 1), scan_blocks=0),
    Case("gpt2", True, "zero3", 2, (2, 1, 2), remat="full", scan_blocks=0),
    Case("llama", False, "zero2", 1, (1, 2, 1), scan_blocks=2),
    Case("llama", True, "ddp", 1, (1, 1, 2), remat="dots", scan_blocks=2),
    Case("llama", False, "zero2", 1, (2, 2, 1), remat="dots", scan_blocks=0),  # as GPUs do it by default
    Case("gpt2", False, "zero1", 4, (1, 2, 1), pipe=2, schedule="one_f_one_b", scan_blocks=0),
]


@pytest.mark.parametrize("case", levels(CASES, everyday=20, slow=8, common=2), ids=str)
def test_unrolled_blocks_equal_one_device(case: Case) -> None:
    check_wide(case)


def step_of(scan_blocks: int, **options: object) -> tuple[object, ...]:
    config = ModelConfig(style="llama", layers=4, width=32, heads=4, vocab=64, mlp_width=64, scan_blocks=scan_blocks)
    model, mesh = gpt(config, max_length=8), make_mesh(fsdp=2)
    tx = make_optimizer(OptimizerConfig(), steps=10)
    step = make_train_step(model, tx, mesh, strategy="zero3", **options)  # type: ignore[arg-type]
    return step, state_target(model, tx, mesh, strategy="zero3"), token_shapes(8)


@pytest.mark.slow
def test_the_ledger_counts_the_same() -> None:
    found = [ledger(*step_of(unroll)).total("op") for unroll in (1, 2, 3, 0)]  # type: ignore[arg-type]
    assert all(one == other for one, other in itertools.pairwise(found))


@pytest.mark.slow
def test_loops_of_the_compiled_program() -> None:
    """Forward and backward, or neither, beside those that are no blocks'; gathers of both passes are not merged."""
    found = {}
    for unroll in (1, 2, 0):
        step, state, rows = step_of(unroll, remat="full")
        found[unroll] = step.lower(state, rows).compile().as_text()  # type: ignore[attr-defined]
    loops = {unroll: text.count(" while(") for unroll, text in found.items()}
    assert loops[1] == loops[2] == loops[0] + 2
    gathers = {unroll: text.count(" all-gather(") for unroll, text in found.items()}
    of_block = (gathers[0] - gathers[1]) / 3  # 4 blocks in place of one
    assert of_block > 0 and of_block % 2 == 0


@pytest.mark.parametrize("options", [{"prefetch": 1}, {"remat": "sqrt"}], ids=str)
def test_what_has_loops_of_its_own_is_refused(options: dict[str, object]) -> None:
    step, state, rows = step_of(2, **options)
    with pytest.raises(UserError, match=r"model.scan_blocks: 2 does not go with .*; allowed with it: 1"):
        step.lower(state, rows)  # type: ignore[attr-defined]
