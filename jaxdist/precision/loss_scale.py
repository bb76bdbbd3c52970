"""The guard of a training state: a step whose loss or gradients are not finite changes nothing; and the loss scale.

Half precision loses small gradients. The loss is multiplied by a scale before differentiation and gradients are divided
by it afterwards; a scale that is too large overflows, the step is skipped, and the scale shrinks. The rule is that of
`torch.amp.GradScaler` (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2). What is finite is judged on sums over
all devices, so that all of them do the same.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config.precision import LossScale
from jaxdist.specs import PyTree


class Guard(NamedTuple):
    """Four numbers of a `TrainState`. scale: fp32, of the loss; 0 before the first step of a run that scales it, and
    always in one that does not. good_steps: int32, in a row since the scale last moved. skipped: int32, steps that
    changed nothing. in_a_row: int32, how many of them the last steps were."""

    scale: Any
    good_steps: Any
    skipped: Any
    in_a_row: Any


def fresh_guard() -> Guard:
    """That of a new state."""
    none = jnp.zeros((), jnp.int32)
    return Guard(jnp.zeros((), jnp.float32), none, none, none)


def scale_of(guard: Guard, rule: LossScale | None) -> jax.Array | float:
    """What the loss of the next step is multiplied by; 1.0, not an array, without a rule."""
    return 1.0 if rule is None else jnp.where(guard.scale > 0, guard.scale, jnp.float32(rule.init_scale))


def times(tree: PyTree, factor: jax.Array | float) -> PyTree:
    """The tree, multiplied; as it is where `scale_of` gave no array."""
    if isinstance(factor, float):
        assert factor == 1, factor
        return tree
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), tree)


def is_finite(*values: jax.Array) -> jax.Array:
    """Whether all of these numbers are; of whole gradients or losses: bool []."""
    return functools.reduce(jnp.logical_and, map(jnp.isfinite, values))


def tree_is_finite(tree: PyTree) -> jax.Array:
    """Whether all numbers in a tree of arrays are. For use under `jit`."""
    device = jax.memory.Space.Device

    def one(leaf: jax.Array) -> jax.Array:
        near = leaf if jax.typeof(leaf).memory_space == device else jax.device_put(leaf, device)
        return jnp.isfinite(near).all()

    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return functools.reduce(jnp.logical_and, map(one, floats), jnp.ones((), bool))


def is_halted(guard: Guard, max_skips: int) -> jax.Array:
    """Whether the state is halted: more than this many steps in a row were not finite, and nothing changes any more."""
    return guard.in_a_row > max_skips


def released(guard: Any) -> Any:
    """The guard of a state that goes on, whatever stopped it: how many steps in a row failed is forgotten. (): none."""
    return guard and guard._replace(in_a_row=jax.device_put(np.int32(0), guard.in_a_row.sharding))


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
    """What a step says of it: "skipped" so far, "skipped_in_a_row", and "loss_scale" of the next step."""
    counts = {"skipped": guard.skipped, "skipped_in_a_row": guard.in_a_row}
    return counts if rule is None else counts | {"loss_scale": guard.scale}


def choose(yes: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """One of two trees of arrays, as if by copying it: not one bit of the other gets in."""
    return jax.tree.map(lambda a, b: jnp.where(yes, a, b), new, old)
