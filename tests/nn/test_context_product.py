"""Context parallelism in the whole product of its choices: float64, three steps, to 1e-10 of one device.

46 minutes on two cores; before a release, and after a change of attention:

    JAXDIST_TEST_DEVICES=32 pytest -m exhaustive tests/nn/test_context_product.py
"""

import functools
import itertools
from typing import Any

import jax
import oracle
import pytest
from layouts import STRATEGIES, Case, Reference, check_wide, run

FORMS = ("all_to_all", "gather", "ring")
SCHEDULES = ("accumulate", "one_f_one_b", "zero_bubble")
REMATS: Any = ("none", "full", ("attention.context",))
DROPOUT = (("dropout", 0.3),)
# (documents, dropout) change from case to case, so that each pair of them meets each value of the rest.
BESIDES = ((False, ()), (True, ()), (False, DROPOUT), (True, DROPOUT))


def case(
    i: int, context: int, form: str, strategy: str, remat: Any, schedule: str, tensor: int, style: str
) -> tuple[Case, bool]:
    """(case, whether it drops)."""
    documents, dropout = BESIDES[(i + i // 4 + i // 16) % 4]
    heads = (("kv_heads", 16),) if form == "all_to_all" and context * tensor > 8 and style == "llama" else ()
    stages, microbatches = (1, 1 + i % 2) if schedule == "accumulate" else (2, 4)
    found = Case(
        style,
        style == "gpt2",
        strategy,
        microbatches,
        (1, 1, tensor),
        remat=remat,
        pipe=stages,
        schedule=schedule,
        options=(*heads, *dropout),
        documents=documents,
        context=context,
        form=form,
    )
    return found, bool(dropout)


PRODUCT = [
    case(i, *choices)
    for i, choices in enumerate(
        itertools.product((2, 4, 8), FORMS, STRATEGIES, REMATS, SCHEDULES, (1, 2), ("gpt2", "llama"))
    )
]


@functools.cache
def one_device(case: Case) -> Reference:
    """Three steps of the library itself on one device: the oracle drops nothing."""
    return run(case, "fp64", 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "drops"), PRODUCT, ids=str)
def test_it_trains_like_one_device(case: Case, drops: bool) -> None:
    devices = case.context * case.mesh[2] * case.pipe
    if devices > jax.device_count():
        pytest.skip(f"needs {devices} devices: JAXDIST_TEST_DEVICES=32")
    if not drops:
        check_wide(case)
        return
    alone = case._replace(strategy="ddp", remat="none", microbatches=1, mesh=(1, 1, 1), pipe=1, schedule="accumulate")
    with jax.enable_x64(True):
        want, got = one_device(alone._replace(context=1, form=None)), run(case, "fp64", 3)
    assert max(abs(a - b) / b for a, b in zip(got.losses, want.losses, strict=True)) < 1e-10
    assert max(oracle.error(a, b) for a, b in zip(got.grads, want.grads, strict=True)) < 1e-10
    assert oracle.error(got.params, want.params) < 1e-10
