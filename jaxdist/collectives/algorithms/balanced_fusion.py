"""Every device is the server of exactly 1/n of the fused buffer: it gets that part from all workers, sums it, and sends
the result back to all (SageMaker data parallel's balanced fusion buffers, with servers : workers = 1 : 1).

In round k everybody sends to the k-th rank further on, so that all links are busy and every device sends exactly
(n-1)/n N in each direction. The server sums in rank order after its own.
"""

from jaxdist.collectives.algorithm import COMBINE, Algorithm, Array, cut, join, padded_parts, unpadded
from jaxdist.collectives.algorithms.ring import alone, part, put
from jaxdist.collectives.cost import Cost, even
from jaxdist.collectives.group import Group, shift


def exchange(parts: Array, group: Group) -> Array:
    """parts[i] goes to rank i; returns what came, by sender: [n, ...]."""
    came = alone(part(parts, group.rank), group)
    for k in range(1, group.n):
        arrived = group.permute(part(parts, group.rank + k), shift(group.n, k))
        came = put(came, arrived, group.rank - k)
    return came


def _serve(parts: Array, group: Group, op: str) -> Array:
    """[n, ...] of the buffer -> the part that this device serves, reduced."""
    mine = part(parts, group.rank)
    for k in range(1, group.n):
        mine = COMBINE[op](mine, group.permute(part(parts, group.rank + k), shift(group.n, k)))
    return mine


def send_back(mine: Array, group: Group) -> Array:
    """The served part to everybody: [n, ...]."""
    parts = alone(mine, group)
    for k in range(1, group.n):
        arrived = group.permute(mine, shift(group.n, k))
        parts = put(parts, arrived, group.rank - k)
    return parts


def _all_reduce(x: Array, group: Group, op: str) -> Array:
    mine = _serve(padded_parts(x, group.n), group, op)
    return unpadded(send_back(group.rounded(mine), group), x)


def _reduce_scatter(x: Array, group: Group, op: str, dim: int) -> Array:
    return _serve(cut(x, group.n, dim), group, op)


def _all_gather(x: Array, group: Group, dim: int) -> Array:
    return join(send_back(x, group), dim)


def _cost(operation: str, size: int, group: Group) -> Cost:
    """The ring's rounds and bytes. For an even n, one of n-1 rounds each way exchanges between pairs n/2 apart."""
    chunk, n = size if operation == "all_gather" else -(-size // group.n), group.n
    rounds = (2 if operation == "all_reduce" else 1) * (n - 1)
    return even(rounds, rounds * chunk, n, swap=n in (2, 4))


balanced_fusion = Algorithm(_cost, _all_reduce, _reduce_scatter, _all_gather, exchange)
