"""`parallel.batch_split`: blocks that run for two halves of the samples train like one device, and send as much."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import Case, check_fp32, check_wide
from levels import levels

from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.parallel.blocks.batch_split import in_halves
from jaxdist.parallel.options import StepOptions
from jaxdist.plan.traced.ledger import ledger
from jaxdist.step import make_train_step

CASES = [
    Case("llama", False, "zero3", 1, (1, 2, 2), scan_blocks=0, sequence=True),
    Case("gpt2", True, "ddp", 2, (1, 1, 8), sequence=True, remat="dots"),
    Case("gpt2", True, "ddp", 1, (1, 1, 1)),
    Case("llama", True, "zero2", 1, (1, 3, 2), sequence=True, documents=True, remat="full"),
    Case("gpt2", False, "zero3", 4, (2, 2, 1), pipe=2, schedule="one_f_one_b"),
    Case("llama", False, "ddp", 4, (1, 1, 4), pipe=2, schedule="zero_bubble", sequence=True),
    Case("llama", False, "zero1", 2, (2, 1, 4), sequence=True, scan_blocks=2, remat=("attention.out", "mlp.hidden")),
    Case("llama", False, "zero3", 1, (1, 2, 1), context=2, form="ring"),
    Case("gpt2", True, "zero3", 1, (2, 1, 2), remat="sqrt"),
]
CASES = [case._replace(batch_split=2) for case in CASES]
LENGTH = 16


@pytest.mark.parametrize("case", levels(CASES, everyday=len(CASES), common=2), ids=str)
def test_a_model_trains_like_one_device(case: Case) -> None:
    check_wide(case)


@pytest.mark.parametrize("case", levels(CASES, slow=4), ids=str)
def test_in_single_precision_too(case: Case) -> None:
    check_fp32(case)


def sent(batch_split: int, rows: int) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """(calls by op, bytes that a device sends by op) of a step with four rows on each device of a batch axis."""
    model = gpt(
        ModelConfig(layers=2, width=32, heads=8, vocab=64, mlp_width=64), max_length=LENGTH, sequence_parallel=True
    )
    mesh, tx = make_mesh(fsdp=2, tensor=4), optax.sgd(0.1)
    kinds = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((2 * rows, LENGTH), kind) for name, kind in kinds.items()}
    options = StepOptions(strategy="zero3", batch_split=batch_split)
    step = make_train_step(model, tx, mesh, options)
    calls, wire = collections.Counter[str](), collections.Counter[str]()
    for each in ledger(step, state_target(model, tx, mesh, options), batch).collectives:
        if "tensor" in each.axes and each.op in ("all_gather", "reduce_scatter"):
            calls[each.op] += each.calls
            wire[each.op] += round(each.wire_bytes)
    return calls, wire


def test_the_same_bytes_in_twice_as_many_calls() -> None:
    (calls, wire), (halves, same) = sent(1, 4), sent(2, 4)
    blocks = 2 * 4  # two layers, of which each gathers twice and scatters twice in each pass
    assert same == wire
    assert {op: halves[op] - calls[op] for op in calls} == dict.fromkeys(("all_gather", "reduce_scatter"), blocks)


def test_an_odd_number_of_samples_is_one_line() -> None:
    with pytest.raises(UserError, match="batch_split: 2 halves the samples .* which are 3; allowed: an even number"):
        sent(2, 3)


def test_parameters_are_gathered_once() -> None:
    """Each half reads the same gathered parameters: the halves add no collective over fsdp."""

    def gathers(batch_split: int) -> int:
        model = gpt(ModelConfig(layers=2, width=32, heads=8, vocab=64), max_length=LENGTH)
        mesh, tx = make_mesh(fsdp=4), optax.sgd(0.1)
        options = StepOptions(strategy="zero3", batch_split=batch_split)
        kinds = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
        batch = {name: jax.ShapeDtypeStruct((8, LENGTH), kind) for name, kind in kinds.items()}
        found = ledger(make_train_step(model, tx, mesh, options), state_target(model, tx, mesh, options), batch)
        return sum(each.calls for each in found.collectives if "fsdp" in each.axes)

    assert gathers(1) == gathers(2) > 0


def test_halves_are_all_samples_in_order() -> None:
    def block(params: jax.Array, h: jax.Array, keys: jax.Array, rows: dict[str, jax.Array]) -> jax.Array:
        return h * params + rows["rows"] + keys[:, None]

    h, rows = np.arange(6.0).reshape(6, 1), 10 * np.arange(6.0).reshape(6, 1)
    found = in_halves(block)(jnp.asarray(2.0), jnp.asarray(h), jnp.zeros(6), {"rows": jnp.asarray(rows)})
    np.testing.assert_array_equal(found, 2 * h + rows)


def test_what_has_no_row_for_each_sample_is_one_line() -> None:
    block = in_halves(lambda params, h, keys, mask: h * mask[: h.shape[0], :1])
    with pytest.raises(UserError, match=r"and \(8, 8\) has no row for each of 6 samples; let rows\(batch\) give"):
        block(jnp.zeros(()), jnp.zeros((6, 1)), jnp.zeros(6), jnp.zeros((8, 8)))


def test_a_loss_of_ones_own_has_no_blocks() -> None:
    mesh, tx = make_mesh(data=2), optax.sgd(0.1)
    loss = lambda params, batch, keys: ((params["w"] * batch["x"]).sum(), 1.0)  # noqa: E731
    with pytest.raises(UserError, match="batch_split=2: a user's loss_fn is one unit without blocks"):
        make_train_step(loss, tx, mesh, StepOptions(batch_split=2)).lower(
            state_target({"w": jnp.ones(3)}, tx, mesh), {"x": np.ones((4, 3), np.float32)}
        )


@pytest.mark.parametrize("given", [{"prefetch": 1}, {"batch_split": 3}])
def test_what_does_not_go_together_is_one_line(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="parallel.batch_split: "):
        StepOptions(**{"batch_split": 2, **given})
