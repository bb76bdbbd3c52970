"""What an algorithm for collectives is: four functions. Each file in `algorithms/` defines one value of this type."""

from collections.abc import Callable
from typing import NamedTuple

import jax

Array = jax.Array


class Cost(NamedTuple):
    """What one device does in one collective: `rounds` of communication one after another, `wire_bytes` sent in all."""

    rounds: int
    wire_bytes: float


class Algorithm(NamedTuple):
    """Collectives over one group of n devices: the axes, as one ring in mesh order, with n > 1.

    all_reduce: (x, axes) -> x summed, same shape.
    reduce_scatter: (x, axes, dim) -> this device's 1/n of `dim` of the sum; `dim` must be divisible by n.
    all_gather: (x, axes, dim) -> the devices' x concatenated along `dim`.
    cost: (op, input bytes on one device, n) -> Cost, op one of the three names above.
    """

    all_reduce: Callable[[Array, tuple[str, ...]], Array]
    reduce_scatter: Callable[[Array, tuple[str, ...], int], Array]
    all_gather: Callable[[Array, tuple[str, ...], int], Array]
    cost: Callable[[str, float, int], Cost]


def ring_cost(op: str, nbytes: float, n: int) -> Cost:
    """Cost of the bandwidth-optimal ring (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms")."""
    per_round = {"all_reduce": nbytes / n, "reduce_scatter": nbytes / n, "all_gather": nbytes}[op]
    rounds = (2 if op == "all_reduce" else 1) * (n - 1)
    return Cost(rounds, rounds * per_round)
