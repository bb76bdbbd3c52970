"""The loop that runs a schedule table of a pipeline: one scan over ticks.

In a tick each stage computes what its row of the table says, or nothing; then all stages send to their neighbours. Work
is inside `lax.cond`, so that a stage without work does none. Sends are outside, because all stages take part in them.
A block's collectives over `fsdp` and `tensor` may be inside: they connect devices of one stage, which take the same
branch.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.collectives import rank, to_varying, varying_axes, zeros_varying_like
from jaxdist.config.rules.pipeline import refuse_stages
from jaxdist.config.rules.remat import refuse_split_backward
from jaxdist.jaxpr.evaluate import trimmed
from jaxdist.parallel.blocks.branch import Choose, by_condition, by_mask, pack, typed_like, unpack
from jaxdist.parallel.blocks.layers import BlockRows, ScannedBlocks, at, put
from jaxdist.parallel.pipeline.relay import (
    BACKWARD,
    CROSSING,
    FORWARD,
    KEPT,
    LATE,
    RECEIVED,
    blocks_of_chunk,
    cut_into_chunks,
    send,
)
from jaxdist.parallel.pipeline.table import Slots, Ticks, allocate_slots
from jaxdist.parallel.schedule import EMBED, Program, Schedule, Seed, Stages, seeded_loss
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import STACKED, PyTree


class _Work(NamedTuple):
    """One F, B or W of this stage in a tick: numbers, -1 for none. slot: of the residuals."""

    microbatch: jax.Array
    chunk: jax.Array
    slot: jax.Array
    cotangent_slot: Any  # written by B, read by W; None for F


class _Row(NamedTuple):
    """The work of this stage in a tick. With a leading dim [T] in all arrays, the work in all ticks."""

    forward: _Work
    backward: _Work
    weights: tuple[_Work, ...]


class _State(NamedTuple):
    """The state that a stage hands from tick to tick.

    h, dh: received from the stages before and after.
    kept: residuals of F, with a leading dim of slots.
    crossing: the values that B hands to W, with a leading dim of slots.
    late: the gradient of the head's input: one slot, or as many as for residuals.
    grads: gradients with respect to diff, in the accumulation dtype.
    totals: (loss sum, weight sum).
    """

    h: jax.Array
    dh: jax.Array
    kept: list[jax.Array]
    crossing: PyTree
    late: jax.Array
    grads: PyTree
    totals: tuple[jax.Array, jax.Array]


def pipeline_schedule(table: Callable[[int, int, int], Ticks]) -> Schedule:
    """The schedule that runs a table over the mesh axis `pipe`.

    table: (stages, microbatches, chunks) -> table. For example, in `schedules/gpipe.py`:

        gpipe = pipeline_schedule(table)
    """
    return functools.partial(run_ticks, table)


def run_ticks(
    table: Callable[[int, int, int], Ticks],
    program: Program,
    diff: PyTree,
    captured: PyTree,
    microbatches: PyTree,
    *,
    seed: Seed,
    reduce_dtype: Any,
) -> tuple[jax.Array, jax.Array, PyTree, PyTree]:
    """Run the table for this mesh and these microbatches, as a `Schedule` does.

    Loss and weight are returned on the last stage. Gradients are those of a stage's own blocks, and of embedding and
    head as far as the stage used them.
    """
    if program.stages is None:
        refuse_stages(
            "parallel.prefetch: 1, memory.remat: 'offload', or a loss_fn of your own",
            allowed="parallel.schedule=accumulate; or a model of jaxdist.nn layers without these two",
        )
    stages = program.stages
    ticks = table(lax.axis_size("pipe"), jax.tree.leaves(microbatches)[0].shape[0], stages.chunks)
    choose = by_condition if stages.conditions else by_mask
    machine = _Machine(
        ticks, allocate_slots(ticks), stages, diff, captured, microbatches, seed, reduce_dtype, choose, None
    )
    start, residuals = machine.start()
    machine = machine._replace(residuals=residuals)

    def tick(state: _State, row: _Row) -> tuple[_State, None]:
        with jax.named_scope(FORWARD):
            state = machine.forward(state, row.forward)
        with jax.named_scope(BACKWARD):
            state = machine.backward(state, row.backward)
            for work in row.weights:
                state = machine.weights(state, work)
        # With chunks, what the last stage sends goes on to the next chunk of the first one.
        ring, used = ticks.chunks > 1, ticks.microbatches * ticks.chunks
        h, dh = (send(x, places, ring=ring, used=used) for x, places in ((state.h, 1), (state.dh, -1)))
        return state._replace(h=h, dh=dh), None

    state, _ = lax.scan(tick, start, machine.rows())
    return *state.totals, state.grads, ()


def head_gradients(
    stages: Stages, diff: PyTree, captured: PyTree, h: jax.Array, batch: PyTree, seed: Seed
) -> tuple[tuple[PyTree, jax.Array], tuple[jax.Array, jax.Array]]:
    """((gradients of the units that the head reads, of `h`), (loss, weight)) of a microbatch."""

    def seeded(units: PyTree, h: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        loss, weight = stages.head(diff | units, captured, h, batch)
        return seeded_loss(loss, seed), (loss, weight)

    units = {name: diff[name] for name in stages.head_units}
    found: Any = jax.grad(seeded, argnums=(0, 1), has_aux=True)(units, h)
    return found


def embed_gradients(embed: Callable[[PyTree], jax.Array], diff: PyTree, dh: jax.Array) -> PyTree:
    """Gradients of the embedding. That of a lookup does not need the looked up rows, nor the table."""
    (grads,) = trimmed(lambda dh: jax.vjp(embed, diff)[1](dh), dh)
    return grads


class _Machine(NamedTuple):
    """The constants of the loop, and the work of a tick as functions state -> state."""

    ticks: Ticks
    slots: Slots
    stages: Stages
    diff: PyTree
    captured: PyTree
    microbatches: PyTree
    seed: Seed
    reduce_dtype: Any
    choose: Choose
    residuals: PyTree  # of one microbatch, as ShapeDtypeStructs

    def rows(self) -> _Row:
        """The work of this stage in all ticks."""
        ticks, residuals, cotangents = self.ticks, self.slots.residuals, self.slots.cotangents
        stage = rank("pipe")

        def own(pair_TS2: np.ndarray, slot_TS: np.ndarray, cotangent_TS: np.ndarray | None = None) -> _Work:
            tables = _Work(pair_TS2[..., 0], pair_TS2[..., 1], slot_TS, cotangent_TS)  # type: ignore[arg-type]
            index = lambda table: lax.dynamic_index_in_dim(jnp.asarray(table), stage, 1, keepdims=False)  # noqa: E731
            return jax.tree.map(index, tables)

        weights = tuple(
            own(ticks.weights[:, :, i], residuals.weights[..., i], cotangents.weights[..., i])
            for i in range(ticks.weights.shape[2])
        )
        forward = own(ticks.forward, residuals.forward)
        return _Row(forward, own(ticks.backward, residuals.backward, cotangents.backward), weights)

    def start(self) -> tuple[_State, PyTree]:
        """(state of zeros, residuals of one microbatch as ShapeDtypeStructs)."""

        def zeros(leaf: Any, *places: int, scope: str = "pipeline") -> jax.Array:
            with jax.named_scope(scope):
                return to_varying(jnp.zeros((*places, *leaf.shape), leaf.dtype), {*varying_axes(leaf), "pipe"})

        batch = at(self.microbatches, 0)
        h = zeros(jax.eval_shape(self._embed, self.diff[EMBED], batch), scope=RECEIVED)
        _, saved = jax.eval_shape(self._run_blocks, h, batch, jnp.zeros((), jnp.int32))
        kept = [zeros(leaf, self.slots.residuals.size, scope=KEPT) for leaf in jax.eval_shape(pack, saved)]
        crossing: PyTree = ()
        if self.ticks.weights.shape[2]:
            blocks = self._rows(jnp.zeros((), jnp.int32))
            shapes, _ = jax.eval_shape(self._scanned.backward_input, blocks, saved, h)
            crossing = jax.tree.map(lambda leaf: zeros(leaf, self.slots.cotangents.size, scope=CROSSING), shapes)
        late = zeros(h, self.slots.residuals.size if self.slots.late_loss else 1, scope=LATE)
        grads = zeros_varying_like(self.diff, accumulation_dtype(self.reduce_dtype))
        totals = jax.tree.map(zeros, jax.eval_shape(self.stages.head, self.diff, self.captured, h, batch))
        return _State(h, h, kept, crossing, late, grads, totals), saved

    def forward(self, state: _State, work: _Work) -> _State:
        """The state after F: `h` is sent to the next stage."""
        first, last = self._ends(work)

        def run() -> _State:
            batch = at(self.microbatches, work.microbatch)
            embedded = lambda: typed_like(self._embed(self.diff[EMBED], batch), state.h)  # noqa: E731
            h, saved = self._run_blocks(self.choose(first, embedded, lambda: state.h), batch, work.chunk)
            after = state._replace(h=h, kept=put(state.kept, work.slot, pack(saved)))
            return self.choose(last, lambda: typed_like(self._run_head(after, batch, work.slot), state), lambda: after)

        return self.choose(work.microbatch >= 0, lambda: typed_like(run(), state), lambda: state)

    def backward(self, state: _State, work: _Work) -> _State:
        """The state after B: `dh` is sent to the stage before."""
        first, last = self._ends(work)

        def run() -> _State:
            loss = at(state.late, work.slot if self.slots.late_loss else 0)
            saved = unpack(at(state.kept, work.slot), self.residuals)
            parts = self._rows(work.chunk), saved, jnp.where(last, loss, state.dh)
            if self.ticks.weights.shape[2]:
                crossing, dh = self._scanned.backward_input(*parts)
                after = state._replace(dh=dh, crossing=put(state.crossing, work.cotangent_slot, crossing))
            else:
                grads, dh = self.stages.blocks.backward(*parts)
                after = state._replace(dh=dh, grads=self._add_blocks(state.grads, grads, work.chunk))
            pull = lambda: typed_like(self._pull_embed(after, work.microbatch), state)  # noqa: E731
            return self.choose(first, pull, lambda: after)

        return self.choose(work.microbatch >= 0, lambda: typed_like(run(), state), lambda: state)

    def weights(self, state: _State, work: _Work) -> _State:
        """The state after W: the gradients of the blocks' parameters of one microbatch are added."""

        def add() -> _State:
            saved = unpack(at(state.kept, work.slot), self.residuals)
            crossing = at(state.crossing, work.cotangent_slot)
            grads = self._scanned.backward_weights(self._rows(work.chunk), saved, crossing, state.dh)
            return state._replace(grads=self._add_blocks(state.grads, grads, work.chunk))

        return self.choose(work.microbatch >= 0, lambda: typed_like(add(), state), lambda: state)

    def _ends(self, work: _Work) -> tuple[jax.Array, jax.Array]:
        """Whether the work is that of the first, and of the last, virtual stage."""
        first = (rank("pipe") == 0) & (work.chunk == 0)
        return first, (rank("pipe") == self.ticks.stages - 1) & (work.chunk == self.ticks.chunks - 1)

    @property
    def _scanned(self) -> ScannedBlocks:
        """The blocks, whose backward pass can be split."""
        if not isinstance(self.stages.blocks, ScannedBlocks):
            refuse_split_backward()
        return self.stages.blocks

    def _run_blocks(self, h: jax.Array, batch: PyTree, chunk: jax.Array) -> tuple[jax.Array, PyTree]:
        return self.stages.blocks.forward(self._rows(chunk), h, self.stages.read_by_blocks(batch))

    def _run_head(self, state: _State, batch: PyTree, slot: jax.Array) -> _State:
        """The state with the loss of a microbatch, and its gradients with respect to the head and the head's input."""

        (grads, dh), totals = head_gradients(self.stages, self.diff, self.captured, state.h, batch, self.seed)
        late = put(state.late, slot if self.slots.late_loss else 0, dh)
        totals = jax.tree.map(jnp.add, state.totals, totals)
        return state._replace(late=late, totals=totals, grads=self._added(state.grads, grads))

    def _embed(self, diff: PyTree, batch: PyTree) -> jax.Array:
        return self.stages.embed(diff, self.captured[EMBED], batch)

    def _pull_embed(self, state: _State, microbatch: jax.Array) -> _State:
        batch = at(self.microbatches, microbatch)
        grads = embed_gradients(functools.partial(self._embed, batch=batch), self.diff[EMBED], state.dh)
        return state._replace(grads=self._added(state.grads, {EMBED: grads}))

    def _added(self, total: PyTree, grads: PyTree) -> PyTree:
        """The total plus `grads`, which may lack units."""
        wide = accumulation_dtype(self.reduce_dtype)
        return total | {
            name: jax.tree.map(lambda leaf, grad: leaf + grad.astype(wide), total[name], unit)
            for name, unit in grads.items()
        }

    def _rows(self, chunk: jax.Array) -> BlockRows:
        """See `blocks_of_chunk`."""
        chunks, counts = self.ticks.chunks, self.stages.counts
        return blocks_of_chunk(self.diff[STACKED], self.captured[STACKED], chunk, chunks=chunks, counts=counts)

    def _add_blocks(self, total: PyTree, grads: PyTree, chunk: jax.Array) -> PyTree:
        if self.ticks.chunks == 1:
            return self._added(total, {STACKED: grads})
        whole = cut_into_chunks(total[STACKED], self.ticks.chunks)
        (sums,) = self._added({STACKED: at(whole, chunk)}, {STACKED: grads}).values()
        blocks = jax.tree.map(lambda leaf, old: leaf.reshape(old.shape), put(whole, chunk, sums), total[STACKED])
        return {**total, STACKED: blocks}
