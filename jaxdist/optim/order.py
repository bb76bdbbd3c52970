"""The check that the bits of an optimizer do not depend on the layout. Only deterministic steps import it."""

from typing import Any

import jax
import optax

from jaxdist.config.rules.grad_sync import refuse_optimizer
from jaxdist.jaxpr.evaluate import CALLS
from jaxdist.jaxpr.walk import every_equation
from jaxdist.optim.update import call_update
from jaxdist.precision.reproducible import PRODUCTS
from jaxdist.specs import PyTree


def check_order(optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree) -> None:
    """Raise `UserError` for an optimizer whose bits would depend on the layout of sharded parameters.

    Such an optimizer sums over elements of a parameter, or multiplies inside a loop or condition, where
    `with_rounded_products` does not reach.
    """
    if all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params)):
        return
    with jax.numpy_dtype_promotion("standard"):
        jaxpr = jax.make_jaxpr(lambda *given: call_update(optimizer, *given))(params, opt_state, params)
    if found := sorted(_sums(jaxpr)):
        refuse_optimizer(", ".join(found))


def _sums(jaxpr: Any) -> set[str]:
    """Names of the primitives in a jaxpr that add up elements of an array, or multiply inside a loop or condition."""
    found: set[str] = set()
    for site in every_equation(jaxpr):
        name, operands = site.equation.primitive.name, site.equation.invars
        if name in ("reduce_sum", "dot_general", "cumsum", "reduce") and operands[0].aval.size > 1:
            found.add(name)
        around = [each.primitive.name for each in site.inside if each.primitive.name not in CALLS]
        if around and name in PRODUCTS and any(atom.aval.size > 1 for atom in operands):
            found.add(f"{name} inside {around[0]}")
    return found
