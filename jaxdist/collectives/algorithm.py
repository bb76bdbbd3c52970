"""The type of a collective algorithm, and what algorithms share. Each file in `algorithms/` defines one `Algorithm`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxdist import registry
from jaxdist.collectives.cost import Cost
from jaxdist.collectives.group import Array, Group, Pairs
from jaxdist.collectives.parts import cut_parts, join_parts, padded_parts, unpadded
from jaxdist.errors import UserError

ALGORITHMS = "jaxdist.collectives.algorithms"
CostOf = Callable[[str, int, Group], Cost]
ReduceParts = Callable[[Array, Group, str], Array]
GatherParts = Callable[[Array, Group], Array]
ToRoot = Callable[[Array, Group, str, int], Array]
FromRoot = Callable[[Array, Group, int], Array]
GatherRounds = Callable[[int], list[tuple[Pairs, int]]]
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
    found = registry.load(ALGORITHMS, name, key="algorithm")
    if not isinstance(found, Algorithm):
        raise UserError(
            f"algorithm: {name!r} is a {type(found).__name__}, not an Algorithm; allowed:"
            f" {', '.join(registry.names(ALGORITHMS))}, or a dotted path to an Algorithm of your own"
        )
    return found


def from_halves(cost: CostOf, reduce_parts: ReduceParts, gather_parts: GatherParts, **others: Any) -> Algorithm:
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
    rounds: GatherRounds, broadcast: FromRoot, reduce: ToRoot, gather: FromRoot, scatter: FromRoot
) -> Algorithm:
    """An algorithm made of its operations with a root: all other operations go to rank 0 and back.

    rounds: n -> the rounds of a gather to rank 0, each with its (child, parent) pairs and the number of ranks whose
        values are in one message. A reduction has the same pairs; the ways back are the same backwards.
    """

    def all_reduce(x: Array, group: Group, op: str) -> Array:
        return broadcast(reduce(x, group, op, 0), group, 0)

    def reduce_scatter(x: Array, group: Group, op: str, dim: int) -> Array:
        return scatter(reduce(cut_parts(x, group.n, dim), group, op, 0), group, 0)

    def all_gather(x: Array, group: Group, dim: int) -> Array:
        return join_parts(broadcast(gather(x, group, 0), group, 0), dim)

    cost = functools.partial(_rooted_cost, rounds)
    return Algorithm(cost, all_reduce, reduce_scatter, all_gather, None, broadcast, reduce, gather, scatter)


def _rooted_cost(rounds: GatherRounds, operation: str, size: int, group: Group) -> Cost:
    """The cost of an operation of `from_rooted`, counted message by message."""
    n, way_back = group.n, {"all_reduce": "broadcast", "reduce_scatter": "scatter", "all_gather": "broadcast"}
    if operation in way_back:
        ways = [("gather" if operation == "all_gather" else "reduce", size)]
        ways += [(way_back[operation], n * size if operation == "all_gather" else size)]
    else:
        ways = [(operation, size)]
    sent, lengths = [0] * n, []  # elements that each rank sends; of the largest message of each round
    for way, whole in ways:
        for pairs, ranks in rounds(n):
            length = {"gather": ranks * whole, "scatter": ranks * (whole // n)}.get(way, whole)
            lengths.append(length)
            for child, parent in pairs:
                sent[child if way in ("reduce", "gather") else parent] += length
    return Cost(len(lengths), max(sent), sum(sent), sum(lengths))
