"""Put a model and a strategy together into the `Program` that schedules run."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.collectives import active_axes, psum
from jaxdist.config.rules.collective_matmul import check_collective_matmul, check_conditions
from jaxdist.config.rules.mesh import check_axis
from jaxdist.config.rules.pipeline import refuse_stages
from jaxdist.config.rules.remat import Remat, check_deterministic, check_prefetched, check_unrolled
from jaxdist.errors import UserError
from jaxdist.nn import ModelDef
from jaxdist.parallel.blocks.branch import Choose, by_condition, by_mask, typed_like
from jaxdist.parallel.blocks.layers import Block, Blocks, Gather, Stack, rounds_of
from jaxdist.parallel.blocks.prefetch import prefetched
from jaxdist.parallel.blocks.prefetch_embed_head import Ends, Riders, only_read
from jaxdist.parallel.blocks.remat import BLOCK_INPUT, after, rematerialise
from jaxdist.parallel.blocks.sqrt_remat import Segments, segmented
from jaxdist.parallel.pipeline.run import blocks_of_chunk, on_first_stage, relay
from jaxdist.parallel.schedule import Program, Stages
from jaxdist.parallel.strategy import Strategy, regathers
from jaxdist.parallel.wrappers.reduce_in_backward import reduced_behind
from jaxdist.precision.autocast import autocast
from jaxdist.precision.policy import Precision
from jaxdist.specs import STACKED, PyTree, only, unit_specs

EMBED_LAYER = 0  # what is folded into dropout keys; block i folds i + 1


def isolate(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with barriers around it, forward and backward: the compiler fuses nothing in it with what is
    outside, which differs from layout to layout and would round differently."""

    def fence(tree: PyTree) -> PyTree:
        floats = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)  # noqa: E731
        return jax.tree.map(lambda leaf: lax.optimization_barrier(leaf) if floats(leaf) else leaf, tree)

    return lambda *arguments: fence(function(*fence(arguments)))


def in_precision(model: ModelDef, precision: Precision) -> ModelDef:
    """The model, whose units cast operation by operation where the policy says so. Raises `UserError` unless model and
    policy agree on float8."""
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
    embed, block, head, logits = (
        autocast(unit, precision.compute) for unit in (model.embed, model.block, model.head, model.logits)
    )
    return model._replace(embed=embed, block=block, head=head, logits=logits)


def _use(
    strategy: Strategy,
    specs: PyTree,
    units: PyTree,
    name: str,
    diff: PyTree,
    held: PyTree,
    wanted: PyTree | None = None,
) -> PyTree:
    """A unit, usable; or what is wanted of it."""
    with jax.named_scope(name):
        if wanted is not None:
            return strategy.gather(only(wanted, diff), only(wanted, held), only(wanted, units[name]))
        if name == STACKED and (reduce_block := strategy.reduce_block) is not None:
            diff = reduced_behind(diff, lambda grads: reduce_block(grads, specs[STACKED]))
        return strategy.gather(diff, held, units[name])


def _run(isolated: bool, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    with jax.named_scope(name):
        return (isolate(function) if isolated else function)(*arguments)


def _check(model: ModelDef, remat: Remat, *, isolated: bool, prefetch: int) -> None:
    """Raise `UserError` for what does not go together."""
    if prefetch:
        check_prefetched(remat)
    if isolated:
        check_deterministic(remat)
    check_unrolled(model.scan_blocks, remat, prefetch=prefetch, deterministic=isolated)
    if prefetch and model.stages:
        refuse_stages("parallel.prefetch: 1", allowed="0")


def _block_of(model: ModelDef, *, conditions: bool) -> Callable[..., Any]:
    """The model's block. Raises `UserError` where it would send by `ppermute` in a condition."""
    if model.collective_matmul:
        check_conditions(pipeline_cond=conditions and bool(active_axes("pipe")))
    return model.block


def _check_axes(model: ModelDef) -> None:
    _block_of(model, conditions=True)  # `relay` has one, whatever is asked of the schedules
    if active_axes("context"):  # would be the same work twice
        check_axis("context", lax.axis_size("context"))


def make_program(
    model: ModelDef,
    strategy: Strategy,
    specs: PyTree,
    *,
    remat: Remat,
    isolated: bool = False,
    prefetch: int = 0,
    reduce_dtype: Any = None,
    conditions: bool = True,
) -> Program:
    """The model's loss on trees (diff, held) as the strategy's `begin` makes them.

    Microbatches: dicts of arrays [b, ...] with "keys", one dropout key a sample. See `isolate`, `prefetched`, `Stages`.
    """
    _check(model, remat, isolated=isolated, prefetch=prefetch)
    units = unit_specs(specs)
    use, run = functools.partial(_use, strategy, specs, units), functools.partial(_run, isolated)

    def again(specs: PyTree) -> bool:  # isolated: what is kept must not depend on the layout either
        return isolated or regathers(strategy, specs)

    def embed_unit(diff: PyTree, held: PyTree, batch: PyTree) -> jax.Array:
        return run("embed", model.embed, use("embed", diff, held), batch, _fold(batch["keys"], EMBED_LAYER))

    embed_unit = rematerialise(embed_unit, remat, gathers=again(units["embed"]), in_scan=False)
    gather = functools.partial(use, "blocks")
    choose = (by_condition if conditions else by_mask) if model.stages else None

    def block(params: PyTree, h: jax.Array, layer: jax.Array, keys: PyTree) -> jax.Array:
        return run("blocks", _block_of(model, conditions=conditions), params, h, _fold(keys, layer))

    stack = _make_stack(gather, block, remat, gathers=again(units["blocks"]), choose=choose, unroll=model.scan_blocks)

    def embed(diff: PyTree, held: PyTree, batch: PyTree) -> jax.Array:
        return embed_unit(diff["embed"], held["embed"], batch)

    def blocks(diff: PyTree, held: PyTree, h: jax.Array, batch: PyTree, chunk: jax.Array | int) -> jax.Array:
        own = blocks_of_chunk(diff["blocks"], held["blocks"], chunk, chunks=model.chunks, counts=model.stages)
        return stack(*own, h, batch["keys"])

    def head(diff: PyTree, held: PyTree, h: jax.Array, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        # Not rematerialised, whatever `remat`: its backward pass is the next thing that a device does, so that nothing
        # is kept meanwhile, and computing or gathering again would save no memory.
        own, table = use("head", diff["head"], held["head"]), None
        if model.tied:
            gather_table = functools.partial(use, "embed", *after(h, (diff["embed"], held["embed"])))
            table = only_read(gather_table, model.head, own, h, batch) if strategy.drops else gather_table()
        found: tuple[jax.Array, jax.Array] = run("head", model.head, own, table, h, batch)
        return found

    def hidden(diff: PyTree, held: PyTree, batch: PyTree) -> jax.Array:
        _check_axes(model)
        return relay(lambda h, chunk: blocks(diff, held, h, batch, chunk), embed(diff, held, batch), model.chunks)

    def loss(diff: PyTree, held: PyTree, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        return on_first_stage(lambda h: head(diff, held, h, batch), hidden(diff, held, batch))

    if prefetch:
        apart = functools.partial(_use, strategy._replace(reduce_block=None), specs, units, STACKED)
        ends = Ends(model, strategy, units, use, embed, head, run)
        loss = _ahead(ends, functools.partial(_prefetched, apart, block, remat, reduce_dtype, _sums(strategy, specs)))

    head_units = ("head", "embed") if model.tied else ("head",)
    staged = _staged_blocks(gather, block, remat, choose, unroll=model.scan_blocks)
    stages = Stages(embed, head, staged, head_units, model.chunks, model.stages, conditions)
    return Program(loss, hidden, None if prefetch or remat == "offload" else stages)


def _sums(strategy: Strategy, specs: PyTree) -> Callable[[PyTree], PyTree] | None:
    """What sums a block's gradients over the devices that its reduction leaves out."""
    reduce_block = strategy.reduce_block
    if reduce_block is None:
        return None

    def sums(grads: PyTree) -> PyTree:
        with jax.named_scope(STACKED):
            return reduce_block(grads, specs[STACKED])

    return sums


def _ahead(ends: Ends, make_stack: Callable[[Riders], Callable[..., Any]]) -> Callable[..., Any]:
    """The loss of a model whose communication runs ahead of its computation."""

    def loss(diff: PyTree, held: PyTree, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        _check_axes(ends.model)
        h = ends.embedded(diff, held, batch)
        riders, riding, head = ends.riders(diff, held, h, batch)
        own = blocks_of_chunk(diff["blocks"], held["blocks"], 0, chunks=1, counts=())
        h, rode = make_stack(riders)(*own, h, batch["keys"], riding)
        return head(rode, h)

    return loss


def _prefetched(
    gather: Gather, block: Block, remat: Remat, reduce_dtype: Any, sums: Any, riders: Riders
) -> Callable[..., Any]:
    assert reduce_dtype is not None, "needed with prefetch"
    inner, last = (rematerialise(block, remat, gathers=True, in_scan=in_scan) for in_scan in (True, False))
    return prefetched(gather, inner, last, block, riders, reduce_dtype, sums)


_fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))


def _make_stack(
    gather: Gather, block: Block, remat: Remat, *, gathers: bool, choose: Choose | None, unroll: int
) -> Stack:
    """All blocks one after the other. gathers: see `rematerialise`; choose, unroll: see `Blocks`."""
    if remat == "sqrt":
        return segmented(Segments(Blocks(gather, block, choose)))

    def unit(diff: PyTree, held: PyTree, h: jax.Array, layer: jax.Array, keys: PyTree) -> jax.Array:
        h = checkpoint_name(h, BLOCK_INPUT) if remat == "offload" else h
        return block(gather(diff, held, None), h, layer, keys)

    # Without a loop the compiler would merge the recomputation with the first run.
    run = rematerialise(unit, remat, gathers=gathers, in_scan=unroll == 1)

    def stack(diff: PyTree, held: PyTree, layers: jax.Array, h: jax.Array, keys: PyTree) -> jax.Array:
        def body(h: jax.Array, own: PyTree) -> tuple[jax.Array, None]:
            diff, held, layer = own
            work = lambda: run(diff, held, h, layer, keys)  # noqa: E731
            return work() if choose is None else choose(layer > 0, lambda: typed_like(work(), h), lambda: h), None

        return lax.scan(body, h, (diff, held, layers), unroll=rounds_of(unroll, len(layers)))[0]

    return stack


def _staged_blocks(
    gather: Gather, block: Block, remat: Remat, choose: Choose | None, *, unroll: int
) -> Blocks | Segments:
    """Forward and backward pass of a pipeline's stage."""
    if remat == "sqrt":
        return Segments(Blocks(gather, block, choose))
    inner = rematerialise(block, remat, gathers=True, in_scan=unroll == 1, constants=False)
    return Blocks(gather, inner, choose, unroll)


def make_logits(model: ModelDef, strategy: Strategy, specs: PyTree) -> Callable[..., jax.Array]:
    """(params at rest, batch [b, S], position) -> logits of the token after `position`, [b, vocabulary]. For
    sampling."""
    units, program = unit_specs(specs), make_program(model, strategy, specs, remat="none")
    hidden = program.hidden
    assert hidden is not None

    def logits(params: PyTree, batch: PyTree, position: jax.Array) -> jax.Array:
        diff, held = strategy.begin(params, specs, STACKED)
        h = hidden(diff, held, batch)
        h = lax.dynamic_slice_in_dim(h, position, 1, axis=1)  # the head sees one position: no [b, S, vocabulary]
        tied = strategy.gather(diff["embed"], held["embed"], units["embed"]) if model.tied else None
        params = strategy.gather(diff["head"], held["head"], units["head"])
        return psum(on_first_stage(lambda h: model.logits(params, tied, h)[:, 0], h), "pipe")

    return logits
