"""Flax Linen modules in losses."""

from collections.abc import Callable
from typing import Any

import flax
import jax
from flax import linen

from jaxdist.errors import UserError
from jaxdist.parallel.modules.batch_norm import normalise
from jaxdist.parallel.modules.module_loss import ModuleLoss, call_user
from jaxdist.specs import PyTree


def linen_loss(
    module: linen.Module,
    variables: PyTree,
    fn: Callable[..., tuple[Any, ...]],
    *,
    per_sample: bool = False,
    sync: bool = True,
) -> ModuleLoss:
    """The loss of a Flax Linen module, to give to `init_state` and `make_train_step`.

    The collection "params" is trained, the others are the model_state. Random streams of all names are seeded at every
    step. `linen.BatchNorm` takes the statistics of all devices' rows.

    variables: of `module.init`.
    fn: (module, batch) -> (sum of losses, weight), or with metrics (sum, weight, {"accuracy": (sum, weight)}). The
        module is bound: it is called as `module(batch["x"], train=True)`. If fn has an argument `keys`, it is given the
        step's keys, one a row.
    per_sample, sync: as in `nnx_loss`.

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
    if "params" not in variables:
        raise UserError(
            f"linen_loss: variables has {', '.join(sorted(variables)) or 'nothing'}, and no params; allowed: what"
            " module.init(key, x) returns"
        )
    carried: dict[str, Any] = dict(flax.core.unfreeze(linen.meta.unbox(variables)))
    carried.pop("intermediates", None)  # what `init` has collected
    params = carried.pop("params")

    def run(params: PyTree, batch: PyTree, keys: jax.Array | None, model_state: PyTree) -> Any:
        # Streams of other names fall back to this one, and fold in their module's path and their count.
        streams = None if keys is None else {"params": keys[0]}
        bound = module.bind({"params": params, **model_state}, rngs=streams, mutable=list(model_state))
        with linen.intercept_methods(lambda *given: _intercepted(*given, sync=sync)):
            result = call_user(fn, bound, batch, keys)
        found = flax.core.unfreeze(dict(bound.variables))
        return result, {name: found[name] for name in model_state}

    return ModuleLoss(run, params, carried, per_sample=per_sample)


def _intercepted(
    method: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], context: Any, *, sync: bool
) -> Any:
    """A method's result; that of BatchNorm by `normalise`."""
    if isinstance(context.module, linen.BatchNorm) and context.method_name == "__call__":
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
