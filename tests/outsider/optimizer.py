"""An optimizer, and a learning rate after the warm-up: constant, then linear to 0."""

from typing import Any

import optax


def momentum(config: Any, *, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(optax.trace(config.momentum), optax.scale_by_learning_rate(learning_rate))


def stable_decay(config: Any, *, steps: int) -> optax.Schedule:
    fall = optax.linear_schedule(config.lr, 0.0, steps // 2)
    return optax.join_schedules([optax.constant_schedule(config.lr), fall], [steps - steps // 2])


def no_optimizer(config: Any, *, learning_rate: optax.Schedule) -> float:
    return 0.1


def no_schedule(config: Any, *, steps: int) -> float:
    return 0.1
