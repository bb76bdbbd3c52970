"""The program of a model: the loss that schedules run, made of the model's units and a strategy.

diff, captured: the differentiated parameters, and those read without gradients; see `jaxdist.parallel.schedule`.

Modules that only some options need are imported where these options are read.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.collectives import active_axes
from jaxdist.config.rules.fields import check_argument
from jaxdist.config.rules.mesh import check_axis
from jaxdist.config.rules.overlap import check_collective_matmul
from jaxdist.config.rules.pipeline import refuse_stages
from jaxdist.config.rules.remat import Remat, check_deterministic, check_prefetched, check_unrolled
from jaxdist.errors import UserError
from jaxdist.mesh import AnyMesh, check_mesh
from jaxdist.model import ModelDef
from jaxdist.parallel.blocks.branch import by_condition, by_mask, typed_like
from jaxdist.parallel.blocks.layers import (
    BlockRows,
    BlockRunner,
    OneBlock,
    ScannedBlocks,
    blocks_per_round,
    differentiable,
)
from jaxdist.parallel.blocks.remat import BLOCK_INPUT, after, available, rematerialise
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.pipeline.relay import blocks_of_chunk, on_first_stage, relay
from jaxdist.parallel.schedule import Program, Stages, UserLoss
from jaxdist.parallel.strategy import Strategy
from jaxdist.parallel.units import EMBED_LAYER, Units, fold
from jaxdist.precision.policy import Precision
from jaxdist.specs import STACKED, PyTree, spec_axes, spec_leaves, unit_specs


def in_precision(model: ModelDef, precision: Precision) -> ModelDef:
    """The model, whose units cast operation by operation if the policy says so.

    Raises `UserError` unless model and policy agree on float8.
    """
    if precision.fp8 and not model.fp8:
        raise UserError(
            "precision: fp8, but no layer of the model multiplies in float8; build it with fp8=True, as in"
            " gpt(..., fp8=True) or MLP(..., fp8=True), or take bf16"
        )
    if model.fp8 and not precision.fp8:
        raise UserError("precision: layers of the model were built with fp8=True; allowed: fp8; or build it without")
    check_collective_matmul(model.collective_matmul, sequence_parallel=True, fp8=model.fp8, per_op=precision.per_op)
    if not precision.per_op:
        return model
    from jaxdist.precision.autocast import autocast

    names = ("embed", "block", "head", "logits", "metrics", "features", "cached")
    units: Any = {name: getattr(model, name) for name in names}
    units = {name: unit and autocast(unit, precision.compute) for name, unit in units.items()}
    return model._replace(**units)


def _check(model: ModelDef, options: StepOptions) -> None:
    """Raise `UserError` for options that exclude each other."""
    prefetch, deterministic = options.prefetch, options.grad_sync.deterministic
    if prefetch:
        check_prefetched(options.remat)
    if deterministic:
        check_deterministic(options.remat)
    check_unrolled(model.scan_blocks, options.remat, prefetch=prefetch, deterministic=deterministic)
    if prefetch and model.stages:
        refuse_stages("parallel.prefetch: 1", allowed="0")
    if model.update_rules:
        from jaxdist.nn.param import check_rules

        check_rules(model.update_rules, options.grad_sync, options.precision.reduce)


def check_axes(model: ModelDef | UserLoss, mesh: AnyMesh, name: str = "model") -> None:
    """Raise `UserError` for no mesh, for what is no model (as a module of Flax, which has no loss), for another number
    of stages than the model's, and for an axis all of whose devices would do the same work. A loss of the user's own is
    asked when it is traced. name: the argument."""
    check_mesh(mesh)
    kinds = {f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in type(model).__mro__}
    own = callable(model) and not {"builtins.type", "flax.Module"} & kinds
    check_argument(name, model, isinstance(model, ModelDef) or own)
    if not isinstance(model, ModelDef):
        return
    if model.arranged is not None and model.arranged.stages != (pipe := mesh.shape["pipe"]):
        sizes = f"blocks={list(model.stages)}" if model.stages else f"chunks={model.chunks}"
        raise UserError(
            f"mesh.pipe: {pipe} is given, but the model was arranged for {model.arranged.stages} stages, with {sizes};"
            " give both the same"
        )
    used = {axis for spec in spec_leaves(model.specs) for axis in spec_axes(spec)}
    unused = (*(["context"] if model.context is None else []), *{"tensor"} - used)
    for axis in unused:
        check_axis(axis, mesh.shape[axis], unused=unused)


def program_and_region(
    model: ModelDef | UserLoss, strategy: Strategy, specs: PyTree, mesh: AnyMesh, options: StepOptions
) -> tuple[Program, Callable[..., Any]]:
    """The program of a model or of a user's loss, and the `shard_map` that it runs in: only a model's is checked."""
    if isinstance(model, ModelDef):
        options = replace(options, remat=available(options.remat, mesh))
        model = in_precision(model, options.precision)
        if options.batch_split > 1:
            from jaxdist.parallel.blocks.batch_split import in_halves

            model = model._replace(block=in_halves(model.block))
        return make_program(model, strategy, specs, options), jax.shard_map
    from jaxdist.parallel.user_loss import unchecked_region, user_program

    return user_program(model, strategy, specs, mesh, options), unchecked_region


def _check_own_positions(h: jax.Array, batch: PyTree) -> None:
    """Raise `UserError` for an embedding that gives all positions where each device of `context` has its own."""
    lengths = {leaf.shape[1] for leaf in jax.tree.leaves(batch) if leaf.ndim > 1}
    # A further leaf may be as long as a device's own positions: these are so many times as many in the batch.
    if active_axes("context") and h.ndim > 1 and lengths & {(n := h.shape[1]), n * lax.axis_size("context")} == {n}:
        raise UserError(
            f"embed: gives all {h.shape[1]} positions of a sample, and each device of context has its own; take these"
            " in embedding and head by jaxdist.nn.own_context(batch['inputs'], dim=1)"
        )


def make_program(model: ModelDef, strategy: Strategy, specs: PyTree, options: StepOptions | None = None) -> Program:
    """The program of a model. Its microbatches are dicts of arrays [b, ...]; "keys" holds a dropout key per sample.

    options: None for a program that is not differentiated.
    """
    options = options or StepOptions()
    _check(model, options)
    isolated, conditions = options.grad_sync.deterministic, options.pipeline_cond
    units = Units(model, strategy, unit_specs(specs), specs[STACKED], isolated, conditions)
    choose = by_condition if conditions else by_mask
    one = OneBlock(units.gather_block, units.run_block, choose if model.stages else None)
    runner: BlockRunner
    if options.remat == "sqrt":
        from jaxdist.parallel.blocks.sqrt_remat import SegmentedBlocks

        runner = SegmentedBlocks(one)
        run_blocks = differentiable(runner)
    else:
        unroll = 1 if model.scan_blocks is None else model.scan_blocks
        # A pipeline keeps the residuals of several microbatches: no parameters among them, and no constants.
        kept = rematerialise(one.block, options.remat, gathers=True, in_scan=unroll == 1, constants=False)
        runner = ScannedBlocks(one._replace(block=kept), unroll)
        run_blocks = _scan_blocks(one, options.remat, gathers=units.gathers_again(STACKED), unroll=unroll)

    def embed(diff: PyTree, captured: PyTree, batch: PyTree) -> jax.Array:
        with jax.named_scope("embed"):
            params = strategy.gather(diff, captured, units.specs["embed"])
        h: jax.Array = units.run("embed", model.embed, params, batch, fold(batch["keys"], EMBED_LAYER))
        _check_own_positions(h, batch)
        return h

    embed = rematerialise(embed, options.remat, gathers=units.gathers_again("embed"), in_scan=False)
    head = functools.partial(_run_head, units)

    def through(diff: PyTree, captured: PyTree, h: jax.Array, batch: PyTree) -> jax.Array:
        units.check_conditions(inside=True)  # `relay` has a condition, whatever the option says about schedules

        def run(h: jax.Array, chunk: jax.Array | int) -> jax.Array:
            rows = blocks_of_chunk(diff[STACKED], captured[STACKED], chunk, chunks=model.chunks, counts=model.stages)
            return run_blocks(rows, h, model.read_by_blocks(batch))

        return relay(run, h, model.chunks)

    def hidden(diff: PyTree, captured: PyTree, batch: PyTree) -> jax.Array:
        return through(diff, captured, embed(diff["embed"], captured["embed"], batch), batch)

    def loss(diff: PyTree, captured: PyTree, batch: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        h = through(diff, captured, embed(diff["embed"], captured["embed"], batch), batch)
        return *on_first_stage(lambda h: head(diff, captured, h, batch), h), ()

    if options.prefetch:
        loss = _prefetched_loss(units, embed, head, options)
    stages = Stages(embed, head, runner, model.read_by_blocks, units.head_units, model.chunks, model.stages, conditions)
    whole = options.prefetch or options.remat == "offload"
    return Program(loss, hidden, None if whole else stages, model.weighs_rows)


def _run_head(units: Units, diff: PyTree, captured: PyTree, h: jax.Array, batch: PyTree) -> tuple[jax.Array, jax.Array]:
    """(loss sum, weight sum).

    The head is not rematerialised, whatever `remat` says. Its backward pass follows at once, so that nothing is kept
    for long; to compute or gather again would save no memory.
    """
    params, table = units.gather("head", diff["head"], captured["head"]), None
    if units.model.tied:
        diff, captured = after(h, (diff["embed"], captured["embed"]))
        gather = functools.partial(units.gather, "embed", diff, captured)
        if units.strategy.drops:
            from jaxdist.parallel.blocks.prefetch_embed_head import only_read

            table = only_read(gather, units.model.head, params, h, batch)
        else:
            table = gather()
    return units.run_head(params, table, h, batch)


def _prefetched_loss(
    units: Units, embed: Callable[..., Any], head: Callable[..., Any], options: StepOptions
) -> Callable[..., tuple[jax.Array, jax.Array, PyTree]]:
    """The loss of a model whose blocks are gathered ahead: see `PrefetchedBlocks`."""
    from jaxdist.parallel.blocks.prefetch import PrefetchedBlocks
    from jaxdist.parallel.blocks.prefetch_embed_head import embed_ahead, slice_head

    reduce_block, sums = units.strategy.reduce_block, None
    if reduce_block is not None:
        # The runner sums a block's gradients itself: after their reduction, beside another block.
        sums = jax.named_scope(STACKED)(lambda grads: reduce_block(grads, units.stacked))
    gather = units._replace(strategy=units.strategy._replace(reduce_block=None)).gather_block
    in_loop, outside = (
        rematerialise(units.run_block, options.remat, gathers=True, in_scan=loop) for loop in (True, False)
    )

    def loss(diff: PyTree, captured: PyTree, batch: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        units.check_conditions(inside=True)
        h = embed_ahead(units, embed, diff["embed"], captured["embed"], batch)
        slices, sliced, loss_after = slice_head(units, head, diff, captured, h, batch)
        rows = blocks_of_chunk(diff[STACKED], captured[STACKED], 0, chunks=1, counts=())
        runner = PrefetchedBlocks(
            OneBlock(gather, in_loop),
            OneBlock(gather, outside),
            units.run_block,
            slices,
            options.precision.reduce,
            sums,
        )
        h, whole = differentiable(runner)(rows, (h, sliced), units.model.read_by_blocks(batch))
        return *loss_after(whole, h), ()

    return loss


def _scan_blocks(one: OneBlock, remat: Remat, *, gathers: bool, unroll: int) -> Callable[..., jax.Array]:
    """The function (rows, h, dropout keys) -> h of one stage. gathers: see `rematerialise`. unroll: `ScannedBlocks`.

    JAX differentiates the scan over blocks itself. It keeps a copy of what a block reads of its parameters, unless
    these are gathered again; the runners of a pipeline, whose blocks wait longer for their backward pass, keep none.
    """

    def block(diff: PyTree, captured: PyTree, h: jax.Array, layer: jax.Array, keys: PyTree) -> jax.Array:
        h = checkpoint_name(h, BLOCK_INPUT) if remat == "offload" else h
        return one.block(one.gather(diff, captured, None), h, layer, keys)

    # Without a loop XLA would merge the recomputation with the first run.
    run = rematerialise(block, remat, gathers=gathers, in_scan=unroll == 1)

    def run_blocks(rows: BlockRows, h: jax.Array, keys: PyTree) -> jax.Array:
        def body(h: jax.Array, own: PyTree) -> tuple[jax.Array, None]:
            diff, captured, layer = own
            if one.choose is None:
                return run(diff, captured, h, layer, keys), None
            work = lambda: typed_like(run(diff, captured, h, layer, keys), h)  # noqa: E731
            return one.choose(layer > 0, work, lambda: h), None

        return lax.scan(body, h, tuple(rows), unroll=blocks_per_round(unroll, len(rows.layers)))[0]

    return run_blocks
