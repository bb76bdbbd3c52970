"""Gradient accumulation in a fixed order: microbatches 0 and 1, 2 and 3, ...; then pairs of pairs.

The devices' gradients can be summed in the same order, by the collective algorithm `ordered`. The result then does not
depend on how many devices the microbatches are spread over: `parallel.grad_sync.deterministic`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import zeros_varying_like
from jaxdist.config.entries import ScheduleFacts
from jaxdist.config.rules.grad_sync import check_pairs
from jaxdist.parallel.schedule import Program, Seed
from jaxdist.parallel.schedules.accumulate import run_microbatch
from jaxdist.specs import PyTree

FACTS = ScheduleFacts(one_stage=True, chunks=False, power_of_two=True, deterministic=True)


def sends(microbatches: int) -> int:
    """How often a step runs the model, forward and backward."""
    return microbatches


def pairwise(
    program: Program, diff: PyTree, captured: PyTree, microbatches: PyTree, *, seed: Seed, reduce_dtype: Any
) -> tuple[jax.Array, jax.Array, PyTree, PyTree]:
    """A `Schedule` for M microbatches, where M is a power of two.

    Its memory: the activations of one microbatch, and log2(M) + 1 copies of the gradients.
    """
    count = jax.tree.leaves(microbatches)[0].shape[0]
    check_pairs(count, "pairwise")

    def run(microbatch: PyTree) -> tuple[jax.Array, jax.Array, PyTree, PyTree]:
        result = run_microbatch(program, diff, captured, microbatch, seed=seed, reduce_dtype=reduce_dtype)
        # Fused with the sum, it could be rounded differently. Leaf by leaf: on jax 0.10 what shares a barrier comes out
        # varying over the axes of all.
        return jax.tree.map(lax.optimization_barrier, result)

    def total(parts: PyTree) -> tuple[jax.Array, jax.Array, PyTree, PyTree]:
        length = jax.tree.leaves(parts)[0].shape[0]
        if length == 1:
            return run(jax.tree.map(lambda leaf: leaf[0], parts))
        halves = jax.tree.map(lambda leaf: leaf.reshape(2, length // 2, *leaf.shape[1:]), parts)

        def add(carry: tuple[jax.Array, PyTree], half: PyTree) -> tuple[tuple[jax.Array, PyTree], None]:
            first, before = carry
            now = total(half)
            after = jax.tree.map(lambda a, b: jnp.where(first, b, a + b), before, now)  # 0 + -0 is not -0
            return (jnp.zeros_like(first), after), None

        shapes = jax.eval_shape(total, jax.tree.map(lambda leaf: leaf[0], halves))
        return lax.scan(add, (jnp.ones((), bool), zeros_varying_like(shapes)), halves)[0][1]

    return total(microbatches)
