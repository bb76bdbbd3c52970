"""Parameters that layers receive in at least fp32, while the others are cast to a half type: mostly those of norms.

They go through the same strategy, made for another compute dtype. Patterns match whole paths, which only `begin` sees;
a gather gets one unit. So `begin` marks these parameters in the captured tree, and gathers read the marks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.config.rules.precision import NORMS, ROUTERS
from jaxdist.optim.patterns import fitting
from jaxdist.parallel.options import StrategyOptions
from jaxdist.parallel.strategy import Strategy
from jaxdist.precision.policy import Precision, accumulation_dtype
from jaxdist.specs import PyTree, map_specs, only


class Wide(NamedTuple):
    """The mark of a parameter that is kept in at least fp32, around its leaf of the captured tree."""

    captured: Any


def keeping_fp32(make: Callable[[StrategyOptions], Strategy], options: StrategyOptions) -> Strategy:
    """The strategy of `make`; layers receive parameters that fit a pattern of `Precision.keep_fp32` in at least fp32.

    Its `begin` raises `UserError` for a pattern that fits nothing.
    """
    narrow, precision = make(options), options.precision
    if not precision.keep_fp32 or jnp.dtype(precision.received).itemsize >= 4:
        return narrow
    wide = make(replace(options, precision=precision._replace(compute=accumulation_dtype(precision.compute))))

    def begin(params: PyTree, specs: PyTree, stacked: str | None) -> tuple[PyTree, PyTree]:
        kept = _kept(params, precision)
        if not any(jax.tree.leaves(kept)):
            return narrow.begin(params, specs, stacked)

        def run(strategy: Strategy, chosen: PyTree) -> tuple[PyTree, PyTree]:
            return strategy.begin(only(chosen, params), only(chosen, specs), stacked)

        diff, captured = _merged((kept, kept), run(wide, kept), run(narrow, _other(kept)))
        return diff, jax.tree.map(lambda yes, part: Wide(part) if yes else part, kept, captured)

    def gather(diff: PyTree, captured: PyTree, specs: PyTree) -> PyTree:
        kept = map_specs(lambda _, part: isinstance(part, Wide), specs, captured)
        if not any(jax.tree.leaves(kept)):
            return narrow.gather(diff, captured, specs)
        own = map_specs(lambda _, part: part.captured if isinstance(part, Wide) else part, specs, captured)

        def run(strategy: Strategy, chosen: PyTree) -> PyTree:
            return strategy.gather(only(chosen, diff), only(chosen, own), only(chosen, specs))

        return _merged(kept, run(wide, kept), run(narrow, _other(kept)))

    return narrow._replace(begin=begin, gather=gather)


def as_received(params: PyTree, precision: Precision) -> PyTree:
    """Whole parameters in the dtypes that strategies give layers."""

    def cast(wide: bool, leaf: jax.Array) -> jax.Array:
        return leaf.astype(accumulation_dtype(precision.received) if wide else precision.received)

    return jax.tree.map(cast, _kept(params, precision), params)


def _kept(params: PyTree, precision: Precision) -> PyTree:
    """Whether each parameter fits a pattern of `Precision.keep_fp32`. Raises `UserError` for one that fits nothing."""
    return fitting(params, precision.keep_fp32, key="precision.keep_fp32", optional=NORMS + ROUTERS)


def _other(chosen: PyTree) -> PyTree:
    return jax.tree.map(lambda yes: not yes, chosen)


def _merged(kept: PyTree, wide: PyTree, narrow: PyTree) -> Any:
    return jax.tree.map(lambda yes, a, b: a if yes else b, kept, wide, narrow)
