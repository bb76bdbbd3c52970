"""The moving average of parameters and of a model_state, as a part of the optimizer's state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdist.errors import UserError
from jaxdist.optim.update import apply_updates, check_optimizer
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import PyTree


class EmaState(NamedTuple):
    """The state of an optimizer by `with_ema`. ema: the average, in at least fp32. inner: the optimizer's own state."""

    ema: PyTree
    inner: Any


class CarryingEmaState(NamedTuple):
    """An `EmaState` that has the average of a model_state, such as running statistics, too: see `carrying`."""

    ema: PyTree
    inner: Any
    model_state: PyTree

    @property
    def bare(self) -> EmaState:
        """It without the model_state: what the optimizer itself makes."""
        return EmaState(self.ema, self.inner)


EMA_STATES = (EmaState, CarryingEmaState)


def _wide(dtype: Any) -> Any:
    """The dtype of an average: at least fp32. Others than floats have none, they are taken as they are."""
    return accumulation_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def with_ema(optimizer: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """The optimizer, which also keeps the exponential moving average of the parameters after each update:
    ema = decay * ema + (1 - decay) * params. It begins as the parameters of step 0.

    In the optimizer's state it is sharded like the parameters, saved with them, and left alone by a skipped step.
    `init_state` adds the average of a model_state: running statistics of other parameters would not fit these.
    """
    if not hasattr(decay, "__float__") or not 0 < decay < 1:
        raise UserError(f"ema: {decay!r}; allowed: a number between 0 and 1, such as 0.999; or None for no average")
    check_optimizer(optimizer)
    inner = optax.with_extra_args_support(optimizer)

    def wide(leaf: jax.Array) -> jax.Array:
        return leaf.astype(_wide(leaf.dtype))

    def moved(old: jax.Array, leaf: jax.Array) -> jax.Array:
        return decay * old + (1 - decay) * wide(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    def init(params: PyTree) -> EmaState:
        return EmaState(jax.tree.map(wide, params), inner.init(params))

    def update(
        grads: PyTree, state: Any, params: PyTree = None, *, model_state: PyTree = (), **extra: Any
    ) -> tuple[PyTree, Any]:
        updates, new = inner.update(grads, state.inner, params, **extra)
        found = state._replace(ema=jax.tree.map(moved, state.ema, apply_updates(params, updates)), inner=new)
        if isinstance(state, CarryingEmaState) and jax.tree.leaves(model_state):
            found = found._replace(model_state=jax.tree.map(moved, state.model_state, model_state))
        return updates, found

    return optax.GradientTransformationExtraArgs(init, update)


def carrying(state: Any, model_state: PyTree, target: Any = None) -> Any:
    """A `TrainState` with a model_state, and with its average where the optimizer is one by `with_ema`.

    target: the state as ShapeDtypeStructs, for the layout of arrays; None: model_state is no arrays, but these.
    """
    state = state._replace(model_state=model_state)
    if not isinstance(state.opt_state, EmaState) or not jax.tree.leaves(model_state):
        return state
    if target is None:
        like = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, _wide(leaf.dtype), sharding=leaf.sharding)  # noqa: E731
        average = jax.tree.map(like, model_state)
    else:
        copy = lambda leaf: jnp.copy(leaf.astype(_wide(leaf.dtype)))  # noqa: E731  # both will be donated
        made = jax.jit(lambda tree: jax.tree.map(copy, tree))(model_state)
        average = jax.tree.map(lambda leaf, to: jax.device_put(leaf, to.sharding), made, target.opt_state.model_state)
    return state._replace(opt_state=CarryingEmaState(*state.opt_state, average))


def not_carrying(state: Any) -> Any:
    """A `TrainState` without its model_state: the opposite of `carrying`."""
    rest = state.opt_state
    return state._replace(model_state=(), opt_state=rest.bare if isinstance(rest, CarryingEmaState) else rest)


def ema_of_model_state(opt_state: Any, model_state: PyTree) -> PyTree:
    """The average of a model_state by `with_ema`; the model_state itself where there is none."""
    return opt_state.model_state if isinstance(opt_state, CarryingEmaState) else model_state


def ema_of(opt_state: Any, params: PyTree) -> PyTree:
    """The average of an optimizer by `with_ema`; for frozen parameters, of which there is none, the parameters."""
    frozen = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    return jax.tree.map(lambda ema, leaf: leaf if frozen(ema) else ema, opt_state.ema, params, is_leaf=frozen)
