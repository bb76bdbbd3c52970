"""The loss scale, and the guard of a training state: a step whose loss or gradients are not finite changes nothing.

Half precision loses small gradients. So the loss is multiplied by a scale before differentiation, and gradients are
divided by it afterwards. If the scale is too large, gradients overflow; the step is then skipped, and the scale
shrinks. The rule is that of `torch.amp.GradScaler` (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2). The test
for finite numbers reads sums over all devices, so that all devices decide alike.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config.sections.precision import LossScale
from jaxdist.mesh import fetched
from jaxdist.specs import PyTree


class Guard(NamedTuple):
    """Four numbers of a `TrainState`.

    scale: of the loss, fp32. It is 0 before the first step, and stays 0 in a run without a loss scale.
    good_steps: finite steps in a row since the scale last changed, int32.
    skipped: all steps that changed nothing, int32.
    in_a_row: the skipped steps since the last one that was not, int32.
    """

    scale: Any
    good_steps: Any
    skipped: Any
    in_a_row: Any


def fresh_guard() -> Guard:
    """The guard of a new state."""
    none = jnp.zeros((), jnp.int32)
    return Guard(jnp.zeros((), jnp.float32), none, none, none)


def scale_of(guard: Guard, rule: LossScale | None) -> jax.Array | float:
    """The factor of the next step's loss. Without a rule it is the float 1.0, not an array."""
    return 1.0 if rule is None else jnp.where(guard.scale > 0, guard.scale, jnp.float32(rule.init_scale))


def times(tree: PyTree, factor: jax.Array | float) -> PyTree:
    """The tree times a factor from `scale_of`."""
    if isinstance(factor, float):
        assert factor == 1, factor
        return tree
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), tree)


def is_finite(*values: jax.Array) -> jax.Array:
    """Whether all of these numbers are finite: bool []. They must be sums over all devices."""
    return functools.reduce(jnp.logical_and, map(jnp.isfinite, values))


def tree_is_finite(tree: PyTree) -> jax.Array:
    """Whether all numbers in a tree of arrays are finite. For use under `jit`; arrays may be in host memory."""
    leaves = map(jnp.atleast_1d, jax.tree.leaves(fetched(tree)))
    floats = (leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))
    # 0 times inf or NaN is NaN. XLA:CPU takes four times as long for `(leaf * 0).sum()`, eight for `isfinite(leaf)`.
    return is_finite(jnp.zeros(()), *((leaf @ jnp.zeros(leaf.shape[-1], leaf.dtype)).sum() for leaf in floats))


def is_halted(guard: Guard, max_skips: int) -> jax.Array:
    """Whether the state is halted: more than this many steps in a row were not finite, and nothing changes any more."""
    return guard.in_a_row > max_skips


def released(guard: Any) -> Any:
    """The guard of a state that goes on after a halt: without skipped steps in a row. (), no guard, stays ()."""
    row = guard and guard.in_a_row
    return guard and guard._replace(in_a_row=jax.device_put(np.zeros(row.shape, np.int32), row.sharding))


def next_guard(guard: Guard, finite: jax.Array, rule: LossScale | None) -> Guard:
    """The guard after a step."""
    skipped, in_a_row = guard.skipped + (~finite).astype(jnp.int32), jnp.where(finite, 0, guard.in_a_row + 1)
    if rule is None:
        return guard._replace(skipped=skipped, in_a_row=in_a_row)
    scale, good_steps = scale_of(guard, rule), jnp.where(finite, guard.good_steps + 1, 0)
    grows, (growth, backoff) = good_steps == rule.growth_interval, rule.factors
    grown = jnp.where(jnp.isfinite(scale * growth), scale * growth, scale)
    scale = jnp.where(finite, jnp.where(grows, grown, scale), scale * backoff)
    return Guard(scale, jnp.where(grows, 0, good_steps), skipped, in_a_row)


def guard_metrics(guard: Guard, rule: LossScale | None) -> dict[str, jax.Array]:
    """Metrics of the guard: "skipped", "skipped_in_a_row", and with a rule "loss_scale", that of the next step."""
    counts = {"skipped": guard.skipped, "skipped_in_a_row": guard.in_a_row}
    return counts if rule is None else counts | {"loss_scale": guard.scale}


def choose(yes: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` if `yes`, else `old`: trees of arrays. No bit of the other one, such as a nan, gets in."""
    return jax.tree.map(lambda a, b: jnp.where(yes, a, b), new, old)
