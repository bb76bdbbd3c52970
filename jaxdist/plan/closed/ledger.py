"""The closed-form ledger: what a device sends in a step, without a trace of the step.

It is made of what files say beside their code: a strategy when it moves its shards (`sends`), a schedule how often its
stages run (`table`, or `sends`), a collective algorithm what a call costs (`cost`); of the parameters at rest
(`Known.leaves`); and of what one microbatch sends (`jaxdist.plan.closed.microbatch`), which is traced once for each
form of the layers. A test compares it with the ledger of the traced step.

Bytes are exact on every axis. Calls are exact but for hand-written algorithms, whose messages count one a round.
What has no closed form is traced whole: see `_sends`.
"""

import importlib
from collections import Counter
from typing import Any, NamedTuple

from jaxdist.build import assemble, step_options, with_teacher
from jaxdist.config.entries import ScheduleFacts, StrategyFacts
from jaxdist.config.schema import Config
from jaxdist.mesh import AXES
from jaxdist.model import ModelDef
from jaxdist.parallel.pipeline.table import SCHEDULES, table_of
from jaxdist.parallel.strategies._sharded import Moves
from jaxdist.plan.closed.calls import Sizes, call
from jaxdist.plan.closed.forms import Form, form_of_step, microbatches_of
from jaxdist.plan.closed.leaves import Known, mesh_sizes, planned_mesh
from jaxdist.plan.closed.microbatch import BLOCKS, EMBED, HEAD
from jaxdist.plan.closed.once import once_a_step
from jaxdist.plan.closed.optimizer import sent_by_optimizer
from jaxdist.plan.closed.sent import Sent, merged
from jaxdist.plan.closed.shares import Share, shares_of
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


class Each(NamedTuple):
    """What a unit sends each time that it runs: fixed bytes, and bytes for each sample of a microbatch."""

    unit: str
    count: int
    second: bool
    op: str
    axes: tuple[str, ...]
    size: int
    phase: str
    what: str
    fixed: float
    sample: float
    calls: float


def sends_of(config: Config, known: Known) -> list[Sent]:
    """What a device sends in a step of a configuration, which has been checked.

    What the compiler adds around the optimizer is not in it: see `jaxdist.plan.closed.optimizer`.
    """
    strategy, schedule = _sends(StrategyFacts.folder, config.parallel.strategy), _schedule(config)
    runs_own = table_of(schedule) or _sends(SCHEDULES, schedule)
    apart = config.distill.on or config.parallel.local.on
    if strategy is None or runs_own is None or apart or not isinstance(known.model(config), ModelDef):
        return _traced(config)
    mesh, parallel = config.mesh, config.parallel
    batch = config.data.global_batch // (mesh.data * mesh.fsdp * mesh.expert)
    microbatches = parallel.microbatches
    if parallel.grad_sync.deterministic:
        microbatches = parallel.grad_sync.virtual_shards // (mesh.data * mesh.fsdp * mesh.expert)
    samples = batch // microbatches
    form, shares = form_of_step(config, known, samples), shares_of(config, known)
    sizes = dict(zip(AXES, mesh_sizes(config), strict=True))
    in_backward = microbatches == 1 and ScheduleFacts.of(schedule).one_backward_pass
    of_shares = (id(shares), parallel.strategy, parallel.grad_sync, form.prefetch)
    key = ("once", *of_shares, config.optimizer.name, in_backward)
    once = known.get(key, lambda: _once(config, known, shares, strategy, in_backward))
    stages = (mesh.pipe, microbatches, parallel.chunks, parallel.stages, form.masked, form.rows)
    layers = known.model(config).layers
    runs = known.get(("runs", schedule, layers, *stages), lambda: _runs(config, microbatches, layers, runs_own, form))
    kept = (config.memory.remat, parallel.reshard_after_forward)
    make = lambda: _each(config, known, form, shares, strategy, tuple(runs.blocks))  # noqa: E731
    each, h = known.get(("each", *of_shares, *kept, form, tuple(runs.blocks)), make)
    return [*once, *_all_runs(each, runs, samples), *_between_stages(runs, h * samples, mesh.pipe)]


def _schedule(config: Config) -> str:
    return "pairwise" if config.parallel.grad_sync.deterministic else config.parallel.schedule


def _sends(folder: str, name: str) -> Any:
    """The function `sends` in the module of an entry, a name or a dotted path; None where it has none."""
    return getattr(importlib.import_module(name.rpartition(".")[0] or f"{folder}.{name}"), "sends", None)


def _once(config: Config, known: Known, shares: tuple[Share, ...], strategy: Any, in_backward: bool) -> list[Sent]:
    mesh = planned_mesh(config)
    options, sizes = step_options(config, mesh), dict(zip(AXES, mesh_sizes(config), strict=True))
    found = once_a_step(shares, sizes, options, strategy(options), in_backward=in_backward)
    return merged([*found, *sent_by_optimizer(config, known, sizes)])


def _runs(config: Config, microbatches: int, layers: int, own: Any, form: Form) -> Runs:
    """The runs of a step. own: the table of a schedule, or its `sends`."""
    stages, chunks, together = config.mesh.pipe, config.parallel.chunks, form.rows > 1
    if not form.pipeline:
        times = (own(microbatches),)
        return Runs({EMBED: times, HEAD: times}, {0: (times[0] * layers // form.rows,)})
    ticks = own(stages, microbatches, chunks)
    counts = config.parallel.stages or (layers // (stages * chunks),) * (stages * chunks)
    if form.masked:
        every = (ticks.length,) * stages
        rows = 1 if together else max(counts)
        second = max(1, ticks.weights.shape[2])
        return Runs({EMBED: every, HEAD: every}, {0: (ticks.length * rows,) * stages}, second, ticks.length, chunks > 1)
    first, last = (tuple(microbatches * (stage == end) for stage in range(stages)) for end in (0, stages - 1))
    if together and len(set(counts)) > 1:
        of = lambda count, stage: sum(own == count for own in counts[stage::stages])  # noqa: E731
        blocks = {n: tuple(microbatches * of(n, stage) for stage in range(stages)) for n in sorted(set(counts))}
    else:
        run = [len(counts[stage::stages]) if together else sum(counts[stage::stages]) for stage in range(stages)]
        blocks = {0: tuple(microbatches * each for each in run)}
    return Runs({EMBED: first, HEAD: last}, blocks, 1, ticks.length, chunks > 1)


def _each(
    config: Config, known: Known, form: Form, shares: tuple[Share, ...], strategy: Any, counts: tuple[int, ...]
) -> tuple[list[Each], float]:
    """(what the units of a stage send each time that they run, bytes of a sample between two stages)."""
    mesh = planned_mesh(config)
    options, sizes = step_options(config, mesh), dict(zip(AXES, mesh_sizes(config), strict=True))
    moves, found, h = strategy(options), Counter[tuple[Any, ...]](), 0.0
    own = {share.name: share for share in shares}
    for count in counts:
        for microbatch, second in microbatches_of(config, known, form, shares, moves, count):
            h = microbatch.h
            place = (count, second)
            for p in microbatch.parameters:
                if not (share := own[p.name]).axes or (count != counts[0] and p.unit != BLOCKS):
                    continue
                gathers = p.op == "all_gather"
                if not (moves.gather_each if gathers else moves.reduce_each and share.trained):
                    continue
                elements = share.elements * p.times * (form.rows / share.rows if p.unit == BLOCKS else 1)
                if gathers:
                    one = call(p.op, 1, share.received, share.axes, sizes, {})
                    nbytes = one.wire_bytes * elements
                else:
                    size = elements * share.parts / p.calls
                    one = call(p.op, size, options.precision.reduce, share.axes, sizes, options.grad_sync.reduction)
                    nbytes = one.wire_bytes * one.messages * p.calls
                what = "parameters" if gathers else "gradients"
                key = (p.unit, *place, one.op, share.axes, share.parts, p.phase, what)
                found[key, 0] += nbytes
                found[key, 2] += p.calls * one.messages
            for a in microbatch.activations:
                if count != counts[0] and a.unit != BLOCKS:
                    continue
                size = 1
                for axis in a.axes:
                    size *= sizes[axis]
                key = (a.unit, *place, a.op, a.axes, size, a.phase, "activations")
                found[key, 0] += wire_bytes(a.op, a.fixed, size) * a.calls
                found[key, 1] += wire_bytes(a.op, a.row, size) * a.calls
                found[key, 2] += a.calls
    keys = dict.fromkeys(key for key, _ in found)
    return [Each(*key, *(found[key, i] for i in range(3))) for key in keys], h


def _all_runs(each: list[Each], runs: Runs, samples: int) -> list[Sent]:
    found = []
    for one in each:
        times = runs.blocks[one.count] if one.unit == BLOCKS else runs.units[one.unit]
        factor = one.calls * (runs.second if one.second else 1)
        nbytes = (one.fixed + one.sample * samples) / one.calls
        calls = tuple(factor * each for each in times)
        found.append(Sent(one.op, one.axes, one.size, nbytes, calls, one.phase, one.what))
    return found


def _between_stages(runs: Runs, nbytes: float, stages: int) -> list[Sent]:
    """What stages send to the next, and to the one before, after each tick."""
    if stages == 1:
        return []
    calls = [tuple(runs.ticks * (runs.ring or stage != end) for stage in range(stages)) for end in (stages - 1, 0)]
    return [
        Sent("ppermute", ("pipe",), stages, nbytes, times, phase, "activations")
        for times, phase in zip(calls, ("forward", "backward"), strict=True)
    ]


def _traced(config: Config) -> list[Sent]:
    """What a step sends, by the ledger of the traced step."""
    mesh = planned_mesh(config)
    parts, batch = with_teacher(assemble(config, mesh), batch_of(config, mesh))
    found = ledger(parts.step, parts.target, batch).collectives
    return [
        Sent(each.op, each.axes, each.group_size, each.wire_bytes / each.calls, each.stages, each.phase, each.purpose)
        for each in found
    ]
