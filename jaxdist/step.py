"""The train step, from a batch to a new state. A reader who knows this file knows jaxdist.

Manual region: one `jax.shard_map` over all mesh axes: gather -> forward -> backward -> reduce, as the source says it.
Global region: plain `jax.jit` on whole arrays: scaling, clipping and the optimizer, with explicit `out_shardings`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist import registry
from jaxdist.collectives import claim_replicated, stack, stacked_specs, to_varying
from jaxdist.mesh import BATCH_LIKE, AnyMesh, on_cpu
from jaxdist.nn import ModelDef
from jaxdist.optim import global_norm, leave_out, only_trained, ordered_norm, with_rounded_products
from jaxdist.parallel.blocks.prefetch import compiler_options
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.grad_sync import GradSync, check_sync, check_update, divide, order_of_work, sum_totals
from jaxdist.parallel.microbatch import check_batch_shape, sample_keys, split_microbatches
from jaxdist.parallel.schedule import Schedule
from jaxdist.parallel.strategy import Strategy, StrategyOptions
from jaxdist.parallel.user_loss import ForeignLoss, program_and_region
from jaxdist.parallel.wrappers.freeze import freezing
from jaxdist.parallel.wrappers.reduce_in_backward import overlapping
from jaxdist.precision.loss_scale import guard_metrics, is_finite, is_halted, next_guard, scale_of, times
from jaxdist.precision.policy import Precision, check_float8, make_precision
from jaxdist.specs import STACKED, PyTree, batch_spec
from jaxdist.state import TrainState, advanced, check_state, shardings_of, specs_of_arrays, updated
from jaxdist.train_step import Metrics, TrainStep

DEFAULT_SYNC = GradSync()


def make_gradients(
    model: ModelDef | ForeignLoss,
    mesh: AnyMesh,
    specs: PyTree,
    lost: PyTree,
    strategy: Strategy,
    schedule: Schedule,
    *,
    microbatches: int,
    options: StrategyOptions,
    remat: str | Sequence[str],
    seed: int,
    trained: PyTree,
) -> Callable[[TrainState, PyTree], tuple[jax.Array, jax.Array, PyTree, PyTree]]:
    """(state, batch) -> (loss sum, weight sum, gradients of the mean loss, residual). lost: the residual's specs;
    trained: those of the gradients."""
    precision, sync = options.precision, options.sync
    program, region_of = program_and_region(model, strategy, specs, mesh, options, remat=remat)

    def gradients(state: TrainState, batch: PyTree) -> tuple[jax.Array, jax.Array, PyTree, PyTree]:
        # About 1 / tokens, so that sums stay near 1; a power of two, so that multiplying by it rounds nothing.
        loss_seed = 2.0 ** -math.ceil(math.log2(max(leaf.size for leaf in jax.tree.leaves(batch))))
        rule = precision.scale_rule
        scale = scale_of(state.guard, rule)

        def region(params: PyTree, residual: PyTree, batch: PyTree, step: jax.Array, scale: Any) -> tuple[Any, ...]:
            keys = sample_keys(seed, step, jax.tree.leaves(batch)[0].shape[0])
            batch = {**batch, "keys": keys} if isinstance(model, ModelDef) else {"batch": batch, "keys": keys}
            diff, held = strategy.begin(params, specs, STACKED if isinstance(model, ModelDef) else None)
            parts = split_microbatches(to_varying(batch, BATCH_LIKE), microbatches)
            factor = 1.0 if rule is None else scale
            whole = loss_seed * factor
            loss, weight, grads = schedule(program, diff, held, parts, seed=whole, reduce_dtype=precision.reduce)
            # The residual rests unscaled: the scale moves.
            grads, residual = strategy.reduce(grads, times(residual, factor), specs)
            totals = sum_totals(jnp.stack([loss, weight]), sync)
            return *totals, stack(trained, grads), times(residual, 1 / factor)

        run = region_of(
            region,
            mesh=mesh,
            in_specs=(specs, lost, batch_spec(mesh), P(), P()),
            out_specs=(P(), P(), stacked_specs(trained, mesh), lost),
        )
        loss, weight, grads, residual = run(state.params, state.residual, batch, state.step, scale)
        grads = claim_replicated(grads, trained, mesh)
        # The weight of the whole global batch, once, at the end: exact for ragged and masked batches.
        total = times(weight * loss_seed, scale)
        grads = divide(grads, total, precision.param, deterministic=sync.deterministic)
        return loss, weight, grads, residual

    return gradients


def make_train_step(
    model: ModelDef | ForeignLoss,
    optimizer: optax.GradientTransformation,
    mesh: AnyMesh,
    *,
    strategy: str = "ddp",
    schedule: str = "accumulate",
    microbatches: int = 1,
    precision: Precision | str = "fp32",
    seed: int = 0,
    remat: str | Sequence[str] = "none",
    grad_sync: GradSync = DEFAULT_SYNC,
    freeze: Sequence[str] = (),
    reshard_after_forward: bool = True,
    prefetch: int = 0,
    pipeline_cond: bool = True,
    max_skips: int = 10,
    return_grads: bool = False,
) -> TrainStep:
    """A train step for a `ModelDef`, or for your own loss_fn(params, batch, keys) -> (loss sum, weight sum).

    Batches are pytrees of arrays [B, ...], B divisible by data * fsdp * microbatches; keys: a random key a sample. The
    gradient is that of sum / weight over the global batch, the same in every layout. freeze: patterns ("embed.*") of
    parameters that are not trained. reshard_after_forward: as in FSDP. prefetch, pipeline_cond: see `StrategyOptions`.
    A step that is not finite changes nothing but the guard; after more than max_skips of them in a row nothing changes
    any more. Raises `UserError` on what does not fit.
    """
    policy = make_precision(precision) if isinstance(precision, str) else precision
    check_sync(grad_sync, policy.reduce)
    options = StrategyOptions(
        policy, grad_sync, reshard_after_forward=reshard_after_forward, prefetch=prefetch, pipeline_cond=pipeline_cond
    )
    schedule, microbatches = order_of_work(grad_sync, mesh, schedule, microbatches)
    once = isinstance(model, ModelDef) and schedule == "accumulate" and microbatches == 1  # one backward pass
    placing = freezing(overlapping(get_strategy(strategy, options), options, once=once), freeze)
    optimizer = only_trained(with_rounded_products(optimizer) if grad_sync.deterministic else optimizer, freeze)
    run_schedule = registry.load("jaxdist.parallel.schedules", schedule, key="parallel.schedule")

    def build(state: TrainState) -> Any:
        check_state(state, mesh, policy.param)
        check_update(optimizer, state.params, state.opt_state, state.residual, sync=grad_sync)
        norm = ordered_norm if grad_sync.deterministic else global_norm
        specs = specs_of_arrays(state.params)
        gradients = make_gradients(
            model,
            mesh,
            specs,
            specs_of_arrays(state.residual),
            placing,
            run_schedule,
            microbatches=microbatches,
            options=options,
            remat=remat,
            seed=seed,
            trained=leave_out(specs, freeze),
        )

        def step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
            check_batch_shape(batch, mesh, microbatches)
            loss, weight, grads, residual = gradients(state, batch)
            metrics = {"loss": jnp.where(weight != 0, loss / weight, 0), "weight": weight, "grad_norm": norm(grads)}
            finite, halted = is_finite(metrics["loss"], metrics["grad_norm"]), is_halted(state.guard, max_skips)
            taken, guard = finite & ~halted, next_guard(state.guard, finite, policy.scale_rule)
            params, opt_state = updated(optimizer, grads, state, taken=taken, branch=on_cpu(mesh))
            new = TrainState(state.step + 1, params, opt_state, residual, guard)
            state = advanced(state, new, taken=taken, halted=halted)
            metrics |= guard_metrics(state.guard, policy.scale_rule) | ({"grads": grads} if return_grads else {})
            return state, metrics

        layout = shardings_of(state)
        names = ("loss", "weight", "grad_norm", *guard_metrics(state.guard, policy.scale_rule))
        outputs = dict.fromkeys(names, NamedSharding(mesh, P()))
        outputs |= {"grads": leave_out(layout.params, freeze)} if return_grads else {}
        settings = compiler_options(state.params, options, mesh)
        return jax.jit(
            step,
            donate_argnums=0,
            in_shardings=(layout, None),
            out_shardings=(layout, outputs),
            compiler_options=settings,
        )

    return TrainStep(build, lambda: check_float8(policy, mesh.devices.flat), on_cpu=on_cpu(mesh))
