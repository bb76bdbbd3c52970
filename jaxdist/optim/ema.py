"""The moving average of parameters, as a part of the optimizer's state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdist.errors import UserError
from jaxdist.optim.update import apply_updates, check_optimizer
from jaxdist.specs import PyTree


class EmaState(NamedTuple):
    """The state of an optimizer by `with_ema`. ema: the average, in at least fp32. inner: the optimizer's own state."""

    ema: PyTree
    inner: Any


def with_ema(optimizer: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """The optimizer, which also keeps the exponential moving average of the parameters after each update:
    ema = decay * ema + (1 - decay) * params. It begins as the parameters of step 0.

    In the optimizer's state it is sharded like the parameters, saved with them, and left alone by a skipped step.
    """
    if not hasattr(decay, "__float__") or not 0 < decay < 1:
        raise UserError(f"ema: {decay!r}; allowed: a number between 0 and 1, such as 0.999; or None for no average")
    check_optimizer(optimizer)
    inner = optax.with_extra_args_support(optimizer)

    def wide(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))

    def init(params: PyTree) -> EmaState:
        return EmaState(jax.tree.map(wide, params), inner.init(params))

    def update(grads: PyTree, state: EmaState, params: PyTree = None, **extra: Any) -> tuple[PyTree, EmaState]:
        updates, new = inner.update(grads, state.inner, params, **extra)
        after = apply_updates(params, updates)
        ema = jax.tree.map(lambda old, leaf: decay * old + (1 - decay) * wide(leaf), state.ema, after)
        return updates, EmaState(ema, new)

    return optax.GradientTransformationExtraArgs(init, update)


def ema_of(opt_state: EmaState, params: PyTree) -> PyTree:
    """The average of an optimizer by `with_ema`; for frozen parameters, of which there is none, the parameters."""
    frozen = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    return jax.tree.map(lambda ema, leaf: leaf if frozen(ema) else ema, opt_state.ema, params, is_leaf=frozen)
