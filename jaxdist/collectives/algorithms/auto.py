"""Automatic choice: the algorithm with the lowest predicted time, chosen at trace time for each call."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxdist.collectives.algorithm import Algorithm, get_algorithm
from jaxdist.collectives.cost import Cost
from jaxdist.collectives.group import Array, Group

# The first wins where predictions are equal. Left out are master_worker, which never wins; double_tree and
# bidirectional_ring, whose gains the cost model does not describe; and ordered, which is for equal bits, not for speed.
CANDIDATES = ("ring", "halving_doubling", "tree", "two_level", "balanced_fusion")
# In a round of the tree most devices wait: over gloo it took 0.4 to 0.7 times as long as a round in which all send.
LATENCY = {"tree": 0.6}
# The ring copies least, which the cost model does not count: it wins if its predicted time is at most so much longer.
NEARLY = 1.05


def choose(operation: str, size: int, itemsize: int, group: Group) -> str:
    """The name of the fastest candidate for an input of `size` elements on each device."""
    link = group.network
    predicted = {}
    for name in CANDIDATES:
        algorithm = get_algorithm(name)
        if getattr(algorithm, operation) is not None:
            alpha = link.latency_s * LATENCY.get(name, 1.0)
            cost = algorithm.cost(operation, size, group).scaled(itemsize)
            predicted[name] = cost.seconds(link._replace(latency_s=alpha))
    best = min(predicted, key=lambda name: predicted[name])
    return "ring" if predicted.get("ring", math.inf) <= NEARLY * predicted[best] else best


def _by(operation: str) -> Callable[..., Array]:
    """A function for `operation` that runs the chosen algorithm's."""

    def run(x: Array, group: Group, *rest: Any) -> Array:
        name = choose(operation, x.size, jnp.dtype(group.wire or x.dtype).itemsize, group)
        return getattr(get_algorithm(name), operation)(x, group, *rest)

    return run


def _cost(operation: str, size: int, group: Group) -> Cost:
    """The cost of the algorithm that would be chosen for 4-byte elements."""
    return get_algorithm(choose(operation, size, 4, group)).cost(operation, size, group)


OPERATIONS = [field for field in Algorithm._fields if field not in ("cost", "int8")]
CHOSEN: dict[str, Any] = {operation: _by(operation) for operation in OPERATIONS}
auto = Algorithm(_cost, **CHOSEN)
