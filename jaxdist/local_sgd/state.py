"""The state of replicas that train by themselves: a `TrainState` whose parameters are the anchor.

The anchor is what the replicas started from, or came to, at their last outer step: the model that is evaluated, saved
for others and exported. It is laid out as any model's. What each replica has for itself is the optimizer state of that
`TrainState`: every leaf has a leading dim [R] over the mesh axis `data`. Types so say that replicas differ, and
`specs.claimed_axes` leaves `data` out of all sums of gradients.

Legend: R replicas, F fragments.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config.sections.local import LocalConfig
from jaxdist.init import on_host
from jaxdist.mesh import AnyMesh, has_host_memory
from jaxdist.optim import leave_out
from jaxdist.specs import STACKED, PyTree, leaves_by_name, map_specs, placed_specs, without_idle
from jaxdist.state import TrainState, optimizer_specs, shardings_of, specs_of_arrays

REPLICAS = "data"  # the mesh axis whose coordinates are replicas


class LocalState(NamedTuple):
    """What stands in place of the optimizer state of a `TrainState`.

    - params, opt_state: of each replica, [R, ...].
    - tokens, losses: sums of weights and of losses since the last outer step of each fragment, [R, F].
    - outer: the state of the outer optimizer, of each fragment.
    - lost: of int8, the errors of each replica's encodings, of each fragment: {parameter: [R, ...]}; else ().
    """

    params: PyTree
    opt_state: PyTree
    tokens: Any
    losses: Any
    outer: tuple[PyTree, ...]
    lost: tuple[dict[str, Any], ...] = ()


def outer_optimizer(local: LocalConfig) -> optax.GradientTransformation:
    """The outer optimizer of a configuration.

    >>> outer = outer_optimizer(LocalConfig(every=10))
    >>> updates, _ = outer.update({"w": jnp.float32(2)}, outer.init({"w": jnp.float32(0)}))
    >>> float(updates["w"])  # with lr 1 and no momentum the anchor goes all the way
    -2.0
    """
    name, lr, momentum = local.outer.name, local.outer.lr, local.outer.momentum
    if name == "adam":
        return optax.adam(lr, b1=momentum)
    return optax.sgd(lr, momentum or None, nesterov=name == "nesterov")


def apart(specs: PyTree, mesh: AnyMesh) -> PyTree:
    """The specs of leaves that each replica has for itself, with their leading dim."""
    return placed_specs(map_specs(lambda spec: P(REPLICAS, *spec), specs), mesh)


def within(specs: PyTree) -> PyTree:
    """The inverse of `apart`: specs of one replica's leaves."""
    return map_specs(lambda spec: P(*spec[1:]), specs)


def cut(tree: PyTree, index: int, count: int, *, frozen: Sequence[str] = (), lead: bool = False) -> dict[str, Any]:
    """The leaves of fragment `index` of `count`, by name: every count-th block. Embedding and head go with the last.

    - frozen: patterns of parameters that are in no fragment.
    - lead: whether leaves have the leading dim of replicas.
    """
    rows = (slice(None), slice(index, None, count)) if lead else (slice(index, None, count),)
    found = {}
    for name, leaf in leaves_by_name(leave_out(tree, frozen)).items():
        if count > 1 and name.startswith(f"{STACKED}."):
            found[name] = leaf[rows]
        elif index == count - 1:
            found[name] = leaf
    return found


def cut_specs(specs: PyTree, index: int, count: int, *, frozen: Sequence[str] = ()) -> dict[str, P]:
    """The specs of `cut` of a replica's parameters."""
    names = _named_specs(leave_out(specs, frozen))
    return {
        name: spec
        for name, spec in names.items()
        if index == count - 1 or (count > 1 and name.startswith(f"{STACKED}."))
    }


def _named_specs(specs: PyTree) -> dict[str, P]:
    found = leaves_by_name(map_specs(_Held, specs))
    return {name: held.spec for name, held in found.items()}


class _Held:
    """A spec as a leaf: a PartitionSpec is a tuple."""

    def __init__(self, spec: P) -> None:
        self.spec = spec


def paste(tree: PyTree, part: dict[str, Any], index: int, count: int, *, lead: bool = False) -> PyTree:
    """The tree with the leaves of a fragment in place of its own: the inverse of `cut`."""
    rows = (slice(None), slice(index, None, count)) if lead else (slice(index, None, count),)
    leaves = []
    for name, leaf in leaves_by_name(tree).items():
        if name not in part:
            leaves.append(leaf)
        elif count > 1 and name.startswith(f"{STACKED}."):
            leaves.append(leaf.at[rows].set(part[name]))
        else:
            leaves.append(part[name])
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _fresh(
    one: TrainState, outer: optax.GradientTransformation, local: LocalConfig, frozen: Sequence[str], count: int
) -> TrainState:
    """The state of `count` replicas that all start as `one` is."""
    spread = functools.partial(jax.tree.map, lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)))
    parts = [cut(one.params, index, local.fragments, frozen=frozen) for index in range(local.fragments)]
    zeros = lambda part: {name: jnp.zeros((count, *leaf.shape), jnp.float32) for name, leaf in part.items()}  # noqa: E731
    sums = jnp.zeros((count, local.fragments), jnp.float32)
    own = LocalState(
        params=spread(one.params),
        opt_state=spread(one.opt_state),
        tokens=sums,
        losses=jnp.zeros_like(sums),
        outer=tuple(outer.init(part) for part in parts),
        lost=tuple(map(zeros, parts)) if local.wire_dtype == "int8" else (),
    )
    return one._replace(opt_state=own, guard=spread(one.guard))


def local_target(
    one: TrainState, outer: optax.GradientTransformation, local: LocalConfig, *, frozen: Sequence[str] = ()
) -> TrainState:
    """The state of all replicas as ShapeDtypeStructs with shardings. one: that of one (`state_target`)."""
    mesh = one.step.sharding.mesh
    shapes = jax.eval_shape(lambda one: _fresh(one, outer, local, frozen, mesh.shape[REPLICAS]), one)
    specs, split = specs_of_arrays(one.params), without_idle(P(REPLICAS), mesh)
    of_outer, lost = [], []
    for index in range(local.fragments):
        part = cut_specs(specs, index, local.fragments, frozen=frozen)
        shapes_of = jax.eval_shape(lambda one, i=index: cut(one, i, local.fragments, frozen=frozen), one.params)
        of_outer.append(optimizer_specs(outer, shapes_of, part))
        lost.append(apart(part, mesh))
    own = LocalState(
        params=apart(specs, mesh),
        opt_state=apart(specs_of_arrays(one.opt_state), mesh),
        tokens=split,
        losses=split,
        outer=tuple(of_outer),
        lost=tuple(lost) if local.wire_dtype == "int8" else (),
    )
    guard = jax.tree.map(lambda _: split, one.guard)
    layout = TrainState(P(), specs, own, (), guard, one.model_state)
    target = map_specs(
        lambda spec, leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        layout,
        shapes,
    )
    if not (local.offload and has_host_memory(mesh)):
        return target
    own = target.opt_state
    return target._replace(
        params=on_host(target.params), opt_state=own._replace(outer=on_host(own.outer), lost=on_host(own.lost))
    )


def spread_out(
    one: TrainState,
    target: TrainState,
    outer: optax.GradientTransformation,
    local: LocalConfig,
    *,
    frozen: Sequence[str] = (),
) -> TrainState:
    """The state of all replicas, which start as `one` is: its parameters are their anchor. Uses up `one`."""
    count = target.opt_state.tokens.shape[0]
    make = lambda one: _fresh(one, outer, local, frozen, count)  # noqa: E731
    return jax.jit(make, donate_argnums=0, out_shardings=shardings_of(target))(one)
