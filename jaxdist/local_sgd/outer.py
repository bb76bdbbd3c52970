"""The outer step: replicas exchange how far they are from their anchor, and the anchor follows (Douillard et al. 2023).

It is a program of its own, of one fragment (all of the model, or some of its blocks: Douillard et al. 2025). In a
checked manual region each replica subtracts its parameters from the anchor. The mean of these differences over `data`,
weighed by the tokens that a replica has learned from, is what the outer optimizer takes for a gradient.

Legend: R replicas, F fragments.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import (
    all_reduce,
    all_reduce_with_feedback,
    claim_replicated,
    in_buckets,
    pmax,
    psum,
    stack,
    stacked_specs,
    to_varying,
)
from jaxdist.config.sections.local import LocalConfig
from jaxdist.local_sgd.state import REPLICAS, LocalState, apart, cut, cut_specs, paste, within
from jaxdist.mesh import AnyMesh, fetched, stored_like
from jaxdist.optim import apply_updates, global_norm
from jaxdist.parallel.options import StepOptions
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import PyTree, active_specs, without_idle
from jaxdist.state import TrainState, shardings_of, specs_of_arrays
from jaxdist.train_step import Metrics

ByName = dict[str, Any]
# [R] of the last inner step and of the round, in the order in which they are sent as one array.
SUMMED = ("weight", "losses", "tokens", "loss", "grad_norm")


def _exchange(delta: ByName, lost: ByName, local: LocalConfig, options: StepOptions) -> tuple[ByName, ByName]:
    """(means of the differences over replicas, errors of int8), in buckets. In the manual region."""
    algorithm, limit = local.algorithm, int(options.grad_sync.bucket_mb * 2**20)
    with jax.named_scope("gradients_of_the_outer_step"):
        if local.wire_dtype == "int8":
            both = functools.partial(all_reduce_with_feedback, axis=REPLICAS, op="mean", algorithm=algorithm)
            columns = [list(delta.values()), [lost[name][0] for name in delta]]
            means, errors = in_buckets(lambda x, y: both(x, y), *columns, limit=limit)
            return dict(zip(delta, means, strict=True)), {
                name: leaf[None] for name, leaf in zip(delta, errors, strict=True)
            }
        link = None if options.grad_sync.link == "auto" else options.grad_sync.link
        mean = functools.partial(
            all_reduce, axis=REPLICAS, op="mean", algorithm=algorithm, wire_dtype=local.wire_dtype, link=link
        )
        (means,) = in_buckets(lambda x: (mean(x),), list(delta.values()), limit=limit)
    return dict(zip(delta, means, strict=True)), lost


def _make_region(of: ByName, replicas: int, local: LocalConfig, options: StepOptions) -> Callable[..., Any]:
    """The manual region. of: the specs of one replica's leaves of the fragment."""

    def region(params: ByName, anchor: ByName, lost: ByName, sums: jax.Array, peaks: jax.Array) -> Any:
        with jax.named_scope("loss_and_weight"):
            totals, highest = psum(to_varying(sums, (REPLICAS,)), REPLICAS)[0], pmax(peaks, REPLICAS)[0]
        tokens, total = sums[0, SUMMED.index("tokens")], totals[SUMMED.index("tokens")]
        delta = {}
        for name, leaf in anchor.items():
            wide = accumulation_dtype(leaf.dtype)
            share = tokens.astype(wide) * replicas / jnp.where(total > 0, total, 1).astype(wide)
            delta[name] = (to_varying(leaf, (REPLICAS,)).astype(wide) - params[name][0].astype(wide)) * share
        means, lost = _exchange(delta, lost, local, options)
        return totals, highest, stack(of, means), lost

    return region


def _measured(last: Metrics, own: LocalState, index: int) -> tuple[jax.Array, jax.Array]:
    """What is summed over replicas, as `SUMMED` says, and that of which the most is taken: both [R, ...]."""
    found = last | {"losses": own.losses[:, index], "tokens": own.tokens[:, index]}
    found["loss"] = jnp.where(last["weight"] != 0, last["loss"] * last["weight"], 0)
    wide, scale = accumulation_dtype(last["loss"].dtype), last.get("loss_scale", jnp.zeros_like(last["loss"]))
    peaks = last["skipped_in_a_row"], -last["skipped"], -scale
    return (
        jnp.stack([found[name].astype(wide) for name in SUMMED], axis=1),
        jnp.stack([each.astype(wide) for each in peaks], axis=1),
    )


def make_outer_step(
    outer: optax.GradientTransformation, mesh: AnyMesh, options: StepOptions, local: LocalConfig, *, index: int
) -> Callable[[TrainState], Any]:
    """state -> the compiled outer step of fragment `index`, (state, metrics of the inner step) -> (state, metrics)."""
    count, frozen, replicas = local.fragments, options.freeze, mesh.shape[REPLICAS]

    def build(state: TrainState) -> Any:
        of = cut_specs(within(specs_of_arrays(state.opt_state.params)), index, count, frozen=frozen)
        led, split = active_specs(apart(of, mesh), mesh), without_idle(P(REPLICAS), mesh)
        kept = led if state.opt_state.lost else {}
        run = jax.shard_map(
            _make_region(of, replicas, local, options),
            mesh=mesh,
            in_specs=(led, active_specs(of, mesh), kept, split, split),
            out_specs=(P(), P(), stacked_specs(of, mesh), kept),
        )

        def step(state: TrainState, last: Metrics) -> tuple[TrainState, Metrics]:
            own: LocalState = state.opt_state
            mine = cut(own.params, index, count, frozen=frozen, lead=True)
            whole, before = fetched((state.params, own.outer[index]))
            anchor = cut(whole, index, count, frozen=frozen)
            lost = fetched(own.lost[index]) if own.lost else {}
            totals, highest, means, errors = run(mine, anchor, lost, *_measured(last, own, index))
            means = claim_replicated(means, of, mesh)
            with jax.numpy_dtype_promotion("standard"):
                updates, opt_state = outer.update(means, before, anchor)
            anchor = apply_updates(anchor, updates)
            met = {name: _kept(mine[name], leaf, local.keep) for name, leaf in anchor.items()}
            own = own._replace(
                params=paste(own.params, met, index, count, lead=True),
                tokens=own.tokens.at[:, index].set(0),
                losses=own.losses.at[:, index].set(0),
                outer=(*own.outer[:index], opt_state, *own.outer[index + 1 :]),
                lost=(*own.lost[:index], errors, *own.lost[index + 1 :]) if own.lost else (),
            )
            new = state._replace(params=paste(whole, anchor, index, count), opt_state=own)
            new = stored_like(new, state)
            return new, _metrics(totals, highest, means, last, replicas, options.max_skips)

        outputs = shardings_of(state), NamedSharding(mesh, P())
        return jax.jit(step, donate_argnums=0, in_shardings=(outputs[0], None), out_shardings=outputs)

    return build


def _kept(own: jax.Array, anchor: jax.Array, keep: float) -> jax.Array:
    """The parameters of replicas after an outer step, [R, ...]."""
    whole = jnp.broadcast_to(anchor, own.shape)
    return (keep * own + (1 - keep) * whole).astype(own.dtype) if keep else whole


def _metrics(
    totals: jax.Array, highest: jax.Array, means: PyTree, last: Metrics, replicas: int, max_skips: int
) -> Metrics:
    """What all processes know alike after an outer step. A replica that is halted makes the loss not finite."""
    found = dict(zip(SUMMED, totals, strict=True))
    in_a_row, skipped, scale = highest
    loss = jnp.where(found["weight"] != 0, found["loss"] / found["weight"], 0)
    metrics = {
        "loss": jnp.where(in_a_row > max_skips, jnp.nan, loss),
        "weight": found["weight"],
        "grad_norm": found["grad_norm"] / replicas,
        "skipped": (-skipped).astype(jnp.int32),
        "skipped_in_a_row": in_a_row.astype(jnp.int32),
        "round_loss": jnp.where(found["tokens"] != 0, found["losses"] / found["tokens"], 0),
        "outer_norm": global_norm(means),
    }
    return metrics | ({"loss_scale": -scale} if "loss_scale" in last else {})
