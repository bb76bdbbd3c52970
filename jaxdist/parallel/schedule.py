"""The type of a schedule, which is the order of a step's microbatches, and of the program that it runs.

Not meant are the schedule of a learning rate (`optim`) and the order of instructions that XLA calls a schedule.

diff, captured: the two trees that `Strategy.begin` makes of the parameters. diff is differentiated: gradients are taken
with respect to it. captured is what the loss reads besides, without gradients.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
from jax import lax

from jaxdist.mesh import BATCH_AXES
from jaxdist.parallel.blocks.layers import BlockRunner
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import PyTree

EMBED = "embed"  # the unit of a model that its embedding reads
Seed = float | jax.Array
# (parameters, batch, keys) -> (loss sum, weight sum), or (loss sum, weight sum, {name: (sum, weight)}) with metrics: a
# loss of the user's own, in place of a model. With a model_state it is (parameters, batch, keys, model_state) -> (loss
# sum, weight sum, metrics, new model_state).
UserLoss = Callable[..., tuple[Any, ...]]


class Stages(NamedTuple):
    """A model cut into the stages of a pipeline.

    embed: (diff of the embedding, captured of the embedding, microbatch) -> h.
    head: (diff, captured, h, microbatch) -> (loss sum, weight sum). It is given whole trees.
    blocks: runs the blocks of a stage, or of one chunk of a stage, forward and backward.
    read_by_blocks: microbatch -> what every block is given beside h (`ModelDef.read_by_blocks`).
    head_units: the units of diff that the head reads.
    chunks: the number of chunks that the blocks of a stage are cut into.
    counts: blocks of each virtual stage, as `ModelDef.stages`.
    conditions: whether a stage skips the work of other stages; otherwise it computes that too, and discards it.
    """

    embed: Callable[..., jax.Array]
    head: Callable[..., tuple[jax.Array, jax.Array]]
    blocks: BlockRunner
    read_by_blocks: Callable[[PyTree], PyTree]
    head_units: tuple[str, ...]
    chunks: int
    counts: tuple[int, ...]
    conditions: bool


class Program(NamedTuple):
    """The functions that a schedule may call. They gather parameters, rematerialise, and loop over blocks themselves.

    loss: (diff, captured, microbatch) -> (loss sum, weight sum, extra), through all stages; zeros but on the first one.
    extra: arrays that are added up over microbatches, as loss and weight are; () for models.
    hidden: (diff, captured, microbatch) -> the input of the head, on the first stage. None for a user's own loss.
    stages: the parts of the loss, for pipelines. None where these cannot run it.
    weighs_rows: as `ModelDef.weighs_rows`.
    settle: (sums of extra, model_state) -> ({name of a metric: (sum, weight), of this device}, new model_state).

    The program of linear regression, where every parameter is in diff:

        def loss(diff, captured, batch):
            error = batch["x"] @ diff["w"] - batch["y"]
            return (error**2).sum(), jnp.float32(error.size), ()

        Program(loss)

    >>> jaxdist.Program(lambda diff, captured, batch: (diff["w"].sum(), jnp.float32(1), ())).stages is None
    True
    """

    loss: Callable[..., tuple[jax.Array, jax.Array, PyTree]]
    hidden: Callable[..., jax.Array] | None = None
    stages: Stages | None = None
    weighs_rows: bool = False
    settle: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] = lambda extra, model_state: ({}, model_state)


class Schedule(Protocol):
    """Run all microbatches, inside the manual region.

    microbatches: leaves [M, b, ...].
    seed: a factor of the loss before differentiation. It is a static power of two, or an array that contains the loss
        scale too. The caller multiplies gradients by 1 / (seed * global weight). That is exact for ragged batches,
        because until then only powers of two have multiplied them.
    reduce_dtype: the dtype of accumulated gradients, if it is at least fp32; otherwise they are fp32.

    Returns (loss sum, weight sum, gradients with respect to diff times seed, sums of extra), each of this device.

    A schedule for one microbatch:

        def single(program, diff, captured, microbatches, *, seed, reduce_dtype):
            microbatch = jax.tree.map(lambda leaf: leaf[0], microbatches)
            return run_microbatch(program, diff, captured, microbatch, seed=seed, reduce_dtype=reduce_dtype)
    """

    def __call__(
        self, program: Program, diff: PyTree, captured: PyTree, microbatches: PyTree, *, seed: Seed, reduce_dtype: Any
    ) -> tuple[jax.Array, jax.Array, PyTree, PyTree]: ...


def loss_seed(program: Program, diff: PyTree, captured: PyTree, microbatches: PyTree) -> float:
    """A factor of the loss near 1 / (weight of the global batch): sums of gradients are then near their mean in size.

    It is a power of two, so that multiplying by it rounds nothing. It must be known before the first backward pass.
    """
    from jaxdist.jaxpr.evaluate import size_of_count  # 300 lines, which an import of the step need not load

    first, parts = jax.tree.map(lambda leaf: leaf[0], microbatches), jax.tree.leaves(microbatches)[0].shape[0]
    parts *= math.prod(lax.axis_size(axis) for axis in BATCH_AXES)

    def weight_of(batch: PyTree) -> jax.Array:
        if program.stages is None:
            return program.loss(diff, captured, batch)[1]
        h = program.stages.embed(diff[EMBED], captured[EMBED], batch)  # blocks change no shape and no weight
        return program.stages.head(diff, captured, h, batch)[1]

    weight = size_of_count(weight_of, first)
    return 2.0 ** -math.ceil(math.log2(parts * weight))


def seeded_loss(loss: jax.Array, seed: Seed) -> jax.Array:
    """The scalar that a schedule differentiates: loss * seed, in at least fp32."""
    wide = loss.astype(accumulation_dtype(loss.dtype))
    return wide * (seed if isinstance(seed, float) else seed.astype(wide.dtype))
