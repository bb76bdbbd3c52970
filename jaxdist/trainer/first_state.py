"""The first state of a run: parameters at random, or those that exist already."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxdist.build import Parts
from jaxdist.config.schema import Config
from jaxdist.config.sections.optimizer import LORA
from jaxdist.errors import UserError
from jaxdist.init import init_state
from jaxdist.model import ModelDef
from jaxdist.optim import only_trained
from jaxdist.precision.loss_scale import fresh_guard
from jaxdist.pretrained import open_pretrained
from jaxdist.specs import leaves_by_name
from jaxdist.state import TrainState, shardings_of

_KEY = "init.from"


def first_state(
    config: Config, parts: Parts, mesh: Mesh, order: np.ndarray | None, say: Callable[[str], None]
) -> TrainState:
    """The state of a new run: parameters at random, or those that `init.from` names."""
    if config.init.from_ is None:
        return init_state(parts.model, parts.optimizer, mesh, parts.options)
    return _state_from(config, parts, mesh, order, say)


def _state_from(
    config: Config, parts: Parts, mesh: Mesh, order: np.ndarray | None, say: Callable[[str], None]
) -> TrainState:
    """The state at step 0 with the parameters that `init.from` names, and a new optimizer state.

    order: the block in each row of stacked blocks (`order_of_blocks`); None: the model's order.
    say: gets a line about what is read, and one about what is not.

    Raises `UserError` where they do not fit the model.
    """
    init, target = config.init, parts.target
    assert init.from_ is not None
    if not isinstance(parts.model, ModelDef):
        raise UserError(
            f"{_KEY}: {init.from_!r}, but model.name {config.model.name!r} gives a loss in place of a model, whose"
            " parameters have no names here; load them in your module, and leave init out"
        )

    def fresh(names: frozenset[str]) -> dict[str, jax.Array]:
        whole = init_state(parts.model, parts.optimizer, mesh, parts.options).params
        return {name: leaf for name, leaf in leaves_by_name(whole).items() if name in names}

    partial = (*init.partial, LORA) if config.optimizer.lora.rank else init.partial
    with open_pretrained(init.from_, key=_KEY, ema=init.ema) as found:
        found.check_architecture(config.model.resolved(), init.partial)
        params = found.load(target.params, fresh=fresh, partial=partial, order=order, say=say)
    optimizer = only_trained(parts.optimizer, parts.options.freeze)
    rest = target._replace(params=())

    def others(params: TrainState) -> TrainState:
        residual = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), target.residual)
        made = TrainState(jnp.zeros((), jnp.int32), (), optimizer.init(params), residual)
        return made._replace(guard=fresh_guard())

    return jax.jit(others, out_shardings=shardings_of(rest))(params)._replace(params=params)
