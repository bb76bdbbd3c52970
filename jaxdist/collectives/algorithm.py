"""What an algorithm for collectives is. Each file in `algorithms/` defines one value of this type."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.collectives.cost import Cost
from jaxdist.collectives.group import Group

Array = jax.Array
COMBINE = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}


class Algorithm(NamedTuple):
    """Collectives over one `Group` of n > 1 devices; None for what the algorithm has no answer to.

    x is typed varying over the group's axes. op is a key of `COMBINE`. dim: `x.shape[dim]` is divisible by n where it
    is cut. root: a rank. Hand-written results are typed varying (see `claim_replicated`), native ones as jax has it.

    cost: (operation, elements of the input on one device, group) -> Cost in elements.
    all_reduce: (x, group, op) -> same shape.
    reduce_scatter: (x, group, op, dim) -> the rank-th of n equal parts of `dim`.
    all_gather: (x, group, dim) -> n times as long along `dim`, in rank order.
    all_to_all: (parts [n, ...], group) -> [n, ...]: part i goes to rank i, entry i came from it.
    broadcast: (x, group, root) -> the root's x.
    reduce: (x, group, op, root) -> the reduction on the root, anything elsewhere.
    gather: (x, group, root) -> [n, ...] on the root, anything elsewhere.
    scatter: (parts [n, ...], group, root) -> the root's parts[rank].
    """

    cost: Callable[[str, int, Group], Cost]
    all_reduce: Callable[[Array, Group, str], Array] | None = None
    reduce_scatter: Callable[[Array, Group, str, int], Array] | None = None
    all_gather: Callable[[Array, Group, int], Array] | None = None
    all_to_all: Callable[[Array, Group], Array] | None = None
    broadcast: Callable[[Array, Group, int], Array] | None = None
    reduce: Callable[[Array, Group, str, int], Array] | None = None
    gather: Callable[[Array, Group, int], Array] | None = None
    scatter: Callable[[Array, Group, int], Array] | None = None


def cut(x: Array, n: int, dim: int) -> Array:
    """[..., n * k, ...] -> [n, ..., k, ...]: n equal parts of `dim`."""
    parts = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    return jnp.moveaxis(parts, dim, 0)


def join(parts: Array, dim: int) -> Array:
    """The inverse of `cut`."""
    x = jnp.moveaxis(parts, 0, dim)
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])


def padded_parts(x: Array, n: int) -> Array:
    """x, flat, as n equal parts [n, ceil(size / n)] with zeros at the end."""
    return jnp.pad(x.ravel(), (0, -x.size % n)).reshape(n, -1)


def unpadded(parts: Array, like: Array) -> Array:
    """The inverse of `padded_parts`: in the shape of `like`."""
    return parts.ravel()[: like.size].reshape(like.shape)
