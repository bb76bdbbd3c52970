"""Outer rules: how a server moves the parameters by what workers have pushed.

A rule works number by number, in NumPy: the parts of K servers have the same bits as the whole on one, and a server
needs no accelerator. `moved` is start - end of a worker's round, so that it stands where an optimizer has a gradient.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxdist.errors import UserError, nearest

OuterSlots = dict[str, np.ndarray]


class Outer(NamedTuple):
    """A rule by name, with its numbers."""

    name: str
    lr: float
    momentum: float

    def slots(self, flat: np.ndarray) -> OuterSlots:
        """What the rule remembers, at the start."""
        return {name: np.zeros_like(flat) for name in RULES[self.name][1]}

    def apply(self, flat: np.ndarray, slots: OuterSlots, moved: np.ndarray) -> tuple[np.ndarray, OuterSlots]:
        """The parameters and the memory after a version. The old ones, which others still read, stay as they are."""
        return RULES[self.name][0](flat, slots, moved, flat.dtype.type(self.lr), flat.dtype.type(self.momentum))


def _sgd(
    flat: np.ndarray, slots: OuterSlots, moved: np.ndarray, lr: np.floating, momentum: np.floating
) -> tuple[np.ndarray, OuterSlots]:
    return flat - lr * moved, slots


def _momentum(
    flat: np.ndarray, slots: OuterSlots, moved: np.ndarray, lr: np.floating, momentum: np.floating
) -> tuple[np.ndarray, OuterSlots]:
    trace = moved + momentum * slots["trace"]
    return flat - lr * trace, {"trace": trace}


def _nesterov(
    flat: np.ndarray, slots: OuterSlots, moved: np.ndarray, lr: np.floating, momentum: np.floating
) -> tuple[np.ndarray, OuterSlots]:
    trace = moved + momentum * slots["trace"]
    return flat - lr * (moved + momentum * trace), {"trace": trace}


_Apply = Callable[[np.ndarray, OuterSlots, np.ndarray, np.floating, np.floating], tuple[np.ndarray, OuterSlots]]
RULES: dict[str, tuple[_Apply, tuple[str, ...]]] = {
    "sgd": (_sgd, ()),
    "momentum": (_momentum, ("trace",)),
    "nesterov": (_nesterov, ("trace",)),
}


def make_outer(name: str, lr: float, momentum: float) -> Outer:
    """The rule of this name. Raises `UserError` for another name, and for numbers that cannot be meant."""
    if name not in RULES:
        near = nearest(name, RULES)
        hint = f"; did you mean {near}?" if near else ""
        raise UserError(f"--outer: {name!r}; allowed: {', '.join(RULES)}{hint}")
    if not 0 < lr <= 100:
        raise UserError(f"--outer-lr: {lr:g}; allowed: above 0, at most 100; 1 takes over what the workers have done")
    if not 0 <= momentum < 1:
        raise UserError(f"--outer-momentum: {momentum:g}; allowed: 0 or more, below 1")
    return Outer(name, lr, momentum)
