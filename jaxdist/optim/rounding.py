"""Optimizers with `products_rounded`. Only deterministic steps import it."""

import functools
from typing import Any

import optax

from jaxdist.precision.reproducible import products_rounded
from jaxdist.specs import PyTree


def with_rounded_products(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer with `products_rounded`, outside of loops and conditions (`check_order` refuses those). Of what
    others take besides, it takes the model_state alone."""

    def update(*given: Any, **extra: Any) -> tuple[PyTree, Any]:
        kept = {name: each for name, each in extra.items() if name == "model_state"}
        found: tuple[PyTree, Any] = products_rounded(functools.partial(optimizer.update, **kept))(*given)
        return found

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
