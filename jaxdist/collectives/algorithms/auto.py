"""The algorithm that the cost model says is fastest, chosen while tracing: by operation, size, group and link."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import registry
from jaxdist.collectives.algorithm import Algorithm, Array
from jaxdist.collectives.cost import LINKS, Cost, Link
from jaxdist.collectives.group import Group

# In this order where predictions are equal. Not among them: master_worker, which never wins; double_tree and
# bidirectional_ring, whose gains the model does not describe; ordered, which is chosen for its bits, not for its time.
CANDIDATES = ("ring", "halving_doubling", "tree", "two_level", "balanced_fusion")


def default_link() -> Link:
    """What the platform and the number of processes suggest; `make_link` gives others."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    on_gpu = device is not None and device.platform != "cpu"
    if jax.process_count() > 1:
        return LINKS["infiniband" if on_gpu else "tcp"]
    return LINKS["nvlink" if on_gpu else "local"]


def choose(operation: str, size: int, itemsize: int, group: Group) -> str:
    """Name of the fastest candidate for an input of `size` elements on each device."""
    link = group.link or default_link()
    predicted = {}
    for name in CANDIDATES:
        algorithm = registry.load("jaxdist.collectives.algorithms", name, key="algorithm")
        if getattr(algorithm, operation) is not None:
            predicted[name] = algorithm.cost(operation, size, group).scaled(itemsize).seconds(link)
    return min(predicted, key=lambda name: predicted[name])


def _by(operation: str) -> Callable[..., Array]:
    """The chosen algorithm's function for one operation."""

    def run(x: Array, group: Group, *rest: Any) -> Array:
        itemsize = jnp.dtype(group.wire or x.dtype).itemsize
        name = choose(operation, x.size, itemsize, group)
        return getattr(registry.load("jaxdist.collectives.algorithms", name, key="algorithm"), operation)(
            x, group, *rest
        )

    return run


def _cost(operation: str, size: int, group: Group) -> Cost:
    """Of what would be chosen for 4-byte elements."""
    name = choose(operation, size, 4, group)
    return registry.load("jaxdist.collectives.algorithms", name, key="algorithm").cost(operation, size, group)


auto = Algorithm(_cost, **{operation: _by(operation) for operation in Algorithm._fields if operation != "cost"})
