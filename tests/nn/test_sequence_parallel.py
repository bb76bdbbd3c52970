"""`parallel.sequence_parallel`: trains like one device, sends the same bytes, keeps less."""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from layouts import SEQ, Case, check_wide, initial, make_batch, model_config
from levels import levels, others_slow

from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.plan.traced.ledger import ledger
from jaxdist.state import place_params
from jaxdist.step import make_train_step

LAYERS, WIDTH, ROWS, LENGTH = 3, 32, 4, 16
CASES = [
    Case("gpt2", True, "ddp", 1, (1, 1, 2), sequence=True),
    Case("llama", False, "zero3", 2, (2, 2, 2), sequence=True),
    Case("gpt2", False, "zero2", 1, (1, 1, 8), sequence=True, remat="full"),
    Case("gpt2", True, "zero3", 1, (1, 2, 4), sequence=True, prefetch=1, remat="full", loss_chunk=7),
    Case("gpt2", True, "zero3", 4, (1, 2, 2), sequence=True, pipe=2, schedule="one_f_one_b"),
    Case("llama", True, "zero1", 1, (2, 1, 4), sequence=True),
    Case("llama", False, "ddp", 4, (1, 1, 4), sequence=True, pipe=2, schedule="zero_bubble"),
    Case("gpt2", False, "zero2", 4, (1, 4, 2), sequence=True, remat="dots"),
    Case("llama", True, "zero3", 1, (4, 1, 2), sequence=True, remat=("attention.out", "mlp.hidden")),
    Case("gpt2", True, "zero1", 4, (1, 1, 2), sequence=True, pipe=4, schedule="gpipe"),
]


@pytest.mark.parametrize("case", levels(CASES, everyday=20, slow=8, common=2), ids=str)
def test_positions_split_over_tensor_equal_one_device(case: Case) -> None:
    check_wide(case)


def step_and_inputs(tensor: int, *, sequence: bool, remat: str = "none", **model: Any) -> Any:
    config = ModelConfig(layers=LAYERS, width=WIDTH, heads=8, vocab=64, mlp_width=64, **model)
    parts = gpt(config, max_length=LENGTH, sequence_parallel=sequence)
    mesh, tx = make_mesh(tensor=tensor), optax.sgd(0.1)
    step = make_train_step(parts, tx, mesh, remat=remat)
    kinds = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), kind) for name, kind in kinds.items()}
    return step, state_target(parts, tx, mesh), batch


def sent(tensor: int, *, sequence: bool, remat: str = "none") -> tuple[collections.Counter[str], float, float]:
    """(calls by op; bytes that a device sends of activations, [B, S, D] or its shard; of everything else)."""
    calls: collections.Counter[str] = collections.Counter()
    activations = others = 0.0
    for each in ledger(*step_and_inputs(tensor, sequence=sequence, remat=remat)).collectives:
        assert each.axes == ("tensor",)
        whole = each.bytes_per_call * (tensor if each.op == "all_gather" else 1)
        if whole == ROWS * LENGTH * WIDTH * 4:
            calls[each.op] += each.calls
            activations += each.wire_bytes
        else:
            others += each.wire_bytes
    return calls, activations, others


@pytest.mark.slow
@pytest.mark.parametrize("tensor", others_slow([2, 4, 8], 4))
def test_the_same_bytes_in_other_collectives(tensor: int) -> None:
    calls, before, rest = sent(tensor, sequence=False)
    assert calls == {"psum": 4 * LAYERS + 2}  # a block: two forward, two backward; embedding forward, head backward
    calls, after, more = sent(tensor, sequence=True)
    assert calls == {"all_gather": 4 * LAYERS + 2, "reduce_scatter": 4 * LAYERS + 2}
    assert after == before == (4 * LAYERS + 2) * 2 * (tensor - 1) / tensor * ROWS * LENGTH * WIDTH * 4
    # Gradients of what all devices have: of a block four of norms and two biases, of the head's norm two, positions.
    assert more - rest == ((6 * LAYERS + 2) * WIDTH + LENGTH * WIDTH) * 4 * 2 * (tensor - 1) / tensor


def test_rematerialisation_gathers_again_what_it_does_not_keep() -> None:
    assert sent(2, sequence=True, remat="full")[0] == {"all_gather": 6 * LAYERS + 2, "reduce_scatter": 5 * LAYERS + 2}


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_less_memory(remat: str) -> None:
    def temporary(sequence: bool) -> int:
        config = ModelConfig(layers=3, width=64, heads=4, vocab=16, mlp_width=64)
        parts, mesh, tx = gpt(config, max_length=32, sequence_parallel=sequence), make_mesh(tensor=4), optax.sgd(0.1)
        step = make_train_step(parts, tx, mesh, remat=remat)
        kinds = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
        batch = {name: jax.ShapeDtypeStruct((64, 32), kind) for name, kind in kinds.items()}
        program = step.lower(state_target(parts, tx, mesh), batch).compile()
        return int(program.memory_analysis().temp_size_in_bytes)

    assert temporary(True) < 0.8 * temporary(False)


@pytest.mark.slow
def test_dropout_is_that_of_one_device() -> None:
    config = dataclasses.replace(model_config(CASES[0]), dropout=0.3)

    def grads(tensor: int, *, sequence: bool) -> Any:
        mesh, tx = make_mesh(tensor=tensor), optax.sgd(0.0)
        model = gpt(config, max_length=SEQ, param_dtype=jnp.float64, sequence_parallel=sequence)
        state = place_params(initial(config, "fp64"), tx, state_target(model, tx, mesh))
        step = make_train_step(model, tx, mesh, precision="fp64", return_grads=True)
        return jax.device_get(step(state, make_batch(8, 0))[1]["grads"])

    with jax.enable_x64(True):
        assert oracle.error(grads(4, sequence=True), grads(1, sequence=False)) < 1e-10


def test_segments_are_refused() -> None:
    step, state, batch = step_and_inputs(2, sequence=True, remat="sqrt")
    with pytest.raises(UserError, match="'sqrt' does not go with parallel.sequence_parallel"):
        step.lower(state, batch)


def test_a_length_that_does_not_divide_is_one_line() -> None:
    mesh, tx = make_mesh(tensor=4), optax.sgd(0.1)
    model = gpt(ModelConfig(layers=1, width=32, heads=4, vocab=16), max_length=6, sequence_parallel=True)
    state = state_target(model, tx, mesh)
    batch = {name: np.zeros((2, 6), np.int32) for name in ("inputs", "targets")} | {"weights": np.ones((2, 6))}
    with pytest.raises(UserError, match="6 positions are not divisible by tensor=4"):
        make_train_step(model, tx, mesh).lower(state, batch)
