"""Token ids outside the vocabulary: the loss is nan, the step is skipped, and the diagnosis names the id."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batches import random_tokens
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from levels import levels

from jaxdist import init_state, make_mesh, make_train_step
from jaxdist.config.schema import ModelConfig
from jaxdist.models.gpt import gpt
from jaxdist.nn import vocab_cross_entropy
from jaxdist.specs import BATCH_SPEC
from jaxdist.trainer.failures.diagnose import unknown_ids

VOCAB = 32


@functools.cache
def compiled(tensor: int, chunk: int | None) -> tuple[Any, Any]:
    """(a new state, the step) of a small GPT; with sequence parallelism where there is a chunk."""
    mesh, config = make_mesh(tensor=tensor), ModelConfig(layers=1, width=16, heads=2, vocab=VOCAB, loss_chunk=chunk)
    model, tx = gpt(config, max_length=8, sequence_parallel=chunk is not None), optax.sgd(0.1)
    return lambda: init_state(model, tx, mesh), make_train_step(model, tx, mesh)


def batch_with(changes: dict[tuple[str, int, int], int]) -> dict[str, np.ndarray]:
    """changes: (leaf, row, position) -> value."""
    batch = {name: leaf.copy() for name, leaf in random_tokens(vocab=VOCAB).items()}
    for (name, row, place), value in changes.items():
        batch[name][row, place] = value
    return batch


def train(changes: dict[tuple[str, int, int], int], how: tuple[int, int | None]) -> tuple[Any, Any, dict[str, Any]]:
    """(parameters before, parameters after, metrics) of one step."""
    new, step = compiled(*how)
    state = new()
    before = jax.device_get(state.params)
    state, metrics = step(state, batch_with(changes))
    return before, jax.device_get(state.params), jax.device_get(metrics)


# Devices of `tensor`, loss_chunk.
LAYOUTS = [(2, 24), pytest.param((2, None), marks=pytest.mark.slow), pytest.param((1, None), marks=pytest.mark.slow)]


@pytest.mark.parametrize("how", LAYOUTS, ids=str)
@pytest.mark.parametrize("where", [("inputs", 3, 4, VOCAB), ("inputs", 0, 7, -1), ("targets", 5, 7, VOCAB)], ids=str)
def test_a_step_with_an_unknown_id_is_skipped(where: tuple[str, int, int, int], how: tuple[int, int | None]) -> None:
    *place, value = where
    before, after, metrics = train({tuple(place): value}, how)  # type: ignore[dict-item]
    assert np.isnan(metrics["loss"]) and metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize("dtype", levels([jnp.uint8, jnp.int8, jnp.uint16, jnp.int16, jnp.uint32], everyday=5))
def test_ids_of_a_narrow_type(dtype: Any) -> None:
    """Whose type has no number as large as the vocabulary."""
    vocab = jnp.iinfo(dtype).max % 2**16 + 1
    mesh = make_mesh(tensor=2)
    ids = jnp.array([[0, vocab - 1, vocab // 2]], dtype)
    run = lambda ids, logits: vocab_cross_entropy(logits, ids)  # noqa: E731
    found = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P(), P(None, None, "tensor")), out_specs=P()))(
        ids, jnp.zeros((1, 3, vocab))
    )
    np.testing.assert_allclose(found, np.log(vocab), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("how", LAYOUTS, ids=str)
def test_a_target_that_counts_nothing_may_be_any_number(how: tuple[int, int | None]) -> None:
    """Its weight is 0, or it is negative, as PyTorch's ignore_index."""
    none = {("weights", 1, 1): 0, ("weights", 3, 4): 0}
    _, want, metrics = train(none, how)
    ignored = {("weights", 3, 4): 0, ("targets", 3, 4): 70_000, ("targets", 1, 1): -100}
    _, got, other = train(ignored, how)
    assert metrics["loss"] == other["loss"] and other["skipped"] == 0
    jax.tree.map(np.testing.assert_array_equal, want, got)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ""),
        ({("targets", 0, 0): -100}, ""),
        ({("inputs", 7, 2): 99}, "inputs hold the token id 99.* ids 0 to 31"),
        ({("inputs", 7, 2): -1}, "inputs hold the token id -1"),
        ({("targets", 7, 2): 32}, "targets hold the token id 32"),
    ],
)
def test_the_diagnosis_names_the_id(change: dict[Any, int], told: str) -> None:
    shards = jax.device_put(batch_with(change), NamedSharding(make_mesh(data=2), BATCH_SPEC))
    found = unknown_ids(shards, VOCAB)
    assert re.search(told, found) if told else found == ""
    assert unknown_ids(shards, None) == "" and unknown_ids({"images": jnp.ones(3)}, VOCAB) == ""
