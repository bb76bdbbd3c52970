"""Flax Linen modules in losses."""

import functools
import inspect
import re
import zlib
from collections.abc import Callable
from typing import Any

import flax
import jax
from flax import linen

from jaxdist.errors import UserError
from jaxdist.parallel.modules.batch_norm import normalise
from jaxdist.parallel.modules.module_loss import ModuleLoss, call_user, module_kind
from jaxdist.specs import PyTree, leaves_by_name


def linen_loss(
    module: linen.Module,
    variables: PyTree,
    fn: Callable[..., tuple[Any, ...]],
    *,
    per_sample: bool = False,
    sync: bool = True,
    streams: tuple[str, ...] = ("dropout",),
    evaluation: Callable[..., tuple[Any, ...]] | None = None,
) -> ModuleLoss:
    """The loss of a Flax Linen module, to give to `init_state` and `make_train_step`.

    The collection "params" is trained, the others are the model_state. Random streams are seeded at every step, each by
    another key. `linen.BatchNorm` takes the statistics of all devices' rows.

    variables: of `module.init`.
    fn: (module, batch) -> (sum of losses, weight), or with metrics (sum, weight, {"accuracy": (sum, weight)}). The
        module is bound: it is called as `module(batch["x"], train=True)`. If fn has an argument `keys`, it is given the
        step's keys, one a row.
    per_sample, sync: as in `nnx_loss`.
    streams: names of the random streams that the module asks for by `make_rng`.
    evaluation: fn of evaluations, which calls `module(batch["x"], train=False)`; by default fn itself.

    >>> from flax import linen as nn
    >>> model = nn.Sequential([nn.Dense(8), nn.BatchNorm(use_running_average=False)])
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 4)))
    >>> loss = jaxdist.linen_loss(model, variables, lambda model, batch: ((model(batch) ** 2).sum(), len(batch)))
    >>> mesh, tx = jaxdist.make_mesh(fsdp=8), optax.sgd(0.1)
    >>> state = jaxdist.init_state(loss, tx, mesh, strategy="zero3")
    >>> step = jaxdist.make_train_step(loss, tx, mesh, strategy="zero3")
    >>> state, metrics = step(state, np.eye(8, 4, dtype=np.float32))
    >>> jax.tree.map(jnp.shape, state.model_state)
    {'batch_stats': {'layers_1': {'mean': (8,), 'var': (8,)}}}
    """
    if not isinstance(module, linen.Module):
        raise UserError(
            f"linen_loss: module is {module_kind(module)}; allowed: a linen.Module that is made, such as MLP()"
        )
    params, carried = _taken_apart(variables)

    def run(of: Any, params: PyTree, batch: PyTree, keys: jax.Array | None, model_state: PyTree) -> Any:
        # Each by its own name: `nn.scan` and `nn.vmap` split streams by their names.
        seeds = None if keys is None else {name: _named_key(keys[0], name) for name in streams}
        bound = module.bind({"params": params, **model_state}, rngs=seeds, mutable=list(model_state))
        with linen.intercept_methods(lambda *given: _intercepted(*given, sync=sync)):
            try:
                result = call_user(of, bound, batch, keys)
            except flax.errors.InvalidRngError as error:
                raise UserError(_missing_stream(str(error), streams, seeded=keys is not None)) from error
        found = flax.core.unfreeze(dict(bound.variables))
        new = {name: found[name] for name in model_state}
        _check_grown(new, model_state)
        return result, new

    parts: dict[str, Any] = {"params": params, "model_state": carried, "per_sample": per_sample}
    other = evaluation and ModuleLoss(functools.partial(run, evaluation), **parts)
    return ModuleLoss(functools.partial(run, fn), **parts, evaluation=other)


def _taken_apart(variables: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """(params, the other collections by name) of the variables of a module."""
    if "params" not in variables:
        raise UserError(
            f"linen_loss: variables has {', '.join(sorted(variables)) or 'nothing'}, and no params; allowed: what"
            " module.init(key, x) returns"
        )
    carried: dict[str, Any] = dict(flax.core.unfreeze(linen.meta.unbox(variables)))
    carried.pop("intermediates", None)  # what `init` has collected
    return carried.pop("params"), carried


def _check_grown(found: PyTree, given: PyTree) -> None:
    """Raise `UserError` for variables that a call has made."""
    for name in given:
        if leaves_by_name(found[name]).keys() != leaves_by_name(given[name]).keys():
            raise UserError(
                f"linen_loss: a call adds to the collection {name}, as `sow` does, and a step carries what is there"
                f" before; return it from __call__, and leave {name} out of variables"
            )


def _named_key(key: jax.Array, name: str) -> jax.Array:
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def _missing_stream(message: str, streams: tuple[str, ...], *, seeded: bool) -> str:
    """What to do about an `InvalidRngError`."""
    asked = re.search(r'needs PRNG for "(.*?)"', message)
    name = asked[1] if asked else "params"
    if not seeded:
        return f"linen_loss: the module asks for a random stream {name!r}, and no keys are given; give keys, one a row"
    return (
        f"linen_loss: the module asks for a random stream {name!r}; given: {', '.join(streams) or 'none'}; add it:"
        f" linen_loss(module, variables, fn, streams={(*streams, name)})"
    )


def _intercepted(
    method: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], context: Any, *, sync: bool
) -> Any:
    """A method's result; that of BatchNorm's own `__call__`, which a subclass may call too, by `normalise`."""
    if context.orig_method.func is inspect.unwrap(linen.BatchNorm.__call__):
        return _batch_norm(context.module, *args, **options, sync=sync)
    return method(*args, **options)


def _batch_norm(
    layer: linen.BatchNorm,
    x: jax.Array,
    use_running_average: bool | None = None,
    *,
    mask: jax.Array | None = None,
    sync: bool,
) -> jax.Array:
    """`linen.BatchNorm.__call__` on variables that are there."""
    use_running = linen.merge_param("use_running_average", layer.use_running_average, use_running_average)
    if not layer.has_variable("batch_stats", "mean"):
        raise UserError(
            f"linen_loss: variables hold no batch_stats of {'.'.join(layer.path) or 'the module'}; allowed: all that"
            " module.init(key, x) returns, not its params alone"
        )
    running: list[Any] = [layer.variable("batch_stats", name) for name in ("mean", "var")]
    scale, bias = (
        layer.param(name, init, running[0].value.shape, layer.param_dtype) if used else None
        for name, init, used in (
            ("scale", layer.scale_init, layer.use_scale),
            ("bias", layer.bias_init, layer.use_bias),
        )
    )
    y, new = normalise(
        layer, x, (running[0].value, running[1].value), (scale, bias), use_running=use_running, mask=mask, sync=sync
    )
    if not use_running:
        for variable, value in zip(running, new, strict=True):
            variable.value = value
    return y
