"""The types of a schedule and of what it runs."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from jaxdist.config.rules.pipeline import check_one_stage
from jaxdist.parallel.blocks.layers import Blocks
from jaxdist.parallel.blocks.sqrt_remat import Segments
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import PyTree

Seed = float | jax.Array


class Stages(NamedTuple):
    """The model cut into stages, for pipelines.

    embed: (diff, held, microbatch) -> h. head: (diff, held, h, microbatch) -> (sum, weight). Both are given whole
    trees, and take their units. blocks: runs the blocks of a stage, or of a chunk, forward and backward. head_units:
    what of diff the head reads. chunks: of the blocks of a stage. counts: as `ModelDef.stages`. conditions: whether a
    stage leaves out what is not its work, instead of computing and discarding it.
    """

    embed: Callable[..., jax.Array]
    head: Callable[..., tuple[jax.Array, jax.Array]]
    blocks: Blocks | Segments
    head_units: tuple[str, ...]
    chunks: int
    counts: tuple[int, ...]
    conditions: bool


class Program(NamedTuple):
    """What a schedule may call. Gathers, remat, the scan over blocks and dropout keys are already inside.

    loss: (diff, held, microbatch) -> (sum, weight), stage after stage; zeros but on the first. hidden: (diff, held,
    microbatch) -> what the head reads, on the first stage. stages: the parts. The last two are None for a foreign loss.
    """

    loss: Callable[..., tuple[jax.Array, jax.Array]]
    hidden: Callable[..., jax.Array] | None = None
    stages: Stages | None = None


class Schedule(Protocol):
    """Run all microbatches, inside the manual region.

    microbatches: leaves [M, b, ...]. seed: the power of two that the loss is multiplied by before differentiation,
    static; or an array, with the loss scale in it; the caller multiplies gradients by 1 / (seed * global weight)
    afterwards, which is exact for ragged batches because only a power of two has touched them. reduce_dtype: of the
    accumulated gradients, used at no less than fp32. Returns this device's (loss sum, weight sum, gradients with
    respect to diff times seed).
    """

    def __call__(
        self, program: Program, diff: PyTree, held: PyTree, microbatches: PyTree, *, seed: Seed, reduce_dtype: Any
    ) -> tuple[jax.Array, jax.Array, PyTree]: ...


def seeded_loss(loss: jax.Array, seed: Seed) -> jax.Array:
    """What is differentiated: loss * seed, in at least fp32."""
    wide = loss.astype(accumulation_dtype(loss.dtype))
    return wide * (seed if isinstance(seed, float) else seed.astype(wide.dtype))


def run_microbatch(
    program: Program, diff: PyTree, held: PyTree, microbatch: PyTree, *, seed: Seed, reduce_dtype: Any
) -> tuple[jax.Array, jax.Array, PyTree]:
    """(loss sum, weight sum, gradients times seed) of one microbatch, on a mesh with one stage."""
    check_one_stage(jax.lax.axis_size("pipe"))

    def seeded(diff: PyTree) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        loss, weight = program.loss(diff, held, microbatch)
        return seeded_loss(loss, seed), (loss, weight)

    wide = accumulation_dtype(reduce_dtype)
    grads, (loss, weight) = jax.grad(seeded, has_aux=True)(diff)
    return loss, weight, jax.tree.map(lambda grad: grad.astype(wide), grads)
