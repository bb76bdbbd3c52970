"""Groups of parameters with learning rates and weight decay of their own: `optimizer.groups`.

They have no state, so that a run can be resumed with other groups. A stacked parameter of blocks can be in several: its
name with the number of a block, "blocks.3.mlp.up.kernel", is matched too.
"""

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist.errors import UserError
from jaxdist.optim.per_block import has_stack
from jaxdist.specs import STACKED, PyTree, path_name

if TYPE_CHECKING:
    from jaxdist.config.sections.optimizer import OptimizerConfig

# In these a parameter is read for its decay alone: each adds weight_decay * parameter, and nothing else reads it.
DECAYING = ("adamw", "sgd", "lion", "muon")
Core = Callable[["OptimizerConfig", Any], optax.GradientTransformation]


def with_groups(
    core: Core, config: "OptimizerConfig", *, mask: Callable[[PyTree], PyTree], order: Sequence[int] = ()
) -> optax.GradientTransformation:
    """The optimizer of a configuration with its groups. Of several groups that fit a parameter, the first counts.

    core: (configuration, mask of weight decay) -> the optimizer.
    mask: of weight decay without groups. A group with a decay of its own decays what it would leave out.
    order: the block in each row of stacked parameters, -1 for none (`order_of_blocks`); () for 0, 1, 2 ...

    Raises `UserError` for a pattern that fits no trained parameter, and for a decay that the optimizer cannot have.
    """
    own_decay = [i for i, group in enumerate(config.groups) if group.decay is not None]
    if own_decay and config.name not in DECAYING:
        raise UserError(
            f"optimizer.groups[{own_decay[0]}].decay: {config.groups[own_decay[0]].decay}, but the decay of"
            f" optimizer.name {config.name!r} is one number; allowed: null; or one of {', '.join(DECAYING)}"
        )

    def factors(params: PyTree, *, check: bool = False) -> tuple[PyTree, PyTree]:
        """(of the updates, of weight decay) for each parameter: numbers, or one for each row of a stack. check: whether
        these are all parameters, so that each group has one."""
        leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
        stacked, used = has_stack(params), set[int]()
        decays = jax.tree.leaves(mask(params))
        found = [
            _of_leaf(path_name(path), leaf, decay, config, order if stacked else None, used)
            for (path, leaf), decay in zip(leaves, decays, strict=True)
        ]
        for i, group in enumerate(config.groups):
            if check and i not in used:
                raise UserError(
                    f"optimizer.groups[{i}].match: {group.match!r} fits no trained parameter that no group before it"
                    f" fits; parameters: {', '.join(path_name(path) for path, _ in leaves[:40])}"
                )
        return tuple(jax.tree.unflatten(treedef, each) for each in zip(*found, strict=True))

    if own_decay:  # a decay of 1 of parameters that are multiplied by theirs
        inner = core(
            replace(config, weight_decay=1.0),
            lambda params: jax.tree.map(lambda decay: bool(np.any(decay)), factors(params)[1]),
        )
    else:
        inner = core(config, mask)
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> Any:
        factors(params, check=True)
        return inner.init(params)

    def update(grads: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        rates, decays = factors(params)
        seen = jax.tree.map(_times, params, decays) if own_decay else params
        updates, state = inner.update(grads, state, seen, **extra)
        return jax.tree.map(_times, updates, rates), state

    return optax.GradientTransformationExtraArgs(init, update)


def _of_leaf(
    name: str, leaf: jax.Array, decays: bool, config: "OptimizerConfig", order: Sequence[int] | None, used: set[int]
) -> tuple[Any, Any]:
    """(factor of the update, weight decay) of one parameter. order: None for a tree without stacked blocks. used: gets
    the groups that it is in."""

    def of(names: Sequence[str]) -> tuple[float, float]:
        usual = config.weight_decay if decays else 0.0
        for i, group in enumerate(config.groups):
            if any(fnmatch.fnmatchcase(each, group.match) for each in names):
                used.add(i)
                rate = 1.0 if group.lr is None else group.lr / config.lr
                return rate, usual if group.decay is None else group.decay
        return 1.0, usual

    unit, _, rest = name.partition(".")
    if order is None or unit != STACKED:
        return of([name])
    rows = np.array([of([name, f"{unit}.{block}.{rest}"]) for block in (order or range(leaf.shape[0]))])
    if (rows == rows[0]).all():
        return float(rows[0, 0]), float(rows[0, 1])
    shape = (-1, *[1] * (leaf.ndim - 1))
    return rows[:, 0].reshape(shape), rows[:, 1].reshape(shape)


def _times(leaf: jax.Array, factor: Any) -> jax.Array:
    return leaf if np.all(factor == 1.0) else leaf * jnp.asarray(factor, leaf.dtype)
