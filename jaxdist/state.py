"""The state of a training run, and how each of its leaves is sharded."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import HOST, AnyMesh, fetched, sizes_text, stored_like
from jaxdist.optim import apply_updates
from jaxdist.optim.update import call_update
from jaxdist.precision.loss_scale import choose, fresh_guard
from jaxdist.specs import PyTree, format_bytes, map_specs, path_name, spec_leaves


class TrainState(NamedTuple):
    """The state of a training run.

    step: the number of batches seen, int32.
    params: the parameters, in the policy's param dtype.
    opt_state: optax's state, sharded like params.
    residual: the errors of lossy gradient sums, for the next step (`jaxdist.parallel.grad_sync`); mostly ().
    guard: the loss scale, and the number of steps skipped as not finite (`jaxdist.precision.loss_scale`).
    model_state: what a user's loss carries from step to step besides parameters, such as BatchNorm's statistics; of a
        `ModelDef` that is arranged for a pipeline its `BlockOrder`, which no array belongs to.

    >>> state = jaxdist.init_state({"w": jnp.ones((16, 4))}, optax.sgd(0.1), jaxdist.make_mesh(data=8))
    >>> int(state.step), state.params["w"].shape
    (0, (16, 4))
    """

    step: Any
    params: PyTree
    opt_state: PyTree
    residual: PyTree = ()
    guard: Any = ()
    model_state: PyTree = ()

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params)
        if not all(hasattr(leaf, "shape") for leaf in leaves):  # of specs, or of other things that are no arrays
            return f"TrainState{tuple.__repr__(self)}"
        parts = [_step_text(self.step), f"{sum(math.prod(leaf.shape) for leaf in leaves):,} parameters"]
        placed = [leaf for leaf in jax.tree.leaves(tuple(self)) if getattr(leaf, "sharding", None) is not None]
        if placed:
            near = [leaf for leaf in placed if leaf.sharding.memory_kind != HOST]
            size = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in near)
            parts.append(f"{format_bytes(size)} a device")
        if isinstance(getattr(self.step, "sharding", None), NamedSharding):
            parts.append(f"mesh: {sizes_text(self.step.sharding.mesh.shape)}")
        return f"TrainState({', '.join(parts)})"


def _step_text(step: Any) -> str:
    """The number of steps, if it is there: nothing waits for it."""
    if not isinstance(step, jax.Array) or isinstance(step, jax.core.Tracer):
        return f"step {step}" if isinstance(step, int | np.integer | np.ndarray) else "abstract"
    if step.is_deleted():
        return "used up by the step it was given to"
    ready = step.is_ready()  # type: ignore[attr-defined]
    return f"step {step}" if ready else "its step is still running"


def advanced(old: TrainState, new: TrainState, *, taken: jax.Array, halted: jax.Array) -> TrainState:
    """The state after a step from `old` to `new` that may be skipped.

    new: its parameters and optimizer state come from `updated`, and are those of `old` already if the step is skipped.
    taken: whether the step is applied; if not, residual and model_state are those of `old`.
    halted: whether too many steps in a row were skipped (`is_halted`); if so, step and guard are those of `old`, too.
    """
    step, guard = choose(halted, (old.step, old.guard), (new.step, new.guard))
    carried = choose(taken, (new.residual, new.model_state), (old.residual, old.model_state))
    return new._replace(step=step, residual=carried[0], guard=guard, model_state=carried[1])


def optimizer_specs(optimizer: optax.GradientTransformation, shapes: PyTree, specs: PyTree) -> PyTree:
    """The specs of the optimizer state. A leaf that mirrors a parameter is sharded like it, all others are replicated.

    A leaf mirrors a parameter if its path ends with the parameter's, and the shapes are the same. Others, such as
    counts and Adafactor's factors, are small.
    """
    known = {}
    for (path, shape), spec in zip(jax.tree_util.tree_leaves_with_path(shapes), spec_leaves(specs), strict=True):
        known[path_name(path)] = (shape.shape, spec)

    def spec_of(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> P:
        for start in range(len(path) + 1):
            shape, spec = known.get(path_name(path[start:]), (None, P()))
            if shape == leaf.shape:
                return spec
        return P()

    return jax.tree_util.tree_map_with_path(spec_of, jax.eval_shape(optimizer.init, shapes))


def fresh_state(params: PyTree, optimizer: optax.GradientTransformation, residual: PyTree = ()) -> TrainState:
    """The state at step 0. To be called under `jit` with `out_shardings`: without these, ZeRO is silently lost.

    residual: its shapes; it starts as zeros.
    """
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), residual)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), zeros, fresh_guard())


def abstract_state(
    shapes: PyTree,
    specs: PyTree,
    optimizer: optax.GradientTransformation,
    mesh: AnyMesh,
    residual: tuple[PyTree, PyTree] = ((), ()),
) -> TrainState:
    """The state as ShapeDtypeStructs with shardings, to allocate, to restore into, or to compile for.

    residual: (its shapes, its specs).
    """
    state = jax.eval_shape(lambda params: fresh_state(params, optimizer, residual[0]), shapes)
    guard = jax.tree.map(lambda _: P(), state.guard)
    layout = TrainState(P(), specs, optimizer_specs(optimizer, shapes, specs), residual[1], guard)
    return map_specs(
        lambda spec, leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        layout,
        state,
    )


def updated(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    state: TrainState,
    *,
    taken: jax.Array,
    branch: bool,
    shardings: PyTree,
) -> tuple[PyTree, PyTree]:
    """(parameters, optimizer state) after the optimizer's update, or unchanged to the bit.

    taken: whether to update. branch: whether to decide it by `lax.cond`, not by `where`.
    shardings: of the parameters; an extra argument for optimizers that communicate by themselves, and take it.
    """

    def update(grads: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its int32 counts with floats
            extra = {"shardings": shardings} | ({"model_state": state.model_state} if averaged else {})
            updates, opt_state = call_update(optimizer, grads, opt_state, params, **extra)
        return apply_updates(params, updates), opt_state

    rest, averaged = state.opt_state, hasattr(state.opt_state, "model_state")
    if any(jax.typeof(leaf).memory_space != jax.memory.Space.Device for leaf in jax.tree.leaves(rest)):
        grads, rest = jax.lax.optimization_barrier((grads, rest))  # or XLA fetches it before there are gradients
    near = fetched(rest)  # and its new arrays go back afterwards
    # In a condition XLA:CPU updates in place; for a `where` it keeps old and new. XLA:GPU fuses a `where` into the
    # update (compiled for 8 H100, it takes no byte more than no choice at all), but waits at a condition.
    if branch:
        stay = lambda grads, opt_state, params: (params, opt_state)  # noqa: E731
        params, new = jax.lax.cond(taken, update, stay, grads, near, state.params)
    else:
        params, new = choose(taken, update(grads, near, state.params), (state.params, near))
    return params, stored_like(new, state.opt_state)


def shardings_of(tree: PyTree) -> PyTree:
    """The sharding of every leaf of a tree of arrays or ShapeDtypeStructs."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def specs_of_arrays(tree: PyTree) -> PyTree:
    """The PartitionSpec of every leaf of a tree of sharded arrays or ShapeDtypeStructs."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)


def check_state(state: TrainState, mesh: AnyMesh, param_dtype: Any) -> None:
    """Raise `UserError` for a state that is traced, without a guard, of another mesh, with leaves that have no layout,
    or with parameters not in `param_dtype`."""
    named = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    kinds = NamedSharding if mesh.size > 1 else jax.sharding.Sharding  # on one device all are alike
    loose = {name for name, leaf in named.items() if not isinstance(getattr(leaf, "sharding", None), kinds)}
    cast = {name for name, leaf in named.items() if name[:6] == "params" and getattr(leaf, "dtype", 0) != param_dtype}
    if loose or cast or not state.guard or getattr(state.step.sharding, "mesh", None) != mesh:
        from jaxdist.config.wrong_calls import refuse_state, refuse_use

        if isinstance(state.step, jax.core.Tracer):
            refuse_use(traced=True)
        refuse_state(named, loose, cast, guard=bool(state.guard), dtype=jnp.dtype(param_dtype).name)


def place_params(params: PyTree, optimizer: optax.GradientTransformation, target: TrainState) -> TrainState:
    """A state at step 0 from parameters, in the layout of `target`. Weak types become strong: steps compile once."""
    strong = jax.tree.map(lambda leaf: jnp.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype)), params)
    placed = lay_out(strong, target.params)
    carried = target.model_state  # without arrays: an order of blocks, or ()
    make = lambda params: fresh_state(params, optimizer, target.residual)._replace(model_state=carried)  # noqa: E731
    return jax.jit(make, out_shardings=shardings_of(target))(placed)


def lay_out(tree: PyTree, target: PyTree) -> PyTree:
    """The arrays of `tree` in the layouts of `target`. Raises `UserError` where the processes give different values."""
    try:
        return jax.device_put(tree, shardings_of(target))
    except AssertionError:
        from jaxdist.jaxpr.layouts import refuse_unequal

        refuse_unequal(tree, shardings_of(target))
