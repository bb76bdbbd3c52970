"""What the units of a model (embedding, blocks, head) need of a device's memory, as lines over rows.

The work space of a unit depends on the axes of layers, on what is computed again and on whether parameters are gathered
where they are used; not on the size of `data` and `fsdp`, or on the number of microbatches. So each unit is traced once
for all of these (`jaxdist.plan.closed.memory.unit_traces`). Bytes are then a line over the rows of a microbatch: what
does not depend on them, and what each adds.
"""

import itertools
import math
from dataclasses import replace
from typing import NamedTuple

import jax

from jaxdist.config.entries import ScheduleFacts, StrategyFacts
from jaxdist.config.rules.remat import in_loop
from jaxdist.config.schema import Config
from jaxdist.plan.closed.leaves import Known, logits_chunk, of_layers
from jaxdist.plan.closed.memory.unit_traces import UNIT_ROWS, Readings, UnitTraces
from jaxdist.specs import STACKED

BLOCKS = (2, 4)  # of a stage of a pipeline: numbers through whose bytes a line goes, as through those of `UNIT_ROWS`


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


_NONE = RowLine(0.0, 0.0)


class UnitMemory(NamedTuple):
    """Bytes that the units of a model need on one device, beside parameters, their gradients, and results.

    h: the array between blocks.
    kept: what the forward pass of the blocks of a stage, or of a chunk, keeps; in one stage that of the embedding too.
    cast: of `kept` in one stage, the parameters of blocks in another type.
    read: of `kept`, what a backward pass reads; read_weights: what W reads (`zero_bubble`).
    crossing: what B leaves for W.
    forward, backward, weights: work space of these passes; in one stage those of the embedding too.
    embed, head: work space of both passes; embed: of a pipeline.
    """

    h: RowLine
    kept: RowLine
    forward: RowLine
    backward: RowLine
    head: RowLine
    cast: RowLine = _NONE
    read: RowLine = _NONE
    read_weights: RowLine = _NONE
    crossing: RowLine = _NONE
    weights: RowLine = _NONE
    embed: RowLine = _NONE


def units_of(config: Config, known: Known, rows: float) -> UnitMemory:
    """The memory of the units of a configuration, whose model has blocks.

    rows: of a microbatch on a device. The head of many rows makes its logits in chunks, and is another program.
    """
    mesh, parallel = config.mesh, config.parallel
    regathers, split = known.get(
        ("facts", parallel.strategy, parallel.schedule, mesh.pipe > 1),
        lambda: (
            StrategyFacts.of(parallel.strategy).regathers,
            ScheduleFacts.of(parallel.schedule).split_backward and mesh.pipe > 1,
        ),
    )
    # Where parameters are gathered at each use it matters over which axes; else they are used whole.
    gathers = regathers and mesh.shards > 1
    over = (parallel.strategy, parallel.reshard_after_forward, mesh.fsdp > 1) if gathers else ()
    axes = (mesh.expert, mesh.context, mesh.tensor, over)
    how = (*of_layers(config), *axes, parallel.min_shard_bytes, parallel.grad_sync, config.optimizer.freeze)
    how += (config.devices.platform,)
    stacked = jax.tree.leaves(known.model(config).shapes[STACKED])[0].shape[0]
    blocks = stacked // (mesh.pipe * parallel.chunks)  # of a stage or chunk: with unequal ones, the largest
    # Of a pipeline any number of blocks is a line through two; but not where some of them are run together. What null
    # is on GPUs does not matter: no pipeline is without a loop then.
    together = config.memory.remat == "sqrt" or not in_loop(getattr(config.model, "scan_blocks", None))
    counts = BLOCKS if mesh.pipe > 1 and not together else (blocks,)
    chunk = known.get(("logits", *how, math.ceil(rows)), lambda: logits_chunk(config, math.ceil(rows))[0])
    key = ("units", *how, config.memory.remat, mesh.pipe > 1, counts, split, chunk)

    def make() -> tuple[UnitMemory, ...]:
        remat = config.memory.remat
        traces = known.get(
            ("unit traces", *how, remat), lambda: UnitTraces(config, known, gathers=gathers, together=together)
        )
        # Whatever is computed again in blocks.
        head = known.get(("head", *how, chunk), lambda: _head(config, known, gathers=gathers, chunk=chunk))
        parts = list[Readings]()
        if mesh.pipe == 1:
            parts.append(known.get(("in one stage", *how, remat), lambda: traces.in_one_stage(blocks)))
        else:
            parts.append(known.get(("embedding", *how), traces.embedding))
            parts.append(known.get(("stage", *how, remat, counts), lambda: traces.stage(counts)))
            halves = ("backward of a stage", *how, remat, counts, split)
            parts.append(known.get(halves, lambda: traces.backward(counts, split=split)))
        found = list[UnitMemory]()
        for place in range(len(counts)):
            lines = dict(head)
            for part in parts:
                lines |= _lines(part, UNIT_ROWS, place)
            found.append(UnitMemory(**lines))
        return tuple(found)

    found: tuple[UnitMemory, ...] = known.get(key, make)
    few, many = found[0], found[-1]
    share = (blocks - counts[0]) / max(1, counts[-1] - counts[0])
    return UnitMemory(*(one.towards(other, share) for one, other in zip(few, many, strict=True)))


def _head(config: Config, known: Known, *, gathers: bool, chunk: int) -> dict[str, RowLine]:
    """The lines of the head. chunk: of its logits, in tokens; 0 where they are whole. The first two powers of two of
    rows with more tokens than a chunk tell the line of a head in chunks."""
    rows = UNIT_ROWS
    if chunk:
        first = next(2**k for k in itertools.count() if logits_chunk(config, 2**k)[1] > chunk)
        rows = first, 2 * first
    if "loss_chunk" in vars(config.model):
        config = replace(config, model=config.model.replace(loss_chunk=chunk))
    return _lines(UnitTraces(config, known, gathers=gathers, together=False).head(rows), rows, 0)


def _lines(part: Readings, rows: tuple[int, int], place: int) -> dict[str, RowLine]:
    """The lines through the bytes of two numbers of rows. place: of the number of blocks."""
    fewer, more = rows

    def line(each: list[tuple[float, float]]) -> RowLine:
        low, high = each[min(place, len(each) - 1)]
        row = max(0.0, (high - low) / (more - fewer))
        return RowLine(max(0.0, low - row * fewer), row)

    return {name: line(each) for name, each in part.items()}
