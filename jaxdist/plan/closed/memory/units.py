"""What the units of a model (embedding, blocks, head) need of a device's memory, from traces of them alone.

The work space of a unit depends on the axes of layers, on what is computed again and on whether parameters are gathered
where they are used; not on the size of `data` and `fsdp`, or on the number of microbatches. So a unit is traced for all
of these at once, on a mesh of the layers' axes with one stage and two devices that have other samples, for two numbers
of rows. Bytes are then a line over rows: what does not depend on them, and what each adds.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.build import attention_of, step_options
from jaxdist.collectives import to_varying
from jaxdist.config.entries import ScheduleFacts, StrategyFacts
from jaxdist.config.schema import Config
from jaxdist.jaxpr.evaluate import without_dead_code
from jaxdist.jaxpr.walk import equations
from jaxdist.mesh import BATCH_LIKE, abstract_mesh, batch_shards
from jaxdist.parallel.blocks.branch import pack
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.microbatch import sample_keys, with_seed
from jaxdist.parallel.pipeline.relay import blocks_of_chunk
from jaxdist.parallel.program import in_precision, make_program
from jaxdist.parallel.schedule import Program, seeded_loss
from jaxdist.plan.closed.leaves import Known, of_layers
from jaxdist.plan.compiled.memory import batch_of
from jaxdist.plan.traced.liveness import peak_bytes
from jaxdist.specs import STACKED, PyTree, batch_spec, map_specs, without_idle

TRACED_ROWS = (2, 4)  # of a device: the numbers for which units are traced
TRACED_BLOCKS = (2, 4)  # of a stage: the numbers for which a pipeline's units are traced


class RowLine(NamedTuple):
    """Bytes for any number of rows."""

    fixed: float
    row: float

    def __call__(self, rows: float) -> float:
        """Bytes for so many rows."""
        return self.fixed + self.row * rows

    def towards(self, other: "RowLine", share: float) -> "RowLine":
        """The line between this one (share 0) and another (1), or beyond; nothing takes less than 0 bytes."""
        return RowLine(*(max(0.0, a + share * (b - a)) for a, b in zip(self, other, strict=True)))


class UnitMemory(NamedTuple):
    """Bytes that the units of a model need on one device, beside parameters, their gradients, and results.

    h: the array between blocks.
    kept: what the forward pass of the blocks of a stage, or of a chunk, keeps; in one stage that of the embedding too.
    read: of `kept`, what a backward pass reads; read_weights: what W reads (`zero_bubble`).
    crossing: what B leaves for W.
    forward, backward, weights: work space of these passes; in one stage those of the embedding too.
    embed, head: work space of both passes; embed: of a pipeline.
    """

    h: RowLine
    kept: RowLine
    read: RowLine
    read_weights: RowLine
    crossing: RowLine
    forward: RowLine
    backward: RowLine
    weights: RowLine
    embed: RowLine
    head: RowLine


def units_of(config: Config, known: Known) -> UnitMemory:
    """The memory of the units of a configuration, whose model has blocks."""
    mesh, parallel = config.mesh, config.parallel
    regathers, split = known.get(
        ("facts", parallel.strategy, parallel.schedule),
        lambda: (
            StrategyFacts.of(parallel.strategy).regathers,
            ScheduleFacts.of(parallel.schedule).split_backward and mesh.pipe > 1,
        ),
    )
    # Where parameters are gathered at each use it matters over which axes; else they are used whole.
    gathers = regathers and mesh.fsdp * mesh.context > 1
    over = (parallel.strategy, parallel.reshard_after_forward, mesh.fsdp > 1) if gathers else ()
    axes = (mesh.expert, mesh.context, mesh.tensor, over)
    how = (config.memory.remat, parallel.min_shard_bytes, parallel.grad_sync, config.optimizer.freeze)
    stacked = jax.tree.leaves(known.model(config).shapes[STACKED])[0].shape[0]
    blocks = stacked // (mesh.pipe * parallel.chunks)  # of a stage or chunk: with unequal ones, the largest
    # Of a pipeline any number of blocks is a line through two; but not where some of them are run together.
    together = config.memory.remat == "sqrt" or getattr(config.model, "scan_blocks", 1) != 1
    counts = TRACED_BLOCKS if mesh.pipe > 1 and not together else (blocks,)
    key = ("units", *of_layers(config), *axes, *how, mesh.pipe > 1, counts, split)

    def make() -> tuple[UnitMemory, ...]:
        traced = _Traced(config, known, gathers=gathers, split=split)
        return tuple(_by_rows(*(traced.at(rows, count) for rows in TRACED_ROWS)) for count in counts)

    found: tuple[UnitMemory, ...] = known.get(key, make)
    few, many = found[0], found[-1]
    share = (blocks - counts[0]) / max(1, counts[-1] - counts[0])
    return UnitMemory(*(one.towards(other, share) for one, other in zip(few, many, strict=True)))


def _by_rows(few: dict[str, float], many: dict[str, float]) -> UnitMemory:
    """The lines through the bytes of two numbers of rows, `TRACED_ROWS`."""
    fewer, more = TRACED_ROWS

    def line(name: str) -> RowLine:
        low, high = few.get(name, 0.0), many.get(name, 0.0)
        row = max(0.0, (high - low) / (more - fewer))
        return RowLine(max(0.0, low - row * fewer), row)

    return UnitMemory(*map(line, UnitMemory._fields))


class _Traced:
    """The units of a configuration's model on a small mesh."""

    def __init__(self, config: Config, known: Known, *, gathers: bool, split: bool) -> None:
        mesh = config.mesh
        axes = {axis: getattr(mesh, axis) for axis in ("expert", "context", "tensor")}
        self.mesh = abstract_mesh(**axes, **{"fsdp" if gathers and mesh.fsdp > 1 else "data": 2})
        options = step_options(config, self.mesh)
        self.options = replace(
            options,
            # Whole copies are used as whole parameters are.
            strategy=options.strategy if gathers else "ddp",
            schedule="accumulate",
            microbatches=1,
            prefetch=0,
            remat="full" if options.remat == "offload" else options.remat,
        )
        self.pipeline, self.split, self.config = mesh.pipe > 1, split, config
        model = known.model_in_order(config, attention_of(config, options.precision, self.mesh)[0])
        self.shapes = model.shapes
        self.strategy = get_strategy(self.options)
        placed = self.strategy.place(self.shapes, model.specs, self.mesh)
        self.specs = map_specs(lambda spec: without_idle(spec, self.mesh), placed)
        model = in_precision(model, options.precision)
        self.program: Program = make_program(model, self.strategy, self.specs, self.options)

    def at(self, rows: int, blocks: int) -> dict[str, float]:
        """Bytes by the fields of `UnitMemory`, for so many rows of a device, and blocks of a stage."""
        found = dict[str, float]()
        cut = lambda leaf: jax.ShapeDtypeStruct((blocks, *leaf.shape[1:]), leaf.dtype)  # noqa: E731
        shapes = {**self.shapes, STACKED: jax.tree.map(cut, self.shapes[STACKED])}

        def region(params: PyTree, batch: PyTree) -> jax.Array:
            keys = sample_keys(0, jnp.int32(0), rows)
            parts = jax.tree.map(lambda leaf: leaf[None], to_varying({**batch, "keys": keys}, BATCH_LIKE))
            one = jax.tree.map(lambda leaf: leaf[0], with_seed(self.program, parts, 1.0))
            found.update(self.units(*self.strategy.begin(params, self.specs, STACKED), one))
            return jnp.zeros(())

        run = jax.shard_map(region, mesh=self.mesh, in_specs=(self.specs, batch_spec(self.mesh)), out_specs=P())
        data = self.config.data.replace(global_batch=rows * batch_shards(self.mesh))
        jax.eval_shape(run, shapes, batch_of(replace(self.config, data=data), self.mesh))
        return found

    def units(self, diff: PyTree, captured: PyTree, batch: PyTree) -> dict[str, float]:
        """As `at`, inside the region."""
        stages = self.program.stages
        assert stages is not None and self.program.hidden is not None, "neither prefetches nor offloads"

        def embed(unit: PyTree) -> jax.Array:
            return stages.embed(unit, captured["embed"], batch)

        def head(units: PyTree, h: jax.Array) -> Any:
            loss, weight = stages.head(diff | units, captured, h, batch)
            return seeded_loss(loss, 1.0), weight

        h, read = jax.eval_shape(embed, diff["embed"]), {name: diff[name] for name in stages.head_units}
        found = {"h": _size(h), "head": _needs(jax.grad(head, argnums=(0, 1), has_aux=True), read, h).work}
        if self.pipeline:
            pull = lambda unit, dh: jax.vjp(embed, unit)[1](dh)  # noqa: E731
            return (
                found | {"embed": _needs(pull, diff["embed"], h).work} | self.stage(diff[STACKED], captured, batch, h)
            )
        hidden = self.program.hidden
        both = _needs(lambda diff: jax.vjp(lambda each: hidden(each, captured, batch), diff), diff)
        back = _needs(lambda pull, dh: pull(dh), both.results[1], h)
        return found | {"forward": both.work, "kept": both.made, "backward": back.work}

    def stage(self, blocks: PyTree, captured: PyTree, batch: PyTree, h: Any) -> dict[str, float]:
        """As `at`, of the blocks of a stage."""
        assert self.program.stages is not None
        run: Any = self.program.stages.blocks
        given = self.program.stages.read_by_blocks(batch)
        rows = lambda diff: blocks_of_chunk(diff, captured[STACKED], 0, chunks=1, counts=())  # noqa: E731
        forward = _needs(lambda diff, h: run.forward(rows(diff), h, given), blocks, h)
        saved = forward.results[1]
        kept = sum(map(_size, jax.eval_shape(pack, saved)))
        found = {"forward": forward.work, "kept": kept}
        # What is kept is among the arguments of a backward pass, behind the parameters.
        places = slice(first := len(jax.tree.leaves(blocks)), first + len(jax.tree.leaves(saved)))
        if not self.split:
            back = _needs(lambda diff, saved, dh: run.backward(rows(diff), saved, dh), blocks, saved, h)
            return found | {"backward": back.work, "read": sum(back.read[places])}
        back = _needs(lambda diff, saved, dh: run.backward_input(rows(diff), saved, dh), blocks, saved, h)
        crossing = back.results[0]
        late = lambda diff, saved, across, dh: run.backward_weights(rows(diff), saved, across, dh)  # noqa: E731
        weights = _needs(late, blocks, saved, crossing, h)
        found |= {"backward": back.work, "read": sum(back.read[places]), "read_weights": sum(weights.read[places])}
        return found | {"weights": weights.work, "crossing": sum(map(_size, jax.tree.leaves(crossing)))}


class _Needs(NamedTuple):
    """What a function needs.

    work: the most bytes beside arguments and results. results: their shapes.
    made: bytes of the results that are no arguments. read: of each argument, 0 for one that is not read.
    """

    work: float
    results: Any
    made: int
    read: list[int]


def _needs(function: Callable[..., Any], *arguments: PyTree) -> _Needs:
    """What a function needs, by its trace."""
    traced, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
    alive = without_dead_code(traced)
    given = [*alive.jaxpr.invars, *alive.jaxpr.constvars]
    made = {id(each): _size(each.aval) for each in alive.jaxpr.outvars if each not in given}
    reads = {id(each) for equation in equations(alive) for each in equation.invars}
    sizes = [_size(each.aval) for each in alive.jaxpr.invars]
    read = [size * (id(each) in reads) for size, each in zip(sizes, alive.jaxpr.invars, strict=True)]
    return _Needs(peak_bytes(alive, sizes), results, sum(made.values()), read)


def _size(leaf: Any) -> int:
    return int(leaf.size) * int(getattr(leaf.dtype, "itemsize", 0))
