"""Several processes on CPUs: gloo's reduce-scatter is wrong at times (jax issue 40830), and no program contains it."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import token_shapes
from jax.sharding import PartitionSpec as P
from layouts import SEQ, Case, batch_size, check_wide, parts_of
from levels import levels

from jaxdist import collectives, make_mesh

STEPS = [
    Case("gpt2", True, "zero3", 2, (1, 2, 2), sequence=True),
    Case("llama", False, "zero2", 1, (2, 2, 2), sequence=True, remat="full"),
    Case("gpt2", True, "zero3", 1, (1, 2, 2), sequence=True, prefetch=1, remat="full"),
    Case("gpt2", False, "zero1", 4, (1, 2, 2), sequence=True, pipe=2, schedule="zero_bubble"),
    Case("gpt2", True, "zero3", 4, (2, 2, 1), pipe=2, schedule="one_f_one_b"),
    Case("llama", True, "ddp", 1, (2, 2, 1), algorithm="balanced_fusion"),
]
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter")


@pytest.fixture(autouse=True)
def over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process seems to be one of several."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)


GROUPS = [None, [[0, 2], [1, 3]]]


@pytest.mark.parametrize(("operation", "groups"), levels(itertools.product(OPERATIONS, GROUPS), everyday=5), ids=str)
def test_no_collective_and_no_gradient_of_one_contains_a_reduce_scatter(operation: str, groups: Any) -> None:
    def function(x: jax.Array) -> jax.Array:
        loss = lambda x: (getattr(collectives, operation)(x, "data", groups=groups) ** 3).sum()  # noqa: E731
        return jax.grad(loss)(x)

    mesh = make_mesh(data=4)
    run = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    compiled = run.lower(jnp.arange(64.0)).compile()
    assert "reduce-scatter" not in compiled.as_text()
    assert any(name in compiled.as_text() for name in ("all-reduce", "all-to-all", "all-gather"))


@pytest.mark.parametrize("operation", ["all_gather", "gather"])
def test_its_gradient_is_that_of_one_process(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(x: jax.Array) -> jax.Array:
            whole = getattr(collectives, operation)(x, "data", dim=1)
            return (whole**3 * jnp.arange(whole.size, dtype=x.dtype).reshape(whole.shape)).sum()

        return jax.grad(loss)(x), jax.grad(lambda x: (jax.grad(loss)(x) * x).sum())(x)

    mesh, x = make_mesh(data=4), jnp.asarray(np.random.default_rng(0).integers(-9, 9, (8, 3)), jnp.float32)
    results = []
    for several in (True, False):
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda several=several: several)
        run = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
        results.append(jax.device_get(run(x)))
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("case", levels(STEPS, slow=2, common=1), ids=str)
def test_no_step_contains_a_reduce_scatter(case: Case) -> None:
    _, target, step = parts_of(case, "fp32")
    text = step.lower(target, token_shapes(batch_size(case), SEQ)).compile().as_text()
    assert "reduce-scatter" not in text
    assert any(name in text for name in ("all-to-all", "collective-permute"))


@pytest.mark.slow
def test_a_step_without_them_trains_like_one_device() -> None:
    check_wide(STEPS[0])
