"""The inner step: every replica takes a step of its own on its rows. No collective has the mesh axis `data`.

It is the step of `jaxdist.step` with a leading dim of replicas: the manual region sums over all axes but `data`, and
the global region, where optimizer, norm, guard and loss scale are, runs for each replica by itself. Losses leave the
region apart, too: a sum of them would make all replicas wait for the slowest at every step.

Legend: R replicas, F fragments.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import claim_replicated, psum, stack, stacked_specs, to_varying
from jaxdist.errors import UserError
from jaxdist.local_sgd.state import REPLICAS, LocalState, apart, within
from jaxdist.mesh import BATCH_LIKE, AnyMesh
from jaxdist.model import ModelDef, model_figures
from jaxdist.optim import leave_out, norm_without, only_trained
from jaxdist.parallel.compose import check_placed, get_schedule, get_strategy
from jaxdist.parallel.grad_sync import check_update, divide
from jaxdist.parallel.microbatch import check_batch_shape, sample_keys, split_microbatches, with_seed
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.program import program_and_region
from jaxdist.parallel.schedule import loss_seed
from jaxdist.precision.loss_scale import guard_metrics, is_finite, is_halted, next_guard, scale_of
from jaxdist.specs import STACKED, PyTree, active_specs, batch_spec, marked_specs, without_idle
from jaxdist.state import TrainState, advanced, check_state, shardings_of, specs_of_arrays, updated
from jaxdist.train_step import Metrics, jit_step

# The axes over which one replica's loss and weight are summed.
SUMMED_OVER = tuple(axis for axis in BATCH_LIKE if axis != REPLICAS)
Gradients = Callable[[TrainState, PyTree], tuple[jax.Array, jax.Array, jax.Array, PyTree]]


def _own(tree: PyTree) -> PyTree:
    """The leaves of this device's replica, without their leading dim. In the manual region."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def make_local_gradients(model: ModelDef, mesh: AnyMesh, options: StepOptions, specs: PyTree) -> Gradients:
    """(state, batch) -> (loss sums [R], weights [R], divisors [R], sums of gradients [R, ...]).

    specs: of one replica's parameters. divisors: what the sums are divided by, but for the loss scale.
    """
    # Without sums in the backward pass, which would be over `data`; those within a replica's stack are none or cheap.
    strategy, schedule = get_strategy(options, once=False), get_schedule(options.schedule)
    program, shard_map = program_and_region(model, strategy, specs, mesh, options)
    precision, led = options.precision, apart(specs, mesh)
    trained, split = leave_out(led, options.freeze), without_idle(P(REPLICAS), mesh)

    def gradients(state: TrainState, batch: PyTree) -> tuple[jax.Array, jax.Array, jax.Array, PyTree]:
        rule = precision.scale_rule
        scale: Any = jnp.ones(mesh.shape[REPLICAS])
        scale = scale if rule is None else jax.vmap(lambda guard: scale_of(guard, rule))(state.guard)

        def region(params: PyTree, batch: PyTree, step: Any, scale: Any) -> Any:
            keys = sample_keys(options.seed, step, jax.tree.leaves(batch)[0].shape[0])
            diff, captured = strategy.begin(_own(params), specs, STACKED)
            parts = split_microbatches(to_varying({**batch, "keys": keys}, BATCH_LIKE), options.microbatches)
            seed = loss_seed(program, diff, captured, parts)
            whole = seed if rule is None else seed * scale[0]
            parts = with_seed(program, parts, whole)
            loss, weight, grads, _ = schedule(program, diff, captured, parts, seed=whole, reduce_dtype=precision.reduce)
            # The specs name `data`: `finish` sums over the other axes only.
            grads, _ = strategy.reduce(jax.tree.map(lambda grad: grad[None], grads), (), led)
            with jax.named_scope("loss_and_weight"):
                loss, weight = psum(to_varying(jnp.stack([loss, weight.astype(loss.dtype)]), BATCH_LIKE), SUMMED_OVER)
            return loss[None], weight[None], weight[None] * seed, stack(trained, grads)

        run = shard_map(
            region,
            mesh=mesh,
            in_specs=(active_specs(led, mesh), batch_spec(mesh), P(), split),
            out_specs=(split, split, split, stacked_specs(trained, mesh)),
        )
        loss, weight, divisor, grads = run(state.opt_state.params, batch, state.step, scale)
        grads = claim_replicated(grads, trained, mesh)
        return loss, weight, divisor if rule is None else divisor * scale.astype(divisor.dtype), grads

    return gradients


def _make_update(model: ModelDef, optimizer: optax.GradientTransformation, options: StepOptions) -> Callable[..., Any]:
    """The global region of one replica: (its state, loss sum, weight, divisor, gradients) -> (state, (weight, loss) if
    the step was taken, metrics)."""
    policy = options.precision

    def update(state: TrainState, loss: jax.Array, weight: jax.Array, divisor: jax.Array, grads: PyTree) -> Any:
        grads = divide(grads, divisor, policy.param, deterministic=False)
        mean = jnp.where(weight != 0, loss / weight, 0)
        metrics: Metrics = {
            "loss": mean,
            "weight": weight,
            "grad_norm": norm_without(model.update_rules, ordered=False)(grads),
        }
        finite, halted = is_finite(mean, metrics["grad_norm"]), is_halted(state.guard, options.max_skips)
        taken, guard = finite & ~halted, next_guard(state.guard, finite, policy.scale_rule)
        # Without shardings: a manual region of Muon's own cannot be run for all replicas at once.
        params, opt_state = updated(optimizer, grads, state, taken=taken, branch=False, shardings=None)
        new = TrainState(state.step + 1, params, opt_state, (), guard)
        state = advanced(state, new, taken=taken, halted=halted)
        counted = jnp.where(taken, weight, 0), jnp.where(taken, loss, 0)
        metrics |= guard_metrics(state.guard, policy.scale_rule) | {"own": model_figures(model, grads)}
        return state, counted, metrics

    return update


def make_inner_step(
    model: ModelDef, optimizer: optax.GradientTransformation, mesh: AnyMesh, options: StepOptions
) -> Callable[[TrainState], Any]:
    """state -> the compiled inner step of its layout, (state, batch) -> (state, metrics [R])."""
    optimizer, policy = only_trained(optimizer, options.freeze, model.update_rules), options.precision

    def build(state: TrainState) -> Any:
        own: LocalState = state.opt_state
        if not isinstance(own, LocalState):
            raise UserError(
                "state: is that of one model, as init_state makes it; allowed: that of replicas; give what"
                " jaxdist.local_sgd.step.init_local_state makes"
            )
        check_state(state, mesh, policy.param)
        check_placed(state, model, get_strategy(options), mesh, options)
        check_update(optimizer, state.params, own.opt_state, (), sync=options.grad_sync)
        specs = marked_specs(within(specs_of_arrays(own.params)), model.specs)
        gradients = make_local_gradients(model, mesh, options, specs)

        update = _make_update(model, optimizer, options)
        spmd = REPLICAS if mesh.shape[REPLICAS] > 1 else None
        places = TrainState(None, 0, 0, 0, 0, 0)  # of the leading dim; replicas share the count of steps
        each = jax.vmap(update, in_axes=(places, 0, 0, 0, 0), spmd_axis_name=spmd)

        def step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
            check_batch_shape(batch, mesh, options, named=True)
            own = state.opt_state
            replicas = TrainState(state.step, own.params, own.opt_state, (), state.guard)
            new, (weight, loss), metrics = each(replicas, *gradients(state, batch))
            own = own._replace(
                params=new.params,
                opt_state=new.opt_state,
                tokens=own.tokens + weight[:, None].astype(own.tokens.dtype),
                losses=own.losses + loss[:, None].astype(own.losses.dtype),
            )
            state = state._replace(step=state.step + 1, opt_state=own, guard=new.guard)
            return state, metrics

        layout, split = shardings_of(state), NamedSharding(mesh, without_idle(P(REPLICAS), mesh))
        names = ("loss", "weight", "grad_norm", "own", *guard_metrics(state.guard, policy.scale_rule))
        outputs = dict.fromkeys(names, split)
        return jit_step(step, state, (layout, outputs), mesh, options)

    return build
