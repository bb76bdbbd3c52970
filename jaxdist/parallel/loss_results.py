"""What a user's loss is called with and returns: the rules, and one line for each way to break them."""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxdist.errors import UserError
from jaxdist.model import check_metric_name
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import PyTree, leaves_by_name

_METRICS = '{"accuracy": (correct.sum(), correct.size)}'
_PAIR = f"(sum, weight, {_METRICS})"


class LossResults(NamedTuple):
    """The results of a user's loss, but for the sum of losses: without gradients, sums in at least fp32.

    metrics: {name: (sum, weight)}
    model_state: as it was given
    """

    weight: jax.Array
    metrics: dict[str, tuple[jax.Array, jax.Array]]
    model_state: PyTree


def check_call(loss_fn: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Raise `UserError` unless the function takes as many arguments."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # of a builtin: the call itself will tell
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        wanted = ", ".join(("params", "batch", "keys", "model_state")[: len(arguments)])
        state = "" if len(arguments) == 4 else "; with a state, give it to init_state(..., model_state=)"
        raise UserError(
            f"loss_fn: takes {signature}, but is called with ({wanted}); write def loss_fn({wanted}), where keys holds"
            f" a random key a row, for dropout{state}"
        ) from None


def read_results(result: Any, model_state: PyTree) -> tuple[jax.Array, LossResults]:
    """(sum of losses, the other results) of a user's loss.

    model_state: the one that it was given; one without leaves is not returned.
    """
    stateful = bool(jax.tree.leaves(model_state))
    check_form(result, stateful=stateful)
    total, new = jnp.asarray(result[0]), result[3] if stateful else model_state
    if not jnp.issubdtype(total.dtype, jnp.floating):
        raise UserError(f"loss_fn: the sum of losses is {total.dtype}; allowed: a float, such as losses.sum()")
    wide, metrics = accumulation_dtype(total.dtype), result[2] if len(result) > 2 else {}
    check_metrics(metrics, of="loss_fn")
    weight, metrics = jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(wide), (result[1], metrics))
    _check_state(new, model_state)
    new = jax.tree.map(jnp.asarray, new)
    return total.astype(wide), jax.lax.stop_gradient(LossResults(_constant(weight), metrics, new))


@jax.custom_jvp
def _constant(weight: jax.Array) -> jax.Array:
    """The weight, through which no gradient flows. Where one would, a line says so."""
    return weight


def _differentiated(primals: tuple[jax.Array], tangents: tuple[Any]) -> tuple[jax.Array, jax.Array]:
    if not isinstance(tangents[0], SymbolicZero):
        _tell_constant()
    return primals[0], jnp.zeros_like(primals[0])


_constant.defjvp(_differentiated, symbolic_zeros=True)


@functools.cache  # once
def _tell_constant() -> None:
    logging.getLogger("jaxdist").warning(
        "loss_fn: the weight depends on parameters, or comes from a custom_vjp, and no gradient flows through it; let"
        " it count rows, and divide in the loss, by jaxdist.batch_mean(losses, weights) (docs/own_loss.md);"
        " jax.lax.stop_gradient(weight) says that it is meant"
    )


def in_state(name: str) -> str:
    """What messages call a leaf of the model_state. name: its path, empty where the state is one array."""
    return f"model_state.{name}" if name else "model_state"


def _is_scalar(x: Any) -> bool:
    return isinstance(x, int | float | np.generic | np.ndarray | jax.Array) and not np.ndim(x)


def check_form(result: Any, *, stateful: bool) -> None:
    """Raise `UserError` for another number of results than a loss returns, with a state or without."""
    parts = result if isinstance(result, tuple) else ()
    if len(parts) == 2 and any(isinstance(part, dict | list | tuple) for part in parts):
        raise UserError(f"loss_fn: returned (loss, aux); allowed: {_PAIR}: sums over this shard's rows, no means")
    if stateful and len(parts) != 4:
        raise UserError(
            f"loss_fn: was given a model_state and returned {len(parts) or 1} values; allowed:"
            " (sum of losses, weight, metrics, new model_state), where metrics may be {}"
        )
    if not stateful and len(parts) == 4:
        raise UserError(
            "loss_fn: returned four values, but the state has no model_state; give it to init_state(..., model_state=),"
            " or return (sum of losses, weight, metrics)"
        )
    if len(parts) not in (2, 3, 4) or not all(map(_is_scalar, parts[:2])):
        raise UserError("loss_fn: must return two scalars (sum of losses, weight); say losses.sum(), losses.size")


def check_metrics(metrics: Any, *, of: str) -> None:
    """Raise `UserError` unless the metrics are pairs of scalars, by names that are free. of: what returned them."""
    if not isinstance(metrics, dict) or not all(isinstance(name, str) for name in metrics):
        raise UserError(f"{of}: gave metrics of type {type(metrics).__name__}; allowed: a dict, as in {_METRICS}")
    for name, pair in metrics.items():
        check_metric_name(name, of=of)
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(map(_is_scalar, pair)):
            raise UserError(
                f"{of}: metric {name!r} must be two scalars, (sum over this shard's rows, weight); as in {_METRICS}"
            )


def _check_state(new: PyTree, old: PyTree) -> None:
    """Raise `UserError` unless the new state has the structure, shapes and dtypes of the old one."""
    given, found = leaves_by_name(old), leaves_by_name(new)
    for name in sorted(given.keys() ^ found.keys()):
        side = "returned" if name in found else "given"
        raise UserError(f"loss_fn: {in_state(name)} was only {side}; return the state with the leaves that it had")
    kinds: list[Any] = [jax.tree.structure(tree) for tree in (new, old)]
    if kinds[0] != kinds[1]:
        raise UserError("loss_fn: the new model_state is another kind of tree than the given one; return the same kind")
    for name, leaf in found.items():
        is_, was = (f"{x.dtype}{list(x.shape)}" for x in (jnp.asarray(leaf), given[name]))
        if is_ != was:
            raise UserError(f"loss_fn: {in_state(name)} was given as {was} and returned as {is_}; return it as it was")
