"""The stages of a pipeline, as the program of a model sees them: the blocks of a stage, and sends between stages.

With one stage nothing is sent. The loop of a training step is in `pipeline.run`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.collectives import active_axes, rank, to_varying, zeros_varying_like
from jaxdist.parallel.blocks.branch import by_condition, typed_like
from jaxdist.parallel.blocks.layers import BlockRows, at
from jaxdist.specs import PyTree

# Scopes by which the ledger recognises the work of a tick, and its sends.
FORWARD, BACKWARD, TO_NEXT, TO_BEFORE = "pipeline_forward", "pipeline_backward", "pipeline.next", "pipeline.before"
# Scopes by which the table of memory recognises what a stage hands from tick to tick.
KEPT, CROSSING, LATE, RECEIVED = "pipeline.kept", "pipeline.crossing", "pipeline.late", "pipeline.received"


def blocks_of_chunk(
    diff: PyTree, captured: PyTree, chunk: jax.Array | int, *, chunks: int, counts: tuple[int, ...]
) -> BlockRows:
    """One chunk of this stage's stacked blocks. counts: as `ModelDef.stages`."""
    if chunks > 1:
        diff, captured = at(cut_into_chunks((diff, captured), chunks), chunk)
    length = jax.tree.leaves((diff, captured))[0].shape[0]
    row = jnp.arange(length, dtype=jnp.int32)
    number = chunk * lax.axis_size("pipe") + rank("pipe")  # of the virtual stage
    if not counts:
        return BlockRows(diff, captured, 1 + number * len(row) + row)
    before, count = jnp.asarray([np.cumsum(counts) - counts, counts], jnp.int32)[:, number]
    return BlockRows(diff, captured, jnp.where(row < count, 1 + before + row, 0))


def cut_into_chunks(blocks: PyTree, chunks: int) -> PyTree:
    """Stacked blocks [K, ...] as [chunks, K / chunks, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(chunks, -1, *leaf.shape[1:]), blocks)


def relay(run: Callable[[jax.Array, jax.Array | int], jax.Array], h: jax.Array, chunks: int) -> jax.Array:
    """h after the blocks of all stages, on the first stage: for evaluation. run: (h, chunk) -> h."""
    if not active_axes("pipe") and chunks == 1:
        return run(h, 0)
    stage, count, h = rank("pipe"), lax.axis_size("pipe"), to_varying(h, ("pipe",))

    def turn(h: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        own = lambda: typed_like(run(h, number // count), h)  # noqa: E731
        return send(by_condition(stage == number % count, own, lambda: h), 1, ring=True), None

    return lax.scan(turn, h, jnp.arange(count * chunks, dtype=jnp.int32))[0]


def on_first_stage(function: Callable[[jax.Array], PyTree], h: jax.Array) -> PyTree:
    """function(h) on the first stage, zeros on the others."""
    if not active_axes("pipe"):
        return function(h)
    shapes = jax.eval_shape(function, h)
    nothing = to_varying(zeros_varying_like(shapes), ("pipe",))
    return by_condition(rank("pipe") == 0, lambda: typed_like(function(h), nothing), lambda: nothing)


def send(x: jax.Array, places: int, *, ring: bool, used: int | None = None) -> jax.Array:
    """x of the stage before (places=1) or after (-1).

    ring: whether the first and the last stage are neighbours. Otherwise one of them receives zeros.
    used: how many of a loop's sends across a boundary the receiver uses, for the ledger; None for all.
    """
    count = lax.axis_size("pipe")
    if count == 1:
        return x
    with jax.named_scope((TO_NEXT if places > 0 else TO_BEFORE) + ("" if used is None else f".{used}")):
        pairs = [(stage, (stage + places) % count) for stage in range(count)]
        return lax.ppermute(x, "pipe", [pair for pair in pairs if ring or pair[1] - pair[0] == places])
