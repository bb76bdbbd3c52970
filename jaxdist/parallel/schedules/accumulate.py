"""Gradient accumulation: one stage, one microbatch after the other; gradients are those of the whole batch."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import zeros_varying_like
from jaxdist.config.entries import ScheduleFacts
from jaxdist.parallel.blocks.remat import after
from jaxdist.parallel.schedule import Program, Seed, run_microbatch
from jaxdist.specs import PyTree

FACTS = ScheduleFacts(one_stage=True, chunks=False)


def accumulate(
    program: Program, diff: PyTree, held: PyTree, microbatches: PyTree, *, seed: Seed, reduce_dtype: Any
) -> tuple[jax.Array, jax.Array, PyTree]:
    """A `Schedule`. Memory: one microbatch's activations and one copy of the gradients."""

    def run(microbatch: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        # Tied to the microbatch, or the compiler would gather embedding and head before the loop, and keep them.
        own_diff, own_held = after(jax.tree.leaves(microbatch)[0], (diff, held))
        return run_microbatch(program, own_diff, own_held, microbatch, seed=seed, reduce_dtype=reduce_dtype)

    if jax.tree.leaves(microbatches)[0].shape[0] == 1:  # a scan of one would cost a second copy of the gradients
        return run(jax.tree.map(lambda leaf: leaf[0], microbatches))

    def add(total: PyTree, microbatch: PyTree) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, run(microbatch)), None

    shapes = jax.eval_shape(run, jax.tree.map(lambda leaf: leaf[0], microbatches))
    return lax.scan(add, zeros_varying_like(shapes), microbatches)[0]
