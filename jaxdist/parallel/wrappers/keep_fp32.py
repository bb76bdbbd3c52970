"""Parameters that layers receive in at least fp32, while the others are cast to a half type: those of norms, mostly.

They go through the same strategy, made for another compute dtype. Which they are is resolved once, where `begin` sees
the whole tree and with it their paths, and written into the held tree, which gathers get a unit of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.config.rules.precision import NORMS
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import PyTree, fitting, map_specs, only

if TYPE_CHECKING:
    from jaxdist.parallel.strategy import Strategy, StrategyOptions


class Wide(NamedTuple):
    """In place of a leaf of held: its parameter is kept in at least fp32."""

    held: Any


def widening(make: Callable[[StrategyOptions], Strategy], options: StrategyOptions) -> Strategy:
    """The strategy that `make` makes, but for parameters whose path fits a pattern of `Precision.keep_fp32`: layers
    receive those in at least fp32. Raises `UserError`, in `begin`, for a pattern that fits nothing."""
    narrow, precision = make(options), options.precision
    if not precision.keep_fp32 or jnp.dtype(precision.received).itemsize >= 4:
        return narrow
    wide = make(options._replace(precision=precision._replace(compute=accumulation_dtype(precision.compute))))

    def begin(params: PyTree, specs: PyTree, stacked: str | None) -> tuple[PyTree, PyTree]:
        kept = fitting(params, precision.keep_fp32, key="precision.keep_fp32", optional=NORMS)

        def run(strategy: Strategy, chosen: PyTree) -> tuple[PyTree, PyTree]:
            return strategy.begin(only(chosen, params), only(chosen, specs), stacked)

        diff, held = (_merged(kept, *pair) for pair in zip(run(wide, kept), run(narrow, _other(kept)), strict=True))
        return diff, jax.tree.map(lambda yes, part: Wide(part) if yes else part, kept, held)

    def gather(diff: PyTree, held: PyTree, specs: PyTree) -> PyTree:
        kept = map_specs(lambda _, part: isinstance(part, Wide), specs, held)
        parts = diff, map_specs(lambda _, part: part.held if isinstance(part, Wide) else part, specs, held), specs

        def run(strategy: Strategy, chosen: PyTree) -> PyTree:
            return strategy.gather(*(only(chosen, part) for part in parts))

        return _merged(kept, run(wide, kept), run(narrow, _other(kept)))

    return narrow._replace(begin=begin, gather=gather)


def _other(chosen: PyTree) -> PyTree:
    return jax.tree.map(lambda yes: not yes, chosen)


def _merged(kept: PyTree, wide: PyTree, narrow: PyTree) -> PyTree:
    return jax.tree.map(lambda yes, a, b: a if yes else b, kept, wide, narrow)
