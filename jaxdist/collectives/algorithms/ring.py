"""The ring, from `lax.ppermute`: every device sends to its right neighbour and adds what comes from its left.

All-reduce of N bytes over n devices is a reduce-scatter and an all-gather of n-1 rounds each; in every round each
device sends one chunk of N/n, so 2 (n-1)/n N in all, whatever n (Patarasuk and Yuan 2009; Baidu 2017).
Results are typed varying: that they are equal everywhere cannot be written in the type (see `claim_replicated`).
"""

import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.algorithm import Algorithm, Array, ring_cost
from jaxdist.collectives.varying import to_varying, varying_axes


def _right(x: Array, axes: tuple[str, ...]) -> Array:
    n = lax.axis_size(axes)
    return lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)])


def _reduce_scatter(x: Array, axes: tuple[str, ...], dim: int) -> Array:
    n, rank = lax.axis_size(axes), lax.axis_index(axes)
    x = to_varying(x, axes)
    size = x.shape[dim] // n

    def chunk(i: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, (i % n) * size, size, dim)

    # Chunk c starts at device c+1 and is complete when it arrives at device c, n-1 rounds later.
    def round_(step: int, travelling: Array) -> Array:
        return _right(travelling, axes) + chunk(rank - 2 - step)

    return lax.fori_loop(0, n - 1, round_, chunk(rank - 1))


def _all_gather(x: Array, axes: tuple[str, ...], dim: int) -> Array:
    n, rank = lax.axis_size(axes), lax.axis_index(axes)
    x = to_varying(x, axes)
    size = x.shape[dim]
    shape = (*x.shape[:dim], n * size, *x.shape[dim + 1 :])

    def place(whole: Array, part: Array, i: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(whole, part, (i % n) * size, dim)

    def round_(step: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        whole, travelling = carry
        travelling = _right(travelling, axes)
        return place(whole, travelling, rank - 1 - step), travelling

    empty = to_varying(jnp.zeros(shape, x.dtype), varying_axes(x))
    return lax.fori_loop(0, n - 1, round_, (place(empty, x, rank), x))[0]


def _all_reduce(x: Array, axes: tuple[str, ...]) -> Array:
    flat = jnp.pad(x.ravel(), (0, -x.size % lax.axis_size(axes)))  # n equal chunks; the padding never leaves from here
    return _all_gather(_reduce_scatter(flat, axes, 0), axes, 0)[: x.size].reshape(x.shape)


ring = Algorithm(_all_reduce, _reduce_scatter, _all_gather, ring_cost)
