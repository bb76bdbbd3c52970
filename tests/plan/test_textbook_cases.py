"""The textbook's table of choices, asked of the planner: what holds on the hardware that each case names."""

import math
from pathlib import Path
from typing import Any

import pytest
from script_modules import load_module

from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.search.choose import Search

BENCH = Path(__file__).parents[2] / "scripts" / "bench" / "plan_cases.py"
DDP, ZERO, PIPELINE, TENSOR = "ddp alone", "zero3 alone", "pipeline alone", "tensor alone"
BETWEEN = "pipeline between hosts, ZeRO inside"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench() -> Any:
    return load_module(BENCH)


def kinds(bench: Any, name: str) -> tuple[dict[str, float], Search]:
    """({kind: seconds of its best layout that fits}, infinite where none fits; all that was predicted)."""
    [case] = [case for case in bench.CASES if case.name == name]
    found = bench.searched(case, Known(), only_kinds=True)
    rows = {kind: bench.best_of_kind(kind, found) for kind in bench.KINDS}
    return {kind: row.get("seconds", math.inf) for kind, row in rows.items()}, found


def test_a_model_that_fits_is_replicated_or_sharded(bench: Any) -> None:
    """The textbook says DDP or ZeRO. Both are within a fifth of each other, and the rest takes twice the time."""
    seconds, _ = kinds(bench, "1")
    assert max(seconds[DDP], seconds[ZERO]) < 1.2 * min(seconds[DDP], seconds[ZERO])
    assert min(seconds[PIPELINE], seconds[TENSOR]) > 2 * seconds[ZERO]


def test_on_nvlink_zero_is_before_a_pipeline(bench: Any) -> None:
    """The textbook has them the other way round: hardware has moved on."""
    seconds, _ = kinds(bench, "2")
    assert seconds[DDP] == math.inf
    assert seconds[ZERO] < seconds[TENSOR] < seconds[PIPELINE]
    assert seconds[PIPELINE] > 1.1 * seconds[ZERO]


def test_on_pcie_3_a_pipeline_is_no_slower_than_zero_and_tensor_is_last(bench: Any) -> None:
    """That was the textbook's hardware. The bytes of `tensor` cannot be hidden there."""
    seconds, _ = kinds(bench, "2b")
    assert seconds[PIPELINE] < seconds[ZERO] < 1.1 * seconds[PIPELINE]
    assert seconds[TENSOR] > 3 * seconds[PIPELINE]


def test_a_layer_that_does_not_fit_takes_tensor_parallelism(bench: Any) -> None:
    seconds, found = kinds(bench, "3")
    assert seconds[TENSOR] < math.inf == seconds[DDP] == seconds[ZERO]
    assert "tensor" in found.fitting[0].layout.name()


def test_on_fast_links_between_hosts_zero_over_all_is_the_fastest(bench: Any) -> None:
    """Of what fits at all; a pipeline between hosts waits for its bubble."""
    seconds, _ = kinds(bench, "4")
    assert seconds[DDP] == math.inf
    assert 1.1 * seconds[ZERO] < seconds[BETWEEN] < 1.7 * seconds[ZERO]


def test_on_slow_links_a_pipeline_between_hosts_is_before_zero_over_all(bench: Any) -> None:
    """Of the kinds; with `tensor` inside hosts as well it is a little faster, a tie."""
    seconds, found = kinds(bench, "5")
    assert seconds[BETWEEN] == found.fitting[0].seconds.total
    assert seconds[ZERO] > 3 * seconds[BETWEEN]
    waiting = sum(found.fitting[0].seconds.waiting.values())
    assert waiting > found.fitting[0].seconds.parts()["computing"]  # and even then the link is most of a step
