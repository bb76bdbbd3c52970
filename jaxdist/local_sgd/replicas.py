"""The replicas of a run by its configuration: their state, their step, and how they resume.

A checkpoint holds the anchor as the parameters of its model, and each replica's state beside it, [R, ...]. With as many
replicas a run goes on with the same bits, in the middle of a round too. With another number of them it goes on from
their mean: see `regrouped`.

Legend: R replicas, S of the checkpoint, F fragments.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.checkpoint import Checkpoints
from jaxdist.config.schema import Config
from jaxdist.config.sections.local import LocalConfig
from jaxdist.local_sgd.state import REPLICAS, LocalState, local_target, outer_optimizer, spread_out
from jaxdist.local_sgd.step import LocalStep, check_has_blocks, make_local_step
from jaxdist.mesh import AnyMesh, fetched
from jaxdist.parallel.options import StepOptions
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.pretrained.source import Say
from jaxdist.specs import PyTree
from jaxdist.state import TrainState, shardings_of


class Replicas(NamedTuple):
    """The replicas of a run.

    - one: the state of one replica alone. target: that of all. Both as ShapeDtypeStructs with shardings.
    - frozen: patterns of parameters that are not trained.
    """

    one: TrainState
    target: TrainState
    step: LocalStep
    outer: optax.GradientTransformation
    local: LocalConfig
    frozen: tuple[str, ...]

    def start(self, one: TrainState) -> TrainState:
        """The state of all replicas, which start as `one` is. Uses it up."""
        return spread_out(one, self.target, self.outer, self.local, frozen=self.frozen)

    def restore(self, checkpoints: Checkpoints, step: int, say: Say) -> TrainState:
        """The state of a checkpoint of any number of replicas."""
        saved, now = checkpoints.meta(step)["config"]["mesh.data"], self.target.opt_state.tokens.shape[0]
        if saved == now:
            return checkpoints.restore(step, self.target)
        say(f"mesh.data: {now} replicas go on from the mean of the {saved} in the checkpoint of step {step}")
        found = checkpoints.restore(step, of_replicas(self.target, saved))
        return jax.jit(regrouped, static_argnums=1, out_shardings=shardings_of(self.target))(found, now)


def replicas_of(
    config: Config,
    model: Any,
    optimizer: optax.GradientTransformation,
    mesh: AnyMesh,
    options: StepOptions,
    one: TrainState,
) -> Replicas:
    """The replicas that section `parallel.local` asks for. one: the state of one alone (`state_target`)."""
    local, frozen = config.parallel.local, options.freeze
    outer, model = outer_optimizer(local), check_has_blocks(model)
    step = make_local_step(model, optimizer, mesh, local, options, last=config.train.steps)
    return Replicas(one, local_target(one, outer, local, frozen=frozen), step, outer, local, frozen)


def of_replicas(target: TrainState, count: int) -> TrainState:
    """The target with `count` replicas. Where `data` does not divide them, every device has all of its part."""
    mesh = target.step.sharding.mesh
    divides = count % mesh.shape[REPLICAS] == 0

    def one(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = leaf.sharding.spec if divides else P(None, *leaf.sharding.spec[1:])
        return jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype, sharding=NamedSharding(mesh, spec))

    own: LocalState = target.opt_state
    other = jax.tree.map(one, own._replace(outer=()))
    return target._replace(opt_state=other._replace(outer=own.outer), guard=jax.tree.map(one, target.guard))


def regrouped(state: TrainState, count: int) -> TrainState:
    """The state of `count` replicas that go on from those of `state`, in the same round.

    Anchor and outer optimizer stay. Every replica gets the mean of the parameters, weighed by the tokens of the round,
    and the plain mean of the optimizer states and of the errors of int8. Counts and loss scale are the least there are.
    The round's tokens are shared out equally.
    """
    state = fetched(state)
    own: LocalState = state.opt_state
    tokens = own.tokens[:, -1]
    weights = jnp.where(tokens.sum() > 0, tokens, jnp.ones_like(tokens))

    def spread(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf, (count, *leaf.shape))

    def mean(leaf: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return spread(leaf.min(axis=0))
        wide = leaf.astype(accumulation_dtype(leaf.dtype))
        if weights is None:
            return spread(wide.mean(axis=0).astype(leaf.dtype))
        shares = (weights / weights.sum()).astype(wide.dtype)
        return spread(jnp.tensordot(shares, wide, axes=1).astype(leaf.dtype))

    def shared(sums: jax.Array) -> jax.Array:
        return spread(sums.sum(axis=0) / count)

    params: PyTree = jax.tree.map(lambda leaf: mean(leaf, weights), own.params)
    rest = jax.tree.map(mean, (own.opt_state, own.lost))
    new = LocalState(params, rest[0], shared(own.tokens), shared(own.losses), own.outer, rest[1])
    return state._replace(opt_state=new, guard=jax.tree.map(lambda leaf: spread(leaf.min(axis=0)), state.guard))
