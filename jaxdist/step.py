"""The train step, from a batch to a new state. A reader who knows this file knows jaxdist.

Manual region: one `jax.shard_map` over all mesh axes: gather -> forward -> backward -> reduce, as the source says it.
Global region: plain `jax.jit` on whole arrays: scaling, clipping and the optimizer, with explicit `out_shardings`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import claim_replicated, stack, stacked_specs, to_varying
from jaxdist.config.entries import ScheduleFacts
from jaxdist.mesh import BATCH_LIKE, AnyMesh, on_cpu
from jaxdist.model import ModelDef, model_figures, rules_of, specs_of_params
from jaxdist.optim import leave_out, norm_without, only_trained
from jaxdist.parallel.compose import check_placed, get_schedule, get_strategy
from jaxdist.parallel.grad_sync import check_update, divide, sum_totals
from jaxdist.parallel.microbatch import check_batch_shape, sample_keys, split_microbatches, with_seed
from jaxdist.parallel.options import StepOptions, make_options
from jaxdist.parallel.program import check_axes, program_and_region
from jaxdist.parallel.schedule import Schedule, UserLoss, loss_seed
from jaxdist.parallel.strategy import Strategy
from jaxdist.precision.loss_scale import guard_metrics, is_finite, is_halted, next_guard, scale_of, times
from jaxdist.specs import STACKED, PyTree, active_specs, batch_spec
from jaxdist.state import TrainState, advanced, check_state, shardings_of, specs_of_arrays, updated
from jaxdist.train_step import Metrics, TrainStep, jit_step


def make_gradients(
    model: ModelDef | UserLoss,
    mesh: AnyMesh,
    options: StepOptions,
    strategy: Strategy,
    schedule: Schedule,
    *,
    specs: PyTree,
    lost: PyTree,
) -> Callable[[TrainState, PyTree], tuple[dict[str, Any], PyTree, PyTree, PyTree]]:
    """(state, batch) -> ({"loss": (sum, weight), ...}, gradients of the mean loss, residual, model_state).

    specs: of the parameters. lost: of the residual.
    """
    is_model, precision, sync = isinstance(model, ModelDef), options.precision, options.grad_sync
    program, region_of = program_and_region(model, strategy, specs, mesh, options)
    trained = leave_out(specs, options.freeze)

    def gradients(state: TrainState, batch: PyTree) -> tuple[dict[str, Any], PyTree, PyTree, PyTree]:
        rule = precision.scale_rule
        scale = scale_of(state.guard, rule)

        def region(params: PyTree, residual: PyTree, carried: PyTree, batch: PyTree, step: Any, scale: Any) -> Any:
            keys = sample_keys(options.seed, step, jax.tree.leaves(batch)[0].shape[0])
            batch = {**batch, "keys": keys} if is_model else {"batch": batch, "keys": keys}
            diff, captured = strategy.begin(params, specs, STACKED if is_model else None)
            captured = captured if is_model else (captured, carried)
            parts = split_microbatches(to_varying(batch, BATCH_LIKE), options.microbatches)
            seed, factor = loss_seed(program, diff, captured, parts), 1.0 if rule is None else scale
            whole = seed * factor
            loss, weight, grads, extra = schedule(
                program, diff, captured, with_seed(program, parts, whole), seed=whole, reduce_dtype=precision.reduce
            )
            metrics, carried = program.settle(extra, carried)
            # The residual is stored unscaled, because the scale moves.
            grads, residual = strategy.reduce(grads, times(residual, factor), specs)
            totals = sum_totals({"loss": (loss, weight), **metrics}, sync)
            return totals, totals["loss"][1] * seed, stack(trained, grads), times(residual, 1 / factor), carried

        run = region_of(
            region,
            mesh=mesh,
            in_specs=(active_specs(specs, mesh), lost, P(), batch_spec(mesh), P(), P()),
            out_specs=(P(), P(), stacked_specs(trained, mesh), lost, P()),
        )
        own = state.params, state.residual, state.model_state
        totals, divisor, grads, residual, carried = run(*own, batch, state.step, scale)
        grads = claim_replicated(grads, trained, mesh)
        # The weight of the whole global batch, once, at the end: exact for ragged and masked batches.
        grads = divide(grads, times(divisor, scale), precision.param, deterministic=sync.deterministic)
        return totals, grads, residual, carried

    return gradients


def make_train_step(
    model: ModelDef | UserLoss,
    optimizer: optax.GradientTransformation,
    mesh: AnyMesh,
    options: StepOptions | None = None,
    **keywords: Any,
) -> TrainStep:
    """A train step for a `ModelDef`, or for your own loss_fn(params, batch, keys) -> (loss sum, weight sum).

    Batches are pytrees of arrays [B, ...], B divisible by data * fsdp * microbatches. keys: a random key a sample. The
    gradient is that of sum / weight over the global batch, the same in every layout. A step that is not finite changes
    nothing but the guard. A loss returns the sum over THESE rows, of one device and microbatch, and the weight of these
    rows: a term of parameters or `batch_mean`s alone is multiplied by it: `x.shape[0] * term`. See docs/own_loss.md.

    options, keywords: a `StepOptions`, or its fields: make_train_step(model, adamw, mesh, strategy="zero3"). Raises
        `UserError` for what does not fit together.

    >>> loss = lambda params, batch, keys: (((batch @ params["w"]) ** 2).sum(), batch.shape[0])
    >>> jaxdist.make_train_step(loss, optax.sgd(0.1), jaxdist.make_mesh(fsdp=8), strategy="zero3")
    TrainStep(strategy='zero3', mesh: fsdp=8, schedule='accumulate', microbatches=1, precision='fp32', not compiled yet)
    """
    check_axes(model, mesh)
    options = make_options(options, keywords).on(mesh)
    policy, sync, schedule = options.precision, options.grad_sync, get_schedule(options.schedule)
    one_pass = options.microbatches == 1 and ScheduleFacts.of(options.schedule).one_backward_pass
    strategy = get_strategy(options, once=isinstance(model, ModelDef) and one_pass)
    rules, norm = rules_of(model), norm_without(rules_of(model), ordered=sync.deterministic)
    optimizer = only_trained(optimizer, options.freeze, rules, rounded=sync.deterministic)

    def build(state: TrainState) -> Any:
        check_state(state, mesh, policy.param)
        check_placed(state, model, strategy, mesh, options)
        check_update(optimizer, state.params, state.opt_state, state.residual, sync=sync)
        specs, lost, layout = specs_of_params(model, state.params), specs_of_arrays(state.residual), shardings_of(state)
        gradients = make_gradients(model, mesh, options, strategy, schedule, specs=specs, lost=lost)

        def step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
            check_batch_shape(batch, mesh, options, named=isinstance(model, ModelDef))
            totals, grads, residual, carried = gradients(state, batch)
            means = {name: jnp.where(weight != 0, total / weight, 0) for name, (total, weight) in totals.items()}
            metrics: Metrics = {"loss": means.pop("loss"), "weight": totals["loss"][1], "grad_norm": norm(grads)}
            finite, halted = is_finite(metrics["loss"], metrics["grad_norm"]), is_halted(state.guard, options.max_skips)
            taken, guard = finite & ~halted, next_guard(state.guard, finite, policy.scale_rule)
            seen = state._replace(model_state=carried)
            params, opt_state = updated(
                optimizer, grads, seen, taken=taken, branch=on_cpu(mesh), shardings=layout.params
            )
            new = TrainState(state.step + 1, params, opt_state, residual, guard, carried)
            state = advanced(state, new, taken=taken, halted=halted)
            metrics |= guard_metrics(state.guard, policy.scale_rule) | {"own": means | model_figures(model, grads)}
            return state, metrics | ({"grads": grads} if options.return_grads else {})

        names = ("loss", "weight", "grad_norm", "own", *guard_metrics(state.guard, policy.scale_rule))
        outputs = dict.fromkeys(names, NamedSharding(mesh, P()))
        outputs |= {"grads": leave_out(layout.params, options.freeze)} if options.return_grads else {}
        return jit_step(step, state, (layout, outputs), mesh, options)

    return TrainStep(build, mesh, options)
