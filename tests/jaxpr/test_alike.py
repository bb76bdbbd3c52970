"""`jaxdist.jaxpr.alike`: parts of a program that differ in numbers alone, computed as one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.jaxpr.alike import stacked
from jaxdist.jaxpr.walk import every_equation

Function = Callable[..., tuple[list[Any], Any]]
KEY = jax.random.key(0)


def drawn(key: jax.Array) -> tuple[list[Any], Any]:
    """Four parts with keys and numbers of their own, and something else."""
    count, parts = jnp.uint32(3), []
    for i in range(4):
        own = jax.random.fold_in(key, count)
        split = jax.random.split(jax.random.fold_in(key, count + 1))
        table = jnp.float32(0.1 * i) * jax.random.normal(own, (5, 2)) + jnp.arange(2.0)
        parts.append({"w": table, "v": jax.random.uniform(split[1], (3,)), "b": jnp.zeros(7), "n": count * 2})
        count = count + 2
    return parts, {"last": jax.random.normal(jax.random.fold_in(key, count), (2,)), "count": count}


def unlike(key: jax.Array) -> tuple[list[Any], Any]:
    """Parts of other operations, other sizes on the way, and other arrays."""
    parts = [
        {"w": jax.random.normal(key, (3,)), "c": jnp.asarray(np.arange(3.0)), "s": jnp.ones(4).sum()},
        {"w": jax.random.uniform(key, (3,)), "c": jnp.asarray(np.arange(3.0) + 1), "s": jnp.ones(5).sum()},
    ]
    return parts, ()


def same(key: jax.Array) -> tuple[list[Any], Any]:
    """Parts that are one and the same, and others that no part is."""
    one = {"w": jax.random.normal(key, (3,)), "k": key}
    return [one, one], [one["w"], key]


def pairs(key: jax.Array) -> tuple[list[Any], Any]:
    """Of operations with several results."""
    parts = [jax.lax.top_k(jax.random.normal(jax.random.fold_in(key, i), (9,)), 2) for i in range(3)]
    return [{"first": a, "where": b} for a, b in parts], None


def numbers(key: jax.Array) -> tuple[list[Any], Any]:
    """Parts that differ in the sign of a zero, and in not being a number."""
    return [{"w": jnp.full((2,), value)} for value in (0.0, -0.0, np.nan)], None


def deep(key: jax.Array) -> tuple[list[Any], Any]:
    """Parts of more operations in a row than Python has frames."""
    parts = []
    for i in range(2):
        value = jax.random.normal(jax.random.fold_in(key, i), (2,))
        for _ in range(1200):
            value = value * 1.001
        parts.append({"w": value})
    return parts, None


@pytest.mark.parametrize("function", [drawn, unlike, same, pairs, numbers, pytest.param(deep, marks=pytest.mark.slow)])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_it_gives_what_the_program_gives(function: Function, wrap: Any) -> None:
    def plain(key: jax.Array) -> Any:
        parts, others = function(key)
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts), others

    got, want = (wrap(each)(KEY) for each in (lambda key: stacked(function, key), plain))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert one.dtype == other.dtype
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_one_program_draws_all_parts() -> None:
    jaxpr = jax.make_jaxpr(lambda key: stacked(drawn, key))(KEY).jaxpr
    names = [site.equation.primitive.name for site in every_equation(jaxpr)]
    assert names.count("random_bits") == 3  # w, v and last; of four parts one by one it would be 9


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_that_vmap_would_draw_otherwise_from_are_drawn_from_one_by_one(impl: str) -> None:
    parts, _ = stacked(drawn, jax.random.key(0, impl=impl))
    want = jnp.stack([part["w"] for part in drawn(jax.random.key(0, impl=impl))[0]])
    np.testing.assert_array_equal(parts["w"], want)


def test_effects_of_parts_stay(capfd: pytest.CaptureFixture[str]) -> None:
    def printed(key: jax.Array) -> tuple[list[Any], Any]:
        jax.debug.print("drawn")
        return drawn(key)

    jax.block_until_ready(jax.jit(lambda key: stacked(printed, key))(KEY))
    jax.effects_barrier()
    assert "drawn" in capfd.readouterr().out
