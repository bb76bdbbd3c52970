"""What a device holds of a configuration's parameters in closed form: the state, gradients, and gathered copies."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.build import optimizer_of, planned_mesh, step_options
from jaxdist.config.schema import Config
from jaxdist.init import residual_target
from jaxdist.mesh import AnyMesh, abstract_mesh
from jaxdist.model import rules_of
from jaxdist.optim import leave_out, only_trained
from jaxdist.optim.patterns import fitting
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.pipeline.stages import order_of_model
from jaxdist.plan.closed.leaves import Known, Leaf, model_key, placing_key
from jaxdist.plan.explain import IN_HOST_MEMORY
from jaxdist.plan.traced.liveness import peak_bytes
from jaxdist.precision.loss_scale import fresh_guard
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import (
    STACKED,
    UNITS,
    PyTree,
    active_specs,
    bytes_per_device,
    dim_of,
    leaves_by_name,
    shard_count,
    shard_of,
    spec_leaves,
)
from jaxdist.state import abstract_state, optimizer_specs, shardings_of, updated


class AtRest(NamedTuple):
    """Bytes of one device that depend on model, layout and optimizer alone.

    state: {part: bytes} as `explain.memory_at_rest`, and the count of steps; what is in host memory too.
    gradients: of each unit while they are summed over microbatches, with respect to what a strategy differentiates.
    shards: of all gradients when the optimizer gets them.
    copies: of each unit's parameters that are gathered once a step.
    whole: of each unit, gathered where it is used; 0 where nothing is.
    used: of the parameters of each unit as a device uses them for the whole step: shards, or whole ones.
    update: what the optimizer needs beside state and gradients.
    """

    state: dict[str, int]
    gradients: dict[str, int]
    shards: int
    copies: dict[str, int]
    whole: dict[str, int]
    used: dict[str, int]
    update: int


class _Mirror(NamedTuple):
    """A leaf of the optimizer state.

    array: whether it is no number. like: the number of the parameter that it is sharded like; None: it is whole.
    """

    nbytes: int
    array: bool
    like: int | None


def at_rest(config: Config, known: Known) -> AtRest:
    """See `AtRest`. The model must have blocks."""
    layout = (*model_key(config), *placing_key(config))
    key = ("at rest", *layout, config.optimizer, config.train.ema, config.memory.offload.optimizer)
    found: AtRest = known.get(key, lambda: _at_rest(config, known))
    return found


def _at_rest(config: Config, known: Known) -> AtRest:
    mesh, model, leaves = planned_mesh(config), known.model(config), known.leaves(config)
    options = step_options(config, mesh)
    state = {"parameters": sum(leaf.nbytes for leaf in leaves)}
    optimizer = _optimizer(config, known)
    held = optimizer.held(leaves, mesh)
    there = sum(size for size, each in zip(held, optimizer.leaves, strict=True) if options.offload and each.array)
    state["optimizer state"] = sum(held) - there
    if there:
        state[IN_HOST_MEMORY] = there
    if options.grad_sync.wire_dtype == "int8":
        state["residual of int8"] = _residual(config, known)
    guard = known.get(("guard",), lambda: jax.eval_shape(fresh_guard))
    state["counts of steps"] = 4 + sum(leaf.size * leaf.dtype.itemsize for leaf in guard)
    whole_gradients, gathers = known.get(
        ("habits", config.parallel.strategy, options.grad_sync.deterministic), lambda: _habits(options)
    )
    trained = {*leaves_by_name(leave_out(model.shapes, config.optimizer.frozen))}
    wide = _kept_wide(config, options, known)
    sizes = {name: dict.fromkeys(UNITS, 0) for name in ("gradients", "copies", "whole", "used")}
    shards = 0
    for leaf in leaves:
        place, pipe = shard_of(leaf.spec), leaf.unit != STACKED and dim_of(leaf.spec, "pipe") is not None
        parts = 1 if place is None else place.parts(mesh)
        elements = leaf.elements * (mesh.shape["pipe"] if pipe else 1)
        item = leaf.shape.dtype.itemsize
        received = max(item, 4) if leaf.name in wide else jnp.dtype(options.precision.received).itemsize
        if leaf.name in trained:
            gradient = jnp.dtype(accumulation_dtype(options.precision.reduce)).itemsize
            sizes["gradients"][leaf.unit] += elements * (parts if whole_gradients else 1) * gradient
            shards += leaf.nbytes
        once = gathers and parts > 1
        if once or pipe:
            sizes["copies"][leaf.unit] += elements * (parts * received if once else item)
        sizes["whole"][leaf.unit] += elements * parts * received if parts > 1 and not gathers else 0
        sizes["used"][leaf.unit] += elements * (parts * received if once else item)
    own = tuple(leaf.nbytes for leaf in leaves)
    update = known.get(("update", id(optimizer), own, *held), lambda: peak_bytes(optimizer.update, [*own, *own, *held]))
    return AtRest(state, **sizes, shards=shards, update=update)


def _kept_wide(config: Config, options: StepOptions, known: Known) -> set[str]:
    """The names of the parameters that layers receive in at least fp32, whatever the policy computes in."""
    patterns = options.precision.keep_fp32
    chosen = leaves_by_name(fitting(known.model(config).shapes, patterns, key="precision", optional=patterns))
    return {name for name, yes in chosen.items() if yes}


def _residual(config: Config, known: Known) -> int:
    """Bytes of the errors of int8 sums on one device."""
    mesh, shapes = planned_mesh(config), known.model(config).shapes
    specs = jax.tree.unflatten(jax.tree.structure(shapes), [leaf.spec for leaf in known.leaves(config)])
    stored, frozen = active_specs(specs, mesh), config.optimizer.frozen
    found = residual_target(leave_out(shapes, frozen), leave_out(stored, frozen), mesh, config.parallel.grad_sync)
    pairs = zip(jax.tree.leaves(found[0]), spec_leaves(found[1]), strict=True)
    return sum(bytes_per_device(shape, spec, mesh) for shape, spec in pairs)


def _habits(options: StepOptions) -> tuple[bool, bool]:
    """(whether gradients of shards are whole until the end of a step, whether shards are gathered once a step)."""
    mesh, specs, found = abstract_mesh(fsdp=2), {"w": P("fsdp")}, list[bool]()
    strategy = get_strategy(StepOptions(strategy=options.strategy, grad_sync=options.grad_sync))
    whole = jax.ShapeDtypeStruct((4, 4), jnp.float32)

    def region(params: PyTree) -> jax.Array:
        trees = strategy.begin(params, specs, None)
        found.extend(any(leaf.shape == whole.shape for leaf in jax.tree.leaves(tree)) for tree in trees)
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(region, mesh=mesh, in_specs=(specs,), out_specs=P()), {"w": whole})
    return found[0], found[1]


class _Optimizer(NamedTuple):
    """The leaves of an optimizer's state, and the program of its update on whole arrays: what Muon sends leaves the
    size of each device's part as it is."""

    leaves: list[_Mirror]
    update: Any

    def held(self, leaves: tuple[Leaf, ...], mesh: AnyMesh) -> list[int]:
        """Bytes of each of its leaves on one device. leaves: the parameters."""
        return [
            each.nbytes if each.like is None else each.nbytes // shard_count(leaves[each.like].spec, mesh)
            for each in self.leaves
        ]


def _optimizer(config: Config, known: Known) -> _Optimizer:
    """The optimizer of a configuration, whatever its layout."""

    def make() -> _Optimizer:
        model, mesh = known.model(config), abstract_mesh()
        plain, rules = optimizer_of(config, order_of_model(model).tolist()), rules_of(model)
        optimizer = only_trained(plain, config.optimizer.frozen, rules)
        # Each parameter gets a spec, by which the leaves that are sharded like it are found again.
        tree: Any = jax.tree.structure(model.shapes)
        specs = optimizer_specs(optimizer, model.shapes, tree.unflatten([P(str(i)) for i in range(tree.num_leaves)]))
        shapes = jax.tree.leaves(jax.eval_shape(optimizer.init, model.shapes))
        mirrors = [
            _Mirror(math.prod(leaf.shape) * leaf.dtype.itemsize, bool(leaf.shape), int(spec[0]) if spec else None)
            for leaf, spec in zip(shapes, spec_leaves(specs), strict=True)
        ]
        target = abstract_state(model.shapes, model.specs, optimizer, mesh)

        def run(grads: PyTree, params: PyTree, opt_state: PyTree) -> Any:
            state, there = target._replace(params=params, opt_state=opt_state), shardings_of(target.params)
            return updated(optimizer, grads, state, taken=jnp.bool_(True), branch=True, shardings=there)

        return _Optimizer(mirrors, jax.make_jaxpr(run)(target.params, target.params, target.opt_state))

    optimizing = (config.optimizer, config.train.ema, config.train.steps, config.parallel.grad_sync.deterministic)
    found: _Optimizer = known.get(("optimizer", *model_key(config), *optimizing), make)
    return found
