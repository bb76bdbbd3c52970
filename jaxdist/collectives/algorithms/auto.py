"""The algorithm that the cost model says is fastest, chosen while tracing: by operation, size, group and link."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxdist.collectives.algorithm import Algorithm, get_algorithm
from jaxdist.collectives.cost import Cost
from jaxdist.collectives.group import Array, Group

# In this order where predictions are equal. Not among them: master_worker, which never wins; double_tree and
# bidirectional_ring, whose gains the model does not describe; ordered, which is chosen for its bits, not for its time.
CANDIDATES = ("ring", "halving_doubling", "tree", "two_level", "balanced_fusion")
# What the model does not count: in a round of the tree most devices wait, and over gloo such a round took 0.4 to 0.7
# times as long as one in which all send; and the ring copies least, so it is taken where it is nearly as fast.
LATENCY = {"tree": 0.6}
NEARLY = 1.05


def choose(operation: str, size: int, itemsize: int, group: Group) -> str:
    """Name of the fastest candidate for an input of `size` elements on each device."""
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
    """The chosen algorithm's function for one operation."""

    def run(x: Array, group: Group, *rest: Any) -> Array:
        name = choose(operation, x.size, jnp.dtype(group.wire or x.dtype).itemsize, group)
        return getattr(get_algorithm(name), operation)(x, group, *rest)

    return run


def _cost(operation: str, size: int, group: Group) -> Cost:
    """Of what would be chosen for 4-byte elements."""
    return get_algorithm(choose(operation, size, 4, group)).cost(operation, size, group)


OPERATIONS = [field for field in Algorithm._fields if field not in ("cost", "int8")]
CHOSEN: dict[str, Any] = {operation: _by(operation) for operation in OPERATIONS}
auto = Algorithm(_cost, **CHOSEN)
