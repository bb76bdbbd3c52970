"""Gradient accumulation: one stage runs one microbatch after the other, and sums their gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import zeros_varying_like
from jaxdist.config.entries import ScheduleFacts
from jaxdist.config.rules.pipeline import check_one_stage
from jaxdist.parallel.blocks.remat import after
from jaxdist.parallel.schedule import Program, Seed, seeded_loss
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import PyTree

FACTS = ScheduleFacts(one_stage=True, chunks=False, deterministic=True, one_backward_pass=True)


def sends(microbatches: int) -> int:
    """How often a step runs the model, forward and backward."""
    return microbatches


def run_microbatch(
    program: Program,
    diff: PyTree,
    captured: PyTree,
    microbatch: PyTree,
    *,
    seed: Seed,
    reduce_dtype: Any,
    in_turn: bool = False,
) -> tuple[jax.Array, jax.Array, PyTree, PyTree]:
    """(loss sum, weight sum, gradients times seed, extra) of one microbatch, on a mesh with one stage.

    in_turn: whether parameters wait for the microbatch.
    """
    check_one_stage(lax.axis_size("pipe"))
    if in_turn:
        diff, captured = after(jax.tree.leaves(microbatch)[0], (diff, captured))

    def seeded(diff: PyTree) -> tuple[jax.Array, tuple[jax.Array, jax.Array, PyTree]]:
        loss, weight, extra = program.loss(diff, captured, microbatch)
        return seeded_loss(loss, seed), (loss, weight, extra)

    wide = accumulation_dtype(reduce_dtype)
    grads, (loss, weight, extra) = jax.grad(seeded, has_aux=True)(diff)
    return loss, weight, jax.tree.map(lambda grad: grad.astype(wide), grads), extra


def accumulate(
    program: Program, diff: PyTree, captured: PyTree, microbatches: PyTree, *, seed: Seed, reduce_dtype: Any
) -> tuple[jax.Array, jax.Array, PyTree, PyTree]:
    """A `Schedule`. Its memory: the activations of one microbatch, and one copy of the gradients."""
    # In turn: otherwise the compiler would gather embedding and head before the loop, and keep them.
    run = functools.partial(run_microbatch, program, diff, captured, seed=seed, reduce_dtype=reduce_dtype, in_turn=True)
    first = jax.tree.map(lambda leaf: leaf[0], microbatches)
    if jax.tree.leaves(microbatches)[0].shape[0] == 1:  # a scan of one would cost a second copy of the gradients
        return run(first)

    def add(total: PyTree, microbatch: PyTree) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, run(microbatch)), None

    return lax.scan(add, zeros_varying_like(jax.eval_shape(run, first)), microbatches)[0]
