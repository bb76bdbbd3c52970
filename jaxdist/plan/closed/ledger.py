"""The closed-form ledger: what a device sends in a step, without a trace of the step.

It is made of what files say beside their code: a strategy when it moves its shards (`sends`), a schedule how often its
stages run (`table`, or `sends`), a collective algorithm what a call costs (`cost`); of the parameters at rest
(`Known.leaves`); and of what one microbatch sends (`jaxdist.plan.closed.microbatch`), which is traced once for each
form of the layers. A test compares it with the ledger of the traced step.

Bytes are exact on every axis. Calls are exact but for hand-written algorithms, whose messages count one a round, for
losses in chunks, which may count as one.
What has no closed form is traced whole: see `_sends`.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from jaxdist.build import assemble, planned_mesh, step_options, with_teacher
from jaxdist.config.entries import ScheduleFacts, StrategyFacts
from jaxdist.config.schema import Config
from jaxdist.model import ModelDef
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.pipeline.table import SCHEDULES, table_of
from jaxdist.parallel.schedule import EMBED
from jaxdist.parallel.strategies._moves import Moves
from jaxdist.plan.closed.calls import AxisSizes, Call, collective_call
from jaxdist.plan.closed.forms import Form, form_of_step, microbatches_of
from jaxdist.plan.closed.leaves import Known, model_key, parts_of_a_step, placing_key, rows_of
from jaxdist.plan.closed.microbatch import BLOCKS, HEAD, Activation, Parameter
from jaxdist.plan.closed.optimizer import sent_by_optimizer
from jaxdist.plan.closed.sent import Transfer, merged_transfers
from jaxdist.plan.closed.shares import Share, shares_of
from jaxdist.plan.closed.step_sums import once_a_step
from jaxdist.plan.compiled.memory import batch_of
from jaxdist.plan.traced.ledger import ledger, wire_bytes

Counts = tuple[int, ...]  # of each stage


class Runs(NamedTuple):
    """How often the stages of a step run their units.

    units: of embedding and head, on each stage.
    blocks: {`count`: how often on each stage}, see `microbatches_of`.
    second: how often the second half of a split backward pass runs, for each time that the first one does.
    ticks: of a pipeline, which sends after each; 0: no pipeline. ring: whether the last stage sends to the first.
    """

    units: dict[str, Counts]
    blocks: dict[int, Counts]
    second: int = 1
    ticks: int = 0
    ring: bool = False


class EntrySends(NamedTuple):
    """What the files of a configuration's entries say.

    moves: `sends` of the strategy. runs: `table` of the schedule, or its `sends`.
    """

    model: ModelDef
    shares: tuple[Share, ...]
    moves: Callable[[StepOptions], Moves]
    runs: Callable[..., Any]
    facts: ScheduleFacts


class Each(NamedTuple):
    """What a unit sends each time that it runs: fixed bytes, and bytes for each sample of a microbatch."""

    unit: str
    held: int
    second: bool
    op: str
    axes: tuple[str, ...]
    size: int
    phase: str
    what: str
    fixed: float
    sample: float
    calls: float


def sends_of(config: Config, known: Known) -> list[Transfer]:
    """What a device sends in a step of a configuration, which has been checked.

    What the compiler adds around the optimizer is not in it: see `jaxdist.plan.closed.optimizer`.
    """
    mesh, parallel = config.mesh, config.parallel
    key = (*model_key(config), *placing_key(config), config.optimizer.frozen, parallel.schedule, config.distill.on)
    entry = known.get(("closed", *key, parallel.local.on), lambda: _entry(config, known))
    if entry is None or parallel.batch_split > 1:  # each half sums the gradients of its norms over `tensor`
        return _traced(config)
    sync, microbatches, samples = parallel.grad_sync, parts_of_a_step(config), int(rows_of(config))
    form = form_of_step(config, known, entry.model.layers, entry.facts, samples)
    once_key = ("once", id(entry), sync, form.prefetch, config.optimizer.name, microbatches == 1)
    once = known.get(once_key, lambda: _once(config, known, entry, microbatches))
    runs_key = ("runs", id(entry), microbatches, form.masked, form.rows)
    runs = known.get(runs_key, lambda: _runs(config, microbatches, entry, form))
    kept = (config.memory.remat, parallel.reshard_after_forward)
    each_key = ("each", id(entry), sync, *kept, form, tuple(runs.blocks))
    each, h = known.get(each_key, lambda: _each(config, known, form, entry, tuple(runs.blocks)))
    return [*once, *_all_runs(each, runs, samples), *_between_stages(runs, h * samples, mesh.pipe)]


def _entry(config: Config, known: Known) -> EntrySends | None:
    """The entries of a configuration; None where one of them has no closed form."""
    schedule = "pairwise" if config.parallel.grad_sync.deterministic else config.parallel.schedule
    strategy, runs = (
        _sends(StrategyFacts.folder, config.parallel.strategy),
        table_of(schedule) or _sends(SCHEDULES, schedule),
    )
    model = known.model(config)
    apart = config.distill.on or config.parallel.local.on
    if strategy is None or runs is None or apart or not isinstance(model, ModelDef):
        return None
    return EntrySends(model, shares_of(config, known), strategy, runs, ScheduleFacts.of(schedule))


def _sends(folder: str, name: str) -> Any:
    """The function `sends` in the module of an entry, a name or a dotted path; None where it has none."""
    return getattr(importlib.import_module(name.rpartition(".")[0] or f"{folder}.{name}"), "sends", None)


def _once(config: Config, known: Known, entry: EntrySends, microbatches: int) -> list[Transfer]:
    mesh = planned_mesh(config)
    options, sizes = step_options(config, mesh), asdict(config.mesh)
    in_backward = microbatches == 1 and entry.facts.one_backward_pass
    found = once_a_step(entry.shares, sizes, options, entry.moves(options), in_backward=in_backward)
    return merged_transfers([*found, *sent_by_optimizer(config, known, sizes)])


def _runs(config: Config, microbatches: int, entry: EntrySends, form: Form) -> Runs:
    """The runs of a step."""
    stages, chunks, together, layers = config.mesh.pipe, config.parallel.chunks, form.rows > 1, entry.model.layers
    if not form.pipeline:
        times = (entry.runs(microbatches),)
        return Runs({EMBED: times, HEAD: times}, {0: (times[0] * layers // form.rows,)})
    ticks = entry.runs(stages, microbatches, chunks)
    counts = config.parallel.stages or (layers // (stages * chunks),) * (stages * chunks)
    sizes = set(counts)
    held = form.rows if len(sizes) > 1 else 0  # as a condition, an empty row changes what is dead code
    if form.masked:
        every, rows = (ticks.length,) * stages, 1 if together else max(counts)
        blocks, second = {held: (ticks.length * rows,) * stages}, max(1, ticks.weights.shape[2])
        return Runs({EMBED: every, HEAD: every}, blocks, second, ticks.length, chunks > 1)
    first, last = (tuple(microbatches * (stage == end) for stage in range(stages)) for end in (0, stages - 1))
    if together and held:
        of = lambda count, stage: sum(own == count for own in counts[stage::stages])  # noqa: E731
        blocks = {n: tuple(microbatches * of(n, stage) for stage in range(stages)) for n in sorted(sizes)}
    else:
        run = [len(counts[stage::stages]) if together else sum(counts[stage::stages]) for stage in range(stages)]
        blocks = {held: tuple(microbatches * each for each in run)}
    return Runs({EMBED: first, HEAD: last}, blocks, 1, ticks.length, chunks > 1)


def _each(
    config: Config, known: Known, form: Form, entry: EntrySends, counts: tuple[int, ...]
) -> tuple[list[Each], float]:
    """(what the units of a stage send each time that they run, bytes of a sample between two stages)."""
    mesh, h = planned_mesh(config), 0.0
    options, sizes = step_options(config, mesh), asdict(config.mesh)
    moves, found = entry.moves(options), dict[tuple[Any, ...], np.ndarray]()
    shares = {share.name: share for share in entry.shares}

    def add(
        of: Parameter | Activation,
        place: tuple[int, bool],
        op: str,
        axes: tuple[str, ...],
        what: str,
        *,
        fixed: float,
        sample: float,
        calls: float,
    ) -> None:
        size = math.prod(sizes[axis] for axis in axes)
        key = (of.unit, *place, op, axes, size, of.phase, what)
        found[key] = found.get(key, 0) + np.array([fixed, sample, calls])

    for count in counts:
        for microbatch, second in microbatches_of(config, known, form, entry.shares, moves, count):
            h, place = microbatch.h, (count, second)
            for each in microbatch.parameters if count == counts[0] else _of_blocks(microbatch.parameters):
                share, rows = shares[each.name], form.rows if each.unit == BLOCKS else 1
                one = _of_parameter(each, share, sizes, options, moves, rows=rows)
                if one is not None:
                    what = "parameters" if each.op == "all_gather" else "gradients"
                    calls = each.calls * one.messages
                    add(each, place, one.op, share.axes, what, fixed=one.wire_bytes * calls, sample=0.0, calls=calls)
            for own in microbatch.activations if count == counts[0] else _of_blocks(microbatch.activations):
                axes = tuple(axis for axis in own.axes if sizes[axis] > 1)  # traced with two devices of `fsdp`
                size = math.prod(sizes[axis] for axis in axes)
                fixed, sample = (wire_bytes(own.op, nbytes, size) * own.calls for nbytes in (own.fixed, own.row))
                add(own, place, own.op, axes, "activations", fixed=fixed, sample=sample, calls=own.calls)
    return [Each(*key, *sums.tolist()) for key, sums in found.items()], h


def _of_blocks(some: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each for each in some if each.unit == BLOCKS)


def _of_parameter(
    each: Parameter, share: Share, sizes: AxisSizes, options: StepOptions, moves: Moves, *, rows: int
) -> Call | None:
    """One of the calls with which a microbatch gathers a parameter or reduces its gradient; None: it does not. rows: of
    it that run together."""
    elements = share.elements * each.times * rows / share.rows / each.calls
    if share.axes and each.op == "all_gather" and moves.gather_each:
        return collective_call("all_gather", elements, share.received, share.axes, sizes, {})
    if share.axes and each.op != "all_gather" and moves.reduce_each:
        how = options.grad_sync.reduction
        return collective_call(
            "reduce_scatter", elements * share.parts, options.precision.reduce, share.axes, sizes, how
        )
    return None


def _all_runs(each: list[Each], runs: Runs, samples: int) -> list[Transfer]:
    found = []
    for unit, held, second, op, axes, size, phase, what, fixed, sample, calls in each:
        times = runs.blocks[held] if unit == BLOCKS else runs.units[unit]
        factor = calls * runs.second if second else calls
        of_stages = tuple([factor * own for own in times])
        found.append(Transfer(op, axes, size, (fixed + sample * samples) / calls, of_stages, phase, what))
    return found


def _between_stages(runs: Runs, nbytes: float, stages: int) -> list[Transfer]:
    """What stages send to the next, and to the one before, after each tick."""
    if stages == 1:
        return []
    calls = [tuple(runs.ticks * (runs.ring or stage != end) for stage in range(stages)) for end in (stages - 1, 0)]
    return [
        Transfer("ppermute", ("pipe",), stages, nbytes, times, phase, "activations")
        for times, phase in zip(calls, ("forward", "backward"), strict=True)
    ]


def _traced(config: Config) -> list[Transfer]:
    """What a step sends, by the ledger of the traced step."""
    mesh = planned_mesh(config)
    parts, batch = with_teacher(assemble(config, mesh), batch_of(config, mesh))
    found = ledger(parts.step, parts.target, batch).collectives
    return [
        Transfer(
            each.op, each.axes, each.group_size, each.wire_bytes / each.calls, each.stages, each.phase, each.purpose
        )
        for each in found
    ]
