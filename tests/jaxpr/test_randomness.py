"""Random numbers of a user's loss that are the same at every step are found, and no others."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax, random

import jaxdist
from jaxdist.jaxpr.dependence import copies, depends
from jaxdist.jaxpr.randomness import drawn_with_stored_keys, moving, refuse_stored_keys

KEY, OLD_KEY = random.key(0), random.PRNGKey(0)
KEYS = random.split(random.key(1), 8)
BATCH = {"batch": np.ones((8, 4), np.float32), "keys": KEYS}


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linear(self.dropout(x))


GRAPH, PARAMS, REST = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)


def normal(key: Any) -> jax.Array:
    return random.normal(key, (8, 4))


def dropped(batch: Any, seed: Callable[[Any, Any], Any] = lambda model, keys: None) -> Any:
    model = nnx.merge(GRAPH, PARAMS, REST, copy=True)
    seed(model, batch["keys"])
    return model(batch["batch"]).sum()


def scanned(key: Any, xs: Any = None, draw: Callable[[Any], Any] = normal) -> jax.Array:
    """A key in the carry of a scan, split in each round."""

    def body(carry: Any, _: Any) -> Any:
        key, total = carry
        key, own = random.split(key)
        return (key, total + draw(own).sum()), None

    return lax.scan(body, (key, jnp.float32(0)), xs, length=3)[0][1]


def looped(key: Any, rounds: Any) -> jax.Array:
    """As `scanned`, in a loop whose length may depend on data."""

    def body(carry: Any) -> Any:
        i, key, total = carry
        key, own = random.split(key)
        return i + 1, key, total + normal(own).sum()

    return lax.while_loop(lambda carry: carry[0] < rounds, body, (jnp.int32(0), key, jnp.float32(0)))[2]


def by_rule(key: Any) -> jax.Array:
    """Inside a function with a derivative of its own."""

    @jax.custom_vjp
    def noisy(x: jax.Array) -> jax.Array:
        return x + normal(key)

    noisy.defvjp(lambda x: (noisy(x), None), lambda _, g: (g,))
    return noisy(jnp.ones((8, 4))).sum()


def alternating(batch: Any) -> jax.Array:
    """The first round draws with a stored key, unless the step's is carried in."""
    return scanned_from(KEY, batch["keys"][0])


def scanned_from(first: Any, then: Any) -> jax.Array:
    return lax.scan(lambda key, _: (then, normal(key).sum()), first, length=3)[1].sum()


STORED: dict[str, Callable[[Any], Any]] = {
    "nnx dropout": dropped,
    "a key": lambda batch: normal(KEY).sum(),
    "a key of the old kind": lambda batch: normal(OLD_KEY).sum(),
    "a key made inside": lambda batch: normal(random.key(3)).sum(),
    "folded with a number": lambda batch: normal(random.fold_in(KEY, 7)).sum(),
    "one of two": lambda batch: (normal(batch["keys"][0]) * random.bernoulli(KEY, 0.5, (8, 4))).sum(),
    "times what depends on the keys": lambda batch: (normal(KEY) * normal(batch["keys"][0])).sum(),
    "gamma": lambda batch: random.gamma(KEY, batch["batch"]).sum(),
    "poisson": lambda batch: random.poisson(KEY, batch["batch"]).sum(),
    "bits": lambda batch: lax.rng_bit_generator(np.zeros(4, np.uint32), (3,))[1].sum(),
    "threefry": lambda batch: jax.extend.random.threefry_2x32(np.zeros(2, np.uint32), np.arange(8, dtype=np.uint32)),
    "jit": lambda batch: jax.jit(lambda x: (x * normal(KEY)).sum())(batch["batch"]),
    "remat": lambda batch: jax.checkpoint(lambda x: (x * normal(KEY)).sum())(batch["batch"]),  # type: ignore[attr-defined]
    "vmap": lambda batch: jax.vmap(lambda x: x * random.normal(KEY, (4,)))(batch["batch"]).sum(),
    "scan": lambda batch: scanned(KEY),
    "scan over data": lambda batch: scanned(KEY, batch["batch"][:3]),
    "while": lambda batch: looped(KEY, 3),
    "while of a length from data": lambda batch: looped(KEY, batch["batch"][0, 0].astype(int)),
    "cond": lambda batch: lax.cond(batch["batch"].sum() > 0, lambda: normal(KEY).sum(), lambda: jnp.float32(0)),
    "custom_vjp": lambda batch: by_rule(KEY),
}
OF_THIS_STEP: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda batch: batch["batch"].sum(),
    "nnx dropout": functools.partial(dropped, seed=lambda model, keys: nnx.reseed(model, default=keys[0])),
    "a key": lambda batch: normal(batch["keys"][0]).sum(),
    "data of the old kind": lambda batch: normal(random.key_data(batch["keys"][0])).sum(),
    "split": lambda batch: normal(random.split(batch["keys"][0], 3)[1]).sum(),
    "a stored key, folded": lambda batch: normal(random.fold_in(KEY, random.bits(batch["keys"][0]))).sum(),
    "a key of the data": lambda batch: normal(random.fold_in(KEY, batch["batch"][0, 0].astype(int))).sum(),
    "gamma": lambda batch: random.gamma(batch["keys"][0], jnp.ones((4,))).sum(),
    "poisson": lambda batch: random.poisson(batch["keys"][0], 3.0, (4,)).sum(),
    "vmap": lambda batch: jax.vmap(lambda key: random.normal(key, (4,)))(batch["keys"]).sum(),
    "jit": lambda batch: jax.jit(lambda key: normal(key).sum())(batch["keys"][0]),
    "scan": lambda batch: scanned(batch["keys"][0]),
    "scan over keys": lambda batch: lax.scan(lambda _, key: (None, normal(key).sum()), None, batch["keys"])[1].sum(),
    "scan whose later rounds have a key": alternating,
    "while": lambda batch: looped(batch["keys"][0], 3),
    "fori_loop": lambda batch: lax.fori_loop(
        0, 3, lambda i, total: total + normal(random.fold_in(batch["keys"][0], i)).sum(), jnp.float32(0)
    ),
    "cond": lambda batch: lax.cond(
        batch["batch"].sum() > 0, lambda key: normal(key).sum(), lambda key: jnp.float32(0), batch["keys"][0]
    ),
    "custom_vjp": lambda batch: by_rule(batch["keys"][0]),
    "a model made inside, for its structure": lambda batch: (
        Model(nnx.Rngs(0)).linear.kernel[...].shape[0] * batch["batch"].sum()
    ),
}


def refuse(loss: Callable[[Any], Any], batch: Any) -> None:
    """`refuse_stored_keys` of a loss of which all arguments are new at every step."""
    refuse_stored_keys(jax.make_jaxpr(loss)(batch), [True] * len(jax.tree.leaves(batch)))


@pytest.mark.parametrize("name", STORED)
def test_a_stored_key_is_refused(name: str) -> None:
    with jax.numpy_dtype_promotion("standard"), pytest.raises(jaxdist.UserError) as found:
        refuse(STORED[name], BATCH)
    text = str(found.value)
    assert "loss_fn: draws random numbers with a stored key" in text and "keys[0]" in text and "\n" not in text
    assert "test_randomness.py:" in text


@pytest.mark.parametrize("name", OF_THIS_STEP)
def test_the_keys_of_the_step_are_taken(name: str) -> None:
    with jax.numpy_dtype_promotion("standard"):
        refuse(OF_THIS_STEP[name], BATCH)  # raises nothing
        jaxpr = jax.make_jaxpr(OF_THIS_STEP[name])(BATCH)
    assert drawn_with_stored_keys(jaxpr, [True] * len(jax.tree.leaves(BATCH))) == []


def test_a_draw_without_a_key_is_refused() -> None:
    def loss(batch: Any) -> Any:
        return jax.jit(lambda x: x * lax.rng_uniform(0.0, 1.0, (8, 4)))(batch["batch"]).sum()

    with pytest.raises(jaxdist.UserError, match=r"lax.rng_uniform \(test_randomness.py:\d+\), which takes no key"):
        refuse(loss, BATCH)


def drawn(state: Any) -> jax.Array:
    return random.normal(random.fold_in(random.wrap_key_data(state["key"]), state["count"]), (4,)).sum()


def advance(state: Any) -> Any:
    """The new state of a loss that counts, as Rngs of NNX do."""
    return {**state, "count": state["count"] + 1}


CARRIED: dict[str, tuple[bool, Callable[[Any, Any], Any]]] = {  # whether the numbers move; (batch, state) -> new state
    "a counter": (True, lambda batch, state: advance(state)),
    "a counter in jit": (True, lambda batch, state: jax.jit(advance)(state)),
    "a split key": (
        True,
        lambda batch, state: {**state, "key": random.key_data(random.split(random.wrap_key_data(state["key"]))[0])},
    ),
    "counted in a loop": (
        True,
        lambda batch, state: lax.scan(lambda carry, _: (advance(carry), None), state, None, length=2)[0],
    ),
    "counted in a branch": (True, lambda batch, state: lax.cond(batch[0, 0] > 0, advance, lambda state: state, state)),
    "of the batch": (True, lambda batch, state: {**state, "count": batch.sum().astype(jnp.uint32)}),
    "unchanged": (False, lambda batch, state: state),
    "unchanged in jit": (False, lambda batch, state: jax.jit(lambda state: (state, state["count"] + 1)[0])(state)),
    "copied": (False, lambda batch, state: lax.optimization_barrier(jax.tree.map(jnp.copy, state))),
    "rematerialised": (
        False,
        lambda batch, state: jax.checkpoint(lambda state: (state, state["count"] + 1)[0])(state),  # type: ignore[attr-defined]
    ),
    "through stop_gradient": (False, lambda batch, state: lax.stop_gradient(state)),
    "through a loop": (False, lambda batch, state: lax.scan(lambda carry, row: (carry, row.sum()), state, batch)[0]),
    "through a while": (
        False,
        lambda batch, state: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1]), (0, state))[1],
    ),
    "through a branch": (False, lambda batch, state: lax.cond(batch[0, 0] > 0, lambda s: s, lambda s: s, state)),
    "a constant": (False, lambda batch, state: {**state, "count": jnp.uint32(3)}),
    "a function of what stays": (False, lambda batch, state: {**state, "count": state["key"][0] + 1}),
}


@pytest.mark.parametrize("name", CARRIED)
def test_a_state_that_moves_gives_keys(name: str) -> None:
    moves, new = CARRIED[name]
    state = {"count": np.uint32(0), "key": np.zeros(2, np.uint32)}
    program = jax.make_jaxpr(lambda batch, state: (drawn(state), new(batch, state)))(BATCH["batch"], state)
    found = moving(program, [True, False, False], 2)
    assert any(found[1:]) == moves
    if moves:
        refuse_stored_keys(program, found)
    else:
        with pytest.raises(jaxdist.UserError, match="a stored key"):
            refuse_stored_keys(program, found)


def test_copies_are_followed_result_by_result() -> None:
    def program(a: jax.Array, b: jax.Array, rows: jax.Array) -> Any:
        def body(carry: Any, row: jax.Array) -> Any:
            first, second, third = carry
            return (first, third, second + row), (row, row + 1)

        carry, (same, more) = lax.scan(body, (a, b, b), rows)
        return b, *carry, same, more, lax.cond(a > 0, lambda: (a, b), lambda: (a, a)), a + 0

    found = copies(jax.make_jaxpr(program)(1.0, 2.0, jnp.ones(3)), ["a", "b", "rows"])
    assert found == ["b", "a", None, None, "rows", None, "a", None, None]


def test_the_line_is_that_of_the_call() -> None:
    def twice(batch: Any) -> Any:
        return random.bernoulli(batch["keys"][0], 0.5, (8, 4)).sum() + random.bernoulli(KEY, 0.5, (8, 4)).sum()

    lines = twice.__code__.co_firstlineno + 1
    with pytest.raises(jaxdist.UserError, match=rf"test_randomness.py:{lines}\)"):
        refuse(twice, BATCH)


def test_a_step_refuses_a_frozen_mask() -> None:
    mesh, tx = jaxdist.make_mesh(data=2), optax.sgd(0.1)

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        model = nnx.merge(GRAPH, params, REST, copy=True)
        return (model(batch) ** 2).sum(), batch.shape[0]

    step = jaxdist.make_train_step(loss, tx, mesh)
    with pytest.raises(jaxdist.UserError, match=r"stored key, .*nnx.reseed\(model, default=keys\[0\]"):
        step.lower(jaxdist.state_target(PARAMS, tx, mesh), BATCH["batch"])


def test_dependence_is_followed_result_by_result() -> None:
    def program(a: jax.Array, b: jax.Array) -> Any:
        pair = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + b), (0.0, a))
        return a, lax.cond(b[0] > 0, lambda: 1.0, lambda: 2.0), pair[0], pair[1]

    jaxpr = jax.make_jaxpr(program)(jnp.ones(2), jnp.ones(2))
    assert depends(jaxpr, [True, False]) == [True, False, False, True]
    assert depends(jaxpr, [False, True]) == [False, True, False, True]
