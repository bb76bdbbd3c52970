"""Forms of microbatches: what of a configuration decides what a microbatch sends, and the traces that tell it."""

import functools
from dataclasses import fields, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.build import form_of as context_form_of
from jaxdist.build import planned_mesh, step_options
from jaxdist.config.entries import ScheduleFacts
from jaxdist.config.schema import Config, MeshConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.model import ModelDef
from jaxdist.parallel.pipeline.run import run_ticks
from jaxdist.parallel.schedules.accumulate import accumulate
from jaxdist.parallel.strategies._moves import Moves
from jaxdist.plan.closed.leaves import Known, logits_chunk, model_key
from jaxdist.plan.closed.microbatch import Microbatch, in_a_stage, one_tick, trace_microbatch
from jaxdist.plan.closed.shares import Share
from jaxdist.plan.compiled.memory import batch_of
from jaxdist.precision.policy import precision_of
from jaxdist.specs import STACKED, Shard, shard_of


class Form(NamedTuple):
    """What a microbatch depends on, beside the model, the axes of layers and the keys of `_layers_key`.

    prefetch, pipeline: whether blocks are gathered ahead, and run by a pipeline.
    masked: whether stages compute what is not their work, too. halves: whether the backward pass is split.
    rows: of stacked blocks that are run together, if what they send is not so many times what one sends; else 1.
    samples: of a microbatch on one device, if what they send is not affine in their number; else 0.
    """

    prefetch: bool
    pipeline: bool
    masked: bool
    halves: bool
    rows: int
    samples: int


def form_of_step(config: Config, known: Known, layers: int, facts: ScheduleFacts, samples: int) -> Form:
    """The form of a step whose microbatches have so many samples on a device. layers: of the model's stack."""
    parallel, stages = config.parallel, config.mesh.pipe
    pipeline = facts.one_stage is False
    ring = config.mesh.context > 1 and stages > 1 and context_form_of(config) == "ring"
    prefetch = known.prefetches(config)
    apart = prefetch or config.memory.remat == "sqrt"
    largest = max(parallel.stages, default=layers // (stages * parallel.chunks))
    loss = (samples, config.data.seq_len, config.model.vocab, config.model.loss_chunk, config.precision, config.mesh)
    chunked = known.get(("chunked", *loss), lambda: _by_chunks(config, samples))
    whole = samples if chunked or _in_pieces(config) else 0
    masked = pipeline and (ring or not parallel.pipeline_cond)
    return Form(prefetch, pipeline, masked, facts.split_backward, largest if apart else 1, whole)


def _by_chunks(config: Config, samples: int) -> bool:
    """Whether the loss is computed in chunks of tokens that send other bytes than the whole: the last one is padded, or
    they run forward again in the backward pass, as in float16. (That others take more calls is left out.)"""
    if config.mesh.tensor == 1:
        return False
    chunk, tokens = logits_chunk(config, samples)
    return bool(chunk and (tokens % chunk or precision_of(config.precision).compute == jnp.float16))


def _in_pieces(config: Config) -> bool:
    moe = getattr(config.model, "moe", None)
    return moe is not None and moe.on and moe.dispatch == "capacity" and moe.pieces > 1


def microbatches_of(
    config: Config, known: Known, form: Form, shares: tuple[Share, ...], moves: Moves, count: int
) -> list[tuple[Microbatch, bool]]:
    """(what a microbatch of a configuration sends, whether in the second half of a split backward pass): one or two.

    count: of the rows that are run together, those that hold a block, if the others are skipped; else 0.
    """
    parallel, fsdp = config.parallel, config.mesh.fsdp
    least = parallel.min_shard_bytes
    # The size of `fsdp` does not matter where it splits the same parameters.
    for size, smallest in ((2 if fsdp % 2 == 0 or fsdp == 1 else fsdp, least if form.prefetch else 0), (fsdp, least)):
        alone = _one_microbatch(config, size, smallest, moves, form, rows=known.primes(config)[0])
        split = {leaf.name: shard_of(leaf.spec) for leaf in known.leaves(alone)}
        if all(_same(share, split[share.name], form) for share in shares):
            break
    kept = (config.memory.remat, parallel.reshard_after_forward, parallel.grad_sync.deterministic)
    key = (
        *model_key(alone),
        alone.mesh,
        smallest,
        alone.parallel.strategy,
        *kept,
        config.optimizer.frozen,
        form,
        count,
    )
    return known.get(("microbatch", *key), lambda: _traced(alone, known.model(alone), form, count))


def _one_microbatch(config: Config, fsdp: int, least: int, moves: Moves, form: Form, *, rows: int) -> Config:
    """A step of one microbatch and one stage, which gathers and reduces each parameter at each use.

    rows: of a device, where their number does not matter: a prime, by which the bytes of nothing else can be divided.
    """
    mesh, parallel = config.mesh, config.parallel
    own = moves.gather_each or form.prefetch  # which cuts a head that is gathered, and none that is whole
    strategy = parallel.strategy if own else "zero3"
    chunk = {} if form.samples or not hasattr(config.model, "loss_chunk") else {"loss_chunk": 0}
    known = {field.name for field in fields(config.model)}
    return replace(
        config,
        model=config.model.replace(**{key: value for key, value in chunk.items() if key in known}),
        data=replace(config.data, global_batch=(form.samples or rows) * fsdp * mesh.expert),
        mesh=MeshConfig(fsdp=fsdp, expert=mesh.expert, context=mesh.context, tensor=mesh.tensor),
        parallel=replace(
            parallel,
            strategy=strategy,
            schedule="accumulate",
            microbatches=1,
            chunks=1,
            stages=(),
            min_shard_bytes=least,
            prefetch=0,
            grad_sync=GradSync(deterministic=parallel.grad_sync.deterministic),
        ),
    )


def _same(share: Share, split: Shard | None, form: Form) -> bool:
    """Whether a parameter is split in the traced microbatch, or at least as in the step where it may be cut further."""
    if form.prefetch and share.unit != STACKED:
        return share.dim == (split and split.dim)
    return split is not None or not share.axes


def _traced(config: Config, model: ModelDef, form: Form, count: int) -> list[tuple[Microbatch, bool]]:
    def rows_of(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((form.rows, *leaf.shape[1:]), leaf.dtype)

    blocks = jax.tree.map(rows_of, model.shapes[STACKED])
    stages = (count,) if count else ()
    model = model._replace(shapes={**model.shapes, STACKED: blocks}, layers=form.rows, stages=stages)
    mesh = planned_mesh(config)
    options = replace(step_options(config, mesh), prefetch=int(form.prefetch), pipeline_cond=not form.masked)
    trace = functools.partial(trace_microbatch, model, options, mesh, batch_of(config, mesh))
    if not form.pipeline:
        return [(trace(accumulate), False)]
    if not form.masked:
        return [(trace(functools.partial(in_a_stage, halves=form.halves)), False)]
    ticks = [functools.partial(run_ticks, one_tick(places)) for places in range(3)]
    if not form.halves:
        return [(trace(ticks[0]), False)]
    both = trace(ticks[1])
    second = trace(ticks[2]).minus(both)
    return [(both.minus(second), False), (second, True)]
