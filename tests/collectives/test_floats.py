"""Sums of floats: how far from exact, the same bits on all devices, and `ordered`, whose bits do not depend on their
number."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_cases import NAMES, has, on_every_device
from levels import levels, others_slow

from jaxdist.collectives import all_reduce, reduce, reduce_scatter
from jaxdist.collectives.algorithms.ordered import SMALL

UNIT_ROUNDOFF = {jnp.float32: 2.0**-24, jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-11}


def gamma(n: int, unit_roundoff: float) -> float:
    """Of a sum of n terms in any order, |error| <= gamma sum |x|: Higham, Accuracy and Stability of Numerical
    Algorithms, 2nd edition, section 4.2. (n-1) unit roundoffs, and what n-1 of them compound to."""
    return (n - 1) * unit_roundoff / (1 - (n - 1) * unit_roundoff)


def random_rows(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Of both signs and of sizes from 1e-3 to 1e3, so that every addition rounds."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, shape)).astype(dtype)


def check_sums(name: str, n: int, sizes: tuple[int, ...], dtypes: tuple[Any, ...]) -> None:
    rows = [random_rows((n, n * size), dtype) for dtype in dtypes for size in sizes]

    def function(rows: list[jax.Array]) -> list[Any]:
        one_short = [x[:-1] for x in rows]  # n does not divide these
        return [all_reduce(one_short, "data", algorithm=name), reduce_scatter(rows, "data", algorithm=name)]

    for x, whole, parts in zip(rows, *on_every_device(function, rows, data=n), strict=True):
        unit = UNIT_ROUNDOFF[x.dtype.type]
        exact, largest = x.astype(np.float64).sum(0), gamma(n, unit) * np.abs(x.astype(np.float64)).sum(0)
        assert len({row.tobytes() for row in whole}) == 1
        assert np.all(np.abs(whole[0] - exact[:-1]) <= largest[:-1])
        assert np.all(np.abs(parts.ravel() - exact) <= largest)


@pytest.mark.parametrize("name", levels(NAMES, everyday=3))
def test_sums_are_within_the_bound_and_the_same_on_all_devices(name: str) -> None:
    check_sums(name, 8, (130,), (jnp.float32, jnp.bfloat16))


@pytest.mark.parametrize("name", levels(NAMES, everyday=5))
def test_the_mean_is_the_sum_divided(name: str) -> None:
    x = random_rows((3, 30), np.float32)
    operations = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "reduce": reduce}

    def function(x: jax.Array) -> list[Any]:
        chosen = [operations[operation] for operation in operations if has(name, operation)]
        return [[f(x, "data", algorithm=name, op=op) for op in ("mean", "sum")] for f in chosen]

    for mean, total in on_every_device(function, x, data=3):
        np.testing.assert_allclose(mean, total / 3, rtol=2.0**-23)


@pytest.mark.parametrize(("name", "n"), levels(itertools.product(NAMES, range(2, 9)), slow=5))
def test_sums_of_all_sizes_are_within_the_bound_and_the_same_on_all_devices(name: str, n: int) -> None:
    check_sums(name, n, (1, 5000), tuple(UNIT_ROUNDOFF))


def pairwise(rows: list[Any]) -> Any:
    """0 with 1, 2 with 3; then pairs of pairs; one that is left over waits."""
    while len(rows) > 1:
        pairs = [rows[i] + rows[i + 1] for i in range(0, len(rows) - 1, 2)]
        rows = pairs + rows[len(rows) - len(rows) % 2 :]
    return rows[0]


SHARES = [1000, SMALL + 8 * 101]


def summed(name: str, n: int, x: np.ndarray) -> list[np.ndarray]:
    """The 8 rows of x on n devices, 8/n on each: (all_reduce of an odd size, reduce_scatter put together)."""

    def function(rows: jax.Array) -> list[jax.Array]:
        own = pairwise(list(rows))
        parts = reduce_scatter(own, "data", algorithm=name)
        return [all_reduce(own[:-1], "data", algorithm=name), parts]

    whole, parts = on_every_device(function, x.reshape(n, 8 // n, -1), data=n)
    assert len({row.tobytes() for row in whole}) == 1
    return [whole[0], parts.ravel()]


@pytest.mark.parametrize("size", SHARES)
def test_ordered_gives_the_same_bits_on_any_number_of_devices(size: int) -> None:
    x = random_rows((8, size), np.float32)
    tree = pairwise(list(x))
    for n in (1, 2, 4, 8):
        whole, parts = summed("ordered", n, x)
        assert whole.tobytes() == tree[:-1].tobytes(), n
        assert parts.tobytes() == tree.tobytes(), n


@pytest.mark.parametrize("size", SHARES)
def test_ring_does_not(size: int) -> None:
    x = random_rows((8, size), np.float32)
    for got, want in zip(summed("ring", 8, x), summed("ring", 4, x), strict=True):
        assert got.tobytes() != want.tobytes()
        assert got.tobytes() != pairwise(list(x))[: got.size].tobytes()


@pytest.mark.parametrize("n", others_slow([3, 5, 6, 7], 5, 6))
def test_ordered_adds_pairs_of_pairs_on_any_number_of_devices(n: int) -> None:
    x = random_rows((n, n * 300), np.float32)
    whole, parts = on_every_device(
        lambda x: [all_reduce(x, "data", algorithm="ordered"), reduce_scatter(x, "data", algorithm="ordered")],
        x,
        data=n,
    )
    tree = pairwise(list(x))
    assert all(row.tobytes() == tree.tobytes() for row in whole)
    assert parts.tobytes() == tree.tobytes()
