"""The optimizer of a configuration, and its learning rates."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist import registry
from jaxdist.config.resolve import warmup_of
from jaxdist.errors import UserError
from jaxdist.optim.muon import muon
from jaxdist.optim.norms import clip_by_ordered_norm
from jaxdist.optim.per_block import adafactor, has_stack
from jaxdist.specs import STACKED, PyTree

if TYPE_CHECKING:
    from jaxdist.config.sections.optimizer import OptimizerConfig

_HERE = "jaxdist.optim.make"  # where a registry would be: these entries are no files
NOT_DECAYED = ("bias", "scale")  # also those of experts and heads, which have several dims


def learning_rate(config: "OptimizerConfig", steps: int) -> optax.Schedule:
    """The learning rate schedule: linear warm-up to `lr`, then `cosine`, `linear`, `constant`, or somebody else's.

    Cosine and linear end at `final_lr_ratio * lr` at the last step.
    """

    def own() -> optax.Schedule:
        key = "optimizer.schedule"
        made = registry.function(_HERE, config.schedule, config, key=key, steps=after)(config, steps=after)
        if not callable(made):
            raise UserError(f"{key}: {config.schedule!r} gives a {type(made).__name__}; allowed: step -> learning rate")
        return lambda count: made(jnp.asarray(count, jnp.int32))

    warmup = warmup_of(config.warmup_steps, steps)
    after, final = max(1, steps - warmup - 1), config.lr * config.final_lr_ratio
    tail = {
        "cosine": lambda: optax.cosine_decay_schedule(config.lr, after, alpha=config.final_lr_ratio),
        "linear": lambda: optax.linear_schedule(config.lr, final, after),
        "constant": lambda: optax.constant_schedule(config.lr),
    }.get(config.schedule, own)()
    # Step 0 must change the parameters, so it has lr / warmup, the first of so many equal rises.
    rise = optax.linear_schedule(config.lr / max(1, warmup), config.lr, max(1, warmup - 1))
    schedule = optax.join_schedules([rise, tail], [warmup]) if warmup else tail
    # An integer divided by another is a float32, also where floats have 64 bits (`jaxdist verify`).
    return lambda count: schedule(jnp.asarray(count, float))


def learning_rates(config: "OptimizerConfig", steps: int) -> np.ndarray:
    """The learning rate of every step, [steps], on the host: metrics must not wait for the device."""
    with jax.numpy_dtype_promotion("standard"):  # for schedules of one's own
        return np.asarray(jax.vmap(learning_rate(config, steps))(jnp.arange(steps)), np.float64)


def decay_mask(params: PyTree) -> PyTree:
    """The mask of weight decay: true for matrices and tables, false for vectors, also those of stacked blocks."""
    stacked = has_stack(params)

    def decays(path: tuple[Any, ...], leaf: Any) -> bool:
        names = [getattr(key, "key", None) for key in path]
        dims = leaf.ndim - (stacked and names[0] == STACKED)
        return (not path or names[-1] not in NOT_DECAYED) and dims >= 2

    return jax.tree_util.tree_map_with_path(decays, params)


def _core(config: "OptimizerConfig", rate: optax.Schedule, mask: Any = decay_mask) -> optax.GradientTransformation:
    decay: dict[str, Any] = {"weight_decay": config.weight_decay, "mask": mask}
    makers: dict[str, Callable[[], optax.GradientTransformation]] = {
        "adamw": lambda: optax.adamw(rate, config.b1, config.b2, config.eps, **decay),
        "lion": lambda: optax.lion(rate, config.b1, config.b2, **decay),
        "sgd": lambda: optax.chain(optax.add_decayed_weights(**decay), optax.sgd(rate, config.momentum or None)),
        "adafactor": lambda: adafactor(rate, **decay),
        "muon": lambda: muon(
            rate, beta=config.momentum, adam_b1=config.b1, adam_b2=config.b2, adam_eps=config.eps, **decay
        ),
    }
    if "." in config.name:
        return registry.make(
            _HERE, config.name, optax.GradientTransformation, config, key="optimizer.name", learning_rate=rate
        )
    if config.name not in makers:
        raise UserError(f"optimizer.name: {config.name!r} is not known; allowed: {', '.join(makers)}")
    return makers[config.name]()


def make_optimizer(
    config: "OptimizerConfig", *, steps: int, deterministic: bool = False, order: Sequence[int] = ()
) -> optax.GradientTransformation:
    """The optimizer of a configuration: clipping by global norm (unless `clip_norm` is 0), then the update.

    steps: the length of the learning rate schedule.
    deterministic: clip by `ordered_norm`.
    order: the block in each row of stacked parameters, for `optimizer.groups` (`order_of_blocks`); () for 0, 1, 2 ...

    >>> optimizer = jaxdist.make_optimizer(jaxdist.Config().optimizer, steps=100)
    >>> len(jax.tree.leaves(optimizer.init({"w": jnp.ones((4, 4))})))  # two moments and two counts
    4
    """
    rate = learning_rate(config, steps)
    if config.groups:
        from jaxdist.optim.groups import with_groups

        core = with_groups(lambda config, mask: _core(config, rate, mask), config, mask=decay_mask, order=order)
    else:
        core = _core(config, rate)
    clip = clip_by_ordered_norm if deterministic else optax.clip_by_global_norm
    return optax.chain(clip(config.clip_norm), core) if config.clip_norm else core
