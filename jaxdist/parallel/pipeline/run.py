"""Run the table of a pipeline: one scan over ticks. In a tick each stage computes what its row says, or nothing; then
all stages send to their neighbours.

What differs from stage to stage stands in `lax.cond`, so that a stage without work does none; sends stand outside,
because all stages take part in them. Collectives inside (over `fsdp` and `tensor`, of a block) are among devices of one
stage, which all take the same branch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.collectives import active_axes, rank, to_varying, varying_axes, zeros_varying_like
from jaxdist.config.rules.pipeline import refuse_stages
from jaxdist.errors import UserError
from jaxdist.parallel.blocks.branch import Choose, Packing, by_condition, by_mask, packing_of, typed_like
from jaxdist.parallel.blocks.layers import at, put, rows_of
from jaxdist.parallel.pipeline.table import Slots, Ticks, allocate
from jaxdist.parallel.schedule import Program, Seed, Stages, seeded_loss
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import STACKED, PyTree

EMBED = "embed"
# Scopes, by which the ledger tells the work of a tick apart, and its sends.
FORWARD, BACKWARD, TO_NEXT, TO_BEFORE = "pipeline_forward", "pipeline_backward", "pipeline.next", "pipeline.before"


def stages_of_mesh() -> int:
    """The number of stages, inside the manual region."""
    return lax.axis_size("pipe")


def virtual_stage(chunk: jax.Array | int) -> jax.Array | int:
    """The number of a chunk of this stage."""
    return chunk * stages_of_mesh() + rank("pipe")


def blocks_of_chunk(
    diff: PyTree, held: PyTree, chunk: jax.Array | int, *, chunks: int, counts: tuple[int, ...]
) -> tuple[PyTree, PyTree, jax.Array]:
    """The rows of one chunk of stacked blocks, of diff and held, and the numbers of their blocks, from 1, 0 where a row
    holds none: [rows]. counts: as `ModelDef.stages`."""
    if counts and len(counts) != chunks * stages_of_mesh():
        raise UserError(
            f"mesh.pipe: {stages_of_mesh()} is given, but the model was arranged for"
            f" {len(counts) // chunks} stages, with blocks={list(counts)}; give both the same"
        )
    if chunks > 1:
        diff, held = at(cut((diff, held), chunks), chunk)
    row, number = jnp.arange(rows_of(diff, held), dtype=jnp.int32), virtual_stage(chunk)
    if not counts:
        return diff, held, 1 + number * len(row) + row
    before, count = jnp.asarray([np.cumsum(counts) - counts, counts], jnp.int32)[:, number]
    return diff, held, jnp.where(row < count, 1 + before + row, 0)


def cut(blocks: PyTree, chunks: int) -> PyTree:
    """Stacked blocks [K, ...] as [chunks, K / chunks, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(chunks, -1, *leaf.shape[1:]), blocks)


def relay(run: Callable[[jax.Array, jax.Array | int], jax.Array], h: jax.Array, chunks: int) -> jax.Array:
    """h after all blocks, one stage after the other, on the first stage: for evaluation. run: (h, chunk) -> h."""
    if not active_axes("pipe") and chunks == 1:
        return run(h, 0)
    stage, count, h = rank("pipe"), stages_of_mesh(), to_varying(h, ("pipe",))

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
    """x of the stage before (1) or after (-1); on the stage without one zeros, unless stages form a ring. used: how
    many of a loop's sends across a boundary carry what is used, for the ledger; None: all."""
    count = stages_of_mesh()
    if count == 1:
        return x
    with jax.named_scope((TO_NEXT if places > 0 else TO_BEFORE) + ("" if used is None else f".{used}")):
        pairs = [(stage, (stage + places) % count) for stage in range(count)]
        return lax.ppermute(x, "pipe", [pair for pair in pairs if ring or pair[1] - pair[0] == places])


class _Row(NamedTuple):
    """What this stage does in a tick: numbers, -1 for nothing. With all ticks, [T]."""

    forward: jax.Array  # of the microbatch
    forward_chunk: jax.Array
    forward_slot: jax.Array
    backward: jax.Array
    backward_chunk: jax.Array
    backward_slot: jax.Array
    cotangent_slot: jax.Array  # where backward writes
    weights: tuple["_Weights", ...]


class _Weights(NamedTuple):
    """Gradients of parameters that wait for a place in a tick."""

    microbatch: jax.Array
    chunk: jax.Array
    slot: jax.Array
    cotangent_slot: jax.Array


class _State(NamedTuple):
    """What goes from tick to tick. kept: residuals, a leading dim of slots; crossing: what B leaves to W; late: the
    gradient of the head's input, one place or as many as residuals. grads: in the accumulation dtype. totals: loss sum
    and weight sum."""

    h: jax.Array
    dh: jax.Array
    kept: list[jax.Array]
    crossing: PyTree
    late: jax.Array
    grads: PyTree
    totals: tuple[jax.Array, jax.Array]


def run_ticks(
    table: Callable[[int, int, int], Ticks],
    program: Program,
    diff: PyTree,
    held: PyTree,
    microbatches: PyTree,
    *,
    seed: Seed,
    reduce_dtype: Any,
) -> tuple[jax.Array, jax.Array, PyTree]:
    """Run the table for this mesh and these microbatches. What a `Schedule` returns: loss and weight are the last
    stage's, gradients those of each stage's own parameters and of what it used of embedding and head."""
    if program.stages is None:
        refuse_stages(
            "parallel.prefetch: 1, memory.remat: 'offload', or a loss_fn of your own",
            allowed="parallel.schedule=accumulate; or a model of jaxdist.nn layers without these two",
        )
    stages = program.stages
    ticks = table(stages_of_mesh(), jax.tree.leaves(microbatches)[0].shape[0], stages.chunks)
    choose = by_condition if stages.conditions else by_mask
    machine = _Machine(ticks, allocate(ticks), stages, diff, held, microbatches, seed, reduce_dtype, choose, None)
    start, packing = machine.start()
    machine = machine._replace(packing=packing)

    def tick(state: _State, row: _Row) -> tuple[_State, None]:
        with jax.named_scope(FORWARD):
            state = machine.forward(state, row)
        with jax.named_scope(BACKWARD):
            state = machine.backward(state, row)
            for work in row.weights:
                state = machine.weights(state, work)
        # In a ring from the last stage on to the first one's next chunk, and so all boundaries together.
        ring, used = ticks.chunks > 1, ticks.microbatches * ticks.chunks
        h, dh = (send(x, places, ring=ring, used=used) for x, places in ((state.h, 1), (state.dh, -1)))
        return state._replace(h=h, dh=dh), None

    state, _ = lax.scan(tick, start, machine.rows())
    return *state.totals, state.grads


class _Machine(NamedTuple):
    ticks: Ticks
    slots: Slots
    stages: Stages
    diff: PyTree
    held: PyTree
    microbatches: PyTree
    seed: Seed
    reduce_dtype: Any
    choose: Choose
    packing: Any

    def rows(self) -> _Row:
        """Of this stage, all ticks."""
        residuals, cotangents = self.slots.residuals, self.slots.cotangents

        def own(*tables_TS: np.ndarray) -> list[jax.Array]:
            stage = rank("pipe")
            return [lax.dynamic_index_in_dim(jnp.asarray(table), stage, 1, keepdims=False) for table in tables_TS]

        def pair(table_TS2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return table_TS2[..., 0], table_TS2[..., 1]

        weights = tuple(
            _Weights(*own(*pair(self.ticks.weights[:, :, i]), residuals.weights[..., i], cotangents.weights[..., i]))
            for i in range(self.ticks.weights.shape[2])
        )
        forward, backward = pair(self.ticks.forward), pair(self.ticks.backward)
        plain = own(*forward, residuals.forward, *backward, residuals.backward, cotangents.backward)
        return _Row._make([*plain, weights])

    def start(self) -> tuple[_State, Packing]:
        """(zeros, of the types that they will have; how what is kept goes into them)."""

        def zeros(leaf: Any, *places: int) -> jax.Array:
            return to_varying(jnp.zeros((*places, *leaf.shape), leaf.dtype), {*varying_axes(leaf), "pipe"})

        batch = at(self.microbatches, 0)
        h = zeros(jax.eval_shape(self.stages.embed, self.diff, self.held, batch))
        _, saved = jax.eval_shape(self._run_blocks, h, batch, jnp.zeros((), jnp.int32))
        packing = packing_of(saved)
        kept = [zeros(leaf, self.slots.residuals.size) for leaf in jax.eval_shape(packing.pack, saved)]
        crossing: PyTree = ()
        if self.ticks.weights.shape[2]:
            blocks = self._chunks(jnp.zeros((), jnp.int32))
            shapes, _ = jax.eval_shape(self.stages.blocks.backward_input, *blocks, saved, h)
            crossing = jax.tree.map(lambda leaf: zeros(leaf, self.slots.cotangents.size), shapes)
        late = zeros(h, self.slots.residuals.size if self.slots.late_loss else 1)
        grads = zeros_varying_like(self.diff, accumulation_dtype(self.reduce_dtype))
        totals = jax.tree.map(zeros, jax.eval_shape(self.stages.head, self.diff, self.held, h, batch))
        return _State(h, h, kept, crossing, late, grads, totals), packing

    def forward(self, state: _State, row: _Row) -> _State:
        """The state after the forward work of a tick: `h` is what the next stage is to get."""
        first = (rank("pipe") == 0) & (row.forward_chunk == 0)
        last = (rank("pipe") == self.ticks.stages - 1) & (row.forward_chunk == self.ticks.chunks - 1)

        def work() -> _State:
            batch = at(self.microbatches, row.forward)
            embedded = lambda: typed_like(self.stages.embed(self.diff, self.held, batch), state.h)  # noqa: E731
            h, saved = self._run_blocks(self.choose(first, embedded, lambda: state.h), batch, row.forward_chunk)
            after = state._replace(h=h, kept=put(state.kept, row.forward_slot, self.packing.pack(saved)))
            return self.choose(last, lambda: typed_like(self._run_head(after, batch, row), state), lambda: after)

        return self.choose(row.forward >= 0, lambda: typed_like(work(), state), lambda: state)

    def backward(self, state: _State, row: _Row) -> _State:
        """The state after the backward work of a tick: `dh` is what the stage before is to get."""
        first = (rank("pipe") == 0) & (row.backward_chunk == 0)
        last = (rank("pipe") == self.ticks.stages - 1) & (row.backward_chunk == self.ticks.chunks - 1)

        def work() -> _State:
            loss = at(state.late, row.backward_slot if self.slots.late_loss else 0)
            saved = self.packing.unpack(at(state.kept, row.backward_slot))
            parts = *self._chunks(row.backward_chunk), saved, jnp.where(last, loss, state.dh)
            if row.weights:
                crossing, dh = self.stages.blocks.backward_input(*parts)
                after = state._replace(dh=dh, crossing=put(state.crossing, row.cotangent_slot, crossing))
            else:
                grads, dh = self.stages.blocks.backward(*parts)
                after = state._replace(dh=dh, grads=self._add_blocks(state.grads, grads, row.backward_chunk))
            return self.choose(first, lambda: typed_like(self._pull_embed(after, row), state), lambda: after)

        return self.choose(row.backward >= 0, lambda: typed_like(work(), state), lambda: state)

    def weights(self, state: _State, work: _Weights) -> _State:
        """The state with the gradients of the blocks' parameters of one microbatch."""

        def add() -> _State:
            saved = self.packing.unpack(at(state.kept, work.slot))
            crossing = at(state.crossing, work.cotangent_slot)
            grads = self.stages.blocks.backward_weights(*self._chunks(work.chunk), saved, crossing, state.dh)
            return state._replace(grads=self._add_blocks(state.grads, grads, work.chunk))

        return self.choose(work.microbatch >= 0, lambda: typed_like(add(), state), lambda: state)

    def _run_blocks(self, h: jax.Array, batch: PyTree, chunk: jax.Array) -> tuple[jax.Array, PyTree]:
        return self.stages.blocks.forward(*self._chunks(chunk), h, batch["keys"])

    def _run_head(self, state: _State, batch: PyTree, row: _Row) -> _State:
        """With the loss of the microbatch, and its gradients with respect to the head and to what the head reads."""

        def seeded(units: PyTree, h: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            loss, weight = self.stages.head({**self.diff, **units}, self.held, h, batch)
            return seeded_loss(loss, self.seed), (loss, weight)

        units = {name: self.diff[name] for name in self.stages.head_units}
        (grads, dh), totals = jax.grad(seeded, argnums=(0, 1), has_aux=True)(units, state.h)
        late = put(state.late, row.forward_slot if self.slots.late_loss else 0, dh)
        totals = jax.tree.map(jnp.add, state.totals, totals)
        return state._replace(late=late, totals=totals, grads=self._added(state.grads, grads))

    def _pull_embed(self, state: _State, row: _Row) -> _State:
        batch = at(self.microbatches, row.backward)
        embed = lambda unit: self.stages.embed({**self.diff, EMBED: unit}, self.held, batch)  # noqa: E731
        (grads,) = jax.vjp(embed, self.diff[EMBED])[1](state.dh)
        return state._replace(grads=self._added(state.grads, {EMBED: grads}))

    def _added(self, total: PyTree, grads: PyTree) -> PyTree:
        """The total, with the units of `grads` added."""
        wide = accumulation_dtype(self.reduce_dtype)
        return total | {
            name: jax.tree.map(lambda leaf, grad: leaf + grad.astype(wide), total[name], unit)
            for name, unit in grads.items()
        }

    def _chunks(self, chunk: jax.Array) -> tuple[PyTree, PyTree, jax.Array]:
        """The blocks of one chunk, of diff and held, and their numbers."""
        chunks, counts = self.ticks.chunks, self.stages.counts
        return blocks_of_chunk(self.diff[STACKED], self.held[STACKED], chunk, chunks=chunks, counts=counts)

    def _add_blocks(self, total: PyTree, grads: PyTree, chunk: jax.Array) -> PyTree:
        if self.ticks.chunks == 1:
            return self._added(total, {STACKED: grads})
        whole = cut(total[STACKED], self.ticks.chunks)
        (sums,) = self._added({STACKED: at(whole, chunk)}, {STACKED: grads}).values()
        blocks = jax.tree.map(lambda leaf, old: leaf.reshape(old.shape), put(whole, chunk, sums), total[STACKED])
        return {**total, STACKED: blocks}
