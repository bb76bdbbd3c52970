"""Losses of users, small ones, and steps of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist
from jaxdist.mesh import abstract_mesh


def steps_of(loss: Any, model_state: Any, *, params: Any = None, sizes: Any = None, **options: Any) -> tuple[Any, Any]:
    """(state, step) of a user's loss."""
    mesh, tx = jaxdist.make_mesh(**(sizes or {"data": 2})), optax.sgd(0.1)
    params = {"w": jnp.ones((2, 4))} if params is None else params
    state = jaxdist.init_state(params, tx, mesh, model_state=model_state)
    return state, jaxdist.make_train_step(loss, tx, mesh, **options)


def rows(step: int) -> Any:
    return {"x": np.random.default_rng(step).normal(size=(12, 2)).astype(np.float32)}


def as_numpy(tree: Any) -> Any:
    return jax.tree.map(np.array, jax.device_get(tree))  # copies: the step is given the arrays


def trace(loss: Any, model_state: Any = (), *, params: Any = None, sizes: Any = None, **options: Any) -> Any:
    """The traced step of a loss, on devices that are not there."""
    mesh, tx = abstract_mesh(**(sizes or {"data": 2})), optax.sgd(0.1)
    params = {"w": jnp.ones((2, 4))} if params is None else params
    frozen = {"freeze": options["freeze"]} if "freeze" in options else {}
    target = jaxdist.state_target(params, tx, mesh, model_state=model_state, **frozen)
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), rows(0))
    return jaxdist.make_train_step(loss, tx, mesh, **options).jitted(target).trace(target, batch)


def plain(params: Any, batch: Any, keys: Any) -> Any:
    h = batch["x"] @ params["w"]
    return (h**2).sum(), h.shape[0]


def stateful(new: Any) -> Any:
    """A loss whose new state is new(h, keys, state)."""

    def loss(params: Any, batch: Any, keys: Any, state: Any) -> Any:
        h = batch["x"] @ params["w"]
        return (h**2).sum(), h.shape[0], {}, new(h, keys, state)

    return loss


def returning(result: Any) -> Any:
    """A loss that returns result(h)."""
    return lambda params, batch, keys: result(batch["x"] @ params["w"])
