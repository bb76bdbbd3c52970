"""zero1 and zero2 gather once a step by the algorithm of grad_sync. With balanced_fusion zero1 is a parameter server in
as many parts as there are devices: all ranks send and receive equal bytes."""

from collections import Counter
from typing import Any

import jax
import optax
import pytest
from batches import token_shapes
from layouts import Case, check_wide
from levels import others_slow

from jaxdist import GradSync, ledger, make_train_step, state_target
from jaxdist.config.schema import ModelConfig
from jaxdist.jaxpr.walk import every_equation
from jaxdist.mesh import abstract_mesh
from jaxdist.models.gpt import gpt

LENGTH, ROWS = 8, 32


def traced(strategy: str, sync: GradSync, **sizes: int) -> tuple[Any, Any, int]:
    """(ledger, jaxpr, bytes of all parameters in fp32) of a step of a small Llama on a mesh without devices."""
    definition = gpt(ModelConfig(style="llama", layers=2, width=32, heads=4, vocab=64, mlp_width=64), max_length=LENGTH)
    mesh, tx = abstract_mesh(**sizes), optax.adamw(1e-3)
    state = state_target(definition, tx, mesh, strategy=strategy)
    step = make_train_step(definition, tx, mesh, strategy=strategy, grad_sync=sync)
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(state.params))
    return ledger(step, state, token_shapes(ROWS)), step.trace(state, token_shapes(ROWS)).jaxpr, size


@pytest.mark.parametrize("n", others_slow([2, 4, 8], 4))
def test_all_ranks_send_and_receive_equal_bytes_both_ways(n: int) -> None:
    found, jaxpr, size = traced("zero1", GradSync("balanced_fusion"), fsdp=n)
    assert found.total("op").keys() == {"ppermute", "psum"}  # the psum: loss and weight
    half = (n - 1) * size // n
    of_gradients = sum(each.wire_bytes for each in found.collectives if each.purpose.startswith("gradient"))
    assert found.total("op")["ppermute"] == 2 * half and of_gradients == half
    for site in every_equation(jaxpr):
        if site.equation.primitive.name == "ppermute":
            sources, targets = zip(*site.equation.params["perm"], strict=True)
            assert Counter(sources) == Counter(targets) == Counter(range(n))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", others_slow(["zero1", "zero2"], "zero2"))
def test_the_order_of_sums_does_not_change_how_parameters_are_gathered(strategy: str) -> None:
    native, _, size = traced(strategy, GradSync(), fsdp=4)
    fixed, _, _ = traced(strategy, GradSync(deterministic=True, virtual_shards=4), fsdp=4)
    assert native.total("op")["all_gather"] == fixed.total("op")["all_gather"] == 3 * size // 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("llama", False, "zero1", 2, (1, 4, 1), "balanced_fusion"),
        pytest.param(Case("gpt2", True, "zero1", 4, (1, 4, 2), "balanced_fusion"), marks=pytest.mark.slow),
        pytest.param(Case("gpt2", True, "zero2", 1, (2, 3, 1), "ring"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_gather_by_hand_trains_like_one_device(case: Case) -> None:
    check_wide(case)
