"""The type of a collective algorithm, and what algorithms share. Each file in `algorithms/` defines one `Algorithm`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxdist import registry
from jaxdist.collectives.cost import Cost
from jaxdist.collectives.group import Array, Group
from jaxdist.collectives.varying import zeros_varying_like

ALGORITHMS = "jaxdist.collectives.algorithms"
COMBINE = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}


class Int8Halves(NamedTuple):
    """The two halves of an all-reduce that sends int8 codes (`jaxdist.collectives.compression`).

    reduce_parts: (fp32 [n, m], group) -> (this device's part of the sum [m], what its encodings lost [n, m]).
    gather_parts: (a code, group) -> every device's code [n, ...].
    """

    reduce_parts: Callable[[Array, Group], tuple[Array, Array]]
    gather_parts: Callable[[Array, Group], Array]


class Algorithm(NamedTuple):
    """The collective operations over one `Group` of n > 1 devices. An operation that an algorithm lacks is None.

    x: an array, typed varying over the group's axes.
    op: a key of `COMBINE`.
    dim: where x is cut, `x.shape[dim]` is divisible by n.
    root: a rank.
    Results of hand-written algorithms are typed varying (see `claim_replicated`), those of `native` as JAX types them.

    For example, `ring.all_reduce(x, group, "sum")` is the sum of all devices' x, on every device.

    cost: (operation, elements of the input on one device, group) -> Cost in elements.
    all_reduce: (x, group, op) -> same shape.
    reduce_scatter: (x, group, op, dim) -> the rank-th of n equal parts of `dim`.
    all_gather: (x, group, dim) -> n times as long along `dim`, in rank order.
    all_to_all: (parts [n, ...], group) -> [n, ...]: part i goes to rank i; entry i of the result came from rank i.
    broadcast: (x, group, root) -> the root's x.
    reduce: (x, group, op, root) -> the reduction on the root, anything elsewhere.
    gather: (x, group, root) -> [n, ...] on the root, anything elsewhere.
    scatter: (parts [n, ...], group, root) -> the root's parts[rank].
    int8: the halves of an all-reduce with int8 on the wire.
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
    int8: Int8Halves | None = None


def get_algorithm(name: str) -> Algorithm:
    """The `Algorithm` in `collectives/algorithms/<name>.py`, or at a dotted path."""
    return registry.load(ALGORITHMS, name, key="algorithm")


def cut_parts(x: Array, n: int, dim: int) -> Array:
    """x as n equal parts of `dim`: [..., n * k, ...] -> [n, ..., k, ...]."""
    parts = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    return jnp.moveaxis(parts, dim, 0)


def join_parts(parts: Array, dim: int) -> Array:
    """The inverse of `cut_parts`."""
    x = jnp.moveaxis(parts, 0, dim)
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])


def padded_parts(x: Array, n: int) -> Array:
    """x, flattened, as n equal parts [n, ceil(size / n)], with zeros at the end."""
    return jnp.pad(x.ravel(), (0, -x.size % n)).reshape(n, -1)


def unpadded(parts: Array, like: Array) -> Array:
    """The inverse of `padded_parts`. The result has the shape of `like`."""
    return parts.ravel()[: like.size].reshape(like.shape)


def part(parts: Array, index: Array) -> Array:
    """parts[index mod n]."""
    return lax.dynamic_index_in_dim(parts, index % parts.shape[0], keepdims=False)


def put(parts: Array, value: Array, index: Array) -> Array:
    """parts with parts[index mod n] replaced."""
    return lax.dynamic_update_index_in_dim(parts, value, index % parts.shape[0], 0)


def alone(x: Array, group: Group) -> Array:
    """[n, ...] with x in this device's place and zeros elsewhere."""
    return put(zeros_varying_like(jnp.broadcast_to(x, (group.n, *x.shape))), x, group.rank)


def from_halves(
    cost: Callable[[str, int, Group], Cost],
    reduce_parts: Callable[[Array, Group, str], Array],
    gather_parts: Callable[[Array, Group], Array],
    **others: Any,
) -> Algorithm:
    """An algorithm whose all-reduce is a reduce-scatter and then an all-gather.

    reduce_parts: (parts [n, ...], group, op) -> this device's part of the reduction.
    gather_parts: (x, group) -> every device's x, [n, ...].
    others: more fields of `Algorithm`; an `all_reduce` here replaces the one made of the two halves.
    """

    def all_reduce(x: Array, group: Group, op: str) -> Array:
        mine = reduce_parts(padded_parts(x, group.n), group, op)
        return unpadded(gather_parts(group.rounded(mine), group), x)

    def reduce_scatter(x: Array, group: Group, op: str, dim: int) -> Array:
        return reduce_parts(cut_parts(x, group.n, dim), group, op)

    def all_gather(x: Array, group: Group, dim: int) -> Array:
        return join_parts(gather_parts(x, group), dim)

    functions = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather, **others}
    return Algorithm(cost, **functions)


def from_rooted(
    cost: Callable[[str, int, Group], Cost],
    broadcast: Callable[[Array, Group, int], Array],
    reduce: Callable[[Array, Group, str, int], Array],
    gather: Callable[[Array, Group, int], Array],
    scatter: Callable[[Array, Group, int], Array],
) -> Algorithm:
    """An algorithm made of its operations with a root: all other operations go to rank 0 and back."""

    def all_reduce(x: Array, group: Group, op: str) -> Array:
        return broadcast(reduce(x, group, op, 0), group, 0)

    def reduce_scatter(x: Array, group: Group, op: str, dim: int) -> Array:
        return scatter(reduce(cut_parts(x, group.n, dim), group, op, 0), group, 0)

    def all_gather(x: Array, group: Group, dim: int) -> Array:
        return join_parts(broadcast(gather(x, group, 0), group, 0), dim)

    return Algorithm(cost, all_reduce, reduce_scatter, all_gather, None, broadcast, reduce, gather, scatter)
