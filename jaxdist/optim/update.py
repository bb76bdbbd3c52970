"""Updates of parameters by any optimizer: of those that are trained, and with the same bits in every layout."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from jaxdist.config.rules.fields import check_argument
from jaxdist.config.rules.grad_sync import refuse_optimizer
from jaxdist.errors import UserError
from jaxdist.precision.reproducible import PRODUCTS, products_rounded
from jaxdist.specs import PyTree


def leave_out(tree: PyTree, patterns: Sequence[str]) -> PyTree:
    """The tree with a MaskedNode (optax) for every leaf whose path ("blocks.mlp.up.kernel") fits a pattern ("embed.*").

    tree: its leaves may be PartitionSpecs, too. Raises `UserError` if a pattern fits no leaf, or if no leaf remains.
    """
    if not patterns and not isinstance(patterns, str):
        return tree
    from jaxdist.optim.patterns import fitting  # of frozen parameters alone

    frozen = fitting(tree, patterns, key="optimizer.freeze")
    if len(found := {*jax.tree.leaves(frozen)}) == 1:
        mend = "leaves nothing to train; leave one of them out" if True in found else "freezes nothing; put '*' first"
        raise UserError(f"optimizer.freeze: {', '.join(patterns)} {mend}")
    return jax.tree.map(lambda out, leaf: optax.MaskedNode() if out else leaf, frozen, tree)


def check_optimizer(optimizer: Any) -> None:
    """Raise `UserError` for what is no optimizer of optax, such as a function that makes one."""
    check_argument("optimizer", optimizer, hasattr(optimizer, "init") and hasattr(optimizer, "update"))


def only_trained(
    optimizer: optax.GradientTransformation,
    patterns: Sequence[str],
    rules: Mapping[str, Callable[[jax.Array], jax.Array]] | None = None,
    *,
    rounded: bool = False,
) -> optax.GradientTransformation:
    """The optimizer for a tree with frozen parameters. It has no state for parameters that fit a pattern.

    rules: of parameters that it does not update (`ModelDef.update_rules`). rounded: `with_rounded_products`.
    """
    check_optimizer(optimizer)
    optimizer = with_rounded_products(optimizer) if rounded else optimizer
    if rules:
        from jaxdist.optim.own_rules import with_rules  # of experts alone

        optimizer = with_rules(optimizer, rules)
    if not patterns:
        return optimizer
    inner = optax.with_extra_args_support(optimizer)

    def update(grads: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        trained = None if params is None else leave_out(params, patterns)
        return inner.update(leave_out(grads, patterns), state, trained, **extra)

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(leave_out(params, patterns)), update)


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """The parameters after `optax.apply_updates`. A parameter whose update is a MaskedNode does not change."""

    def one(update: Any, param: jax.Array) -> jax.Array:
        return param if isinstance(update, optax.MaskedNode) else optax.apply_updates(param, update)

    return jax.tree.map(one, updates, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode))


def with_rounded_products(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer with `products_rounded`, outside of loops and conditions (`check_order` refuses those)."""
    return optax.GradientTransformation(optimizer.init, products_rounded(optimizer.update))


def check_order(optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree) -> None:
    """Raise `UserError` for an optimizer whose bits would depend on the layout of sharded parameters.

    Such an optimizer sums over elements of a parameter, or multiplies inside a loop or condition, where
    `with_rounded_products` does not reach.
    """
    if all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params)):
        return
    with jax.numpy_dtype_promotion("standard"):
        jaxpr = jax.make_jaxpr(optimizer.update)(params, opt_state, params)
    if found := sorted(_sums(jaxpr)):
        refuse_optimizer(", ".join(found))


def _sums(jaxpr: Any) -> set[str]:
    """Names of the primitives in a jaxpr that add up elements of an array, or multiply inside a loop or condition."""
    from jaxdist.jaxpr.evaluate import CALLS  # only deterministic steps come here
    from jaxdist.jaxpr.walk import every_equation

    found: set[str] = set()
    for site in every_equation(jaxpr):
        name, operands = site.equation.primitive.name, site.equation.invars
        if name in ("reduce_sum", "dot_general", "cumsum", "reduce") and operands[0].aval.size > 1:
            found.add(name)
        around = [each.primitive.name for each in site.inside if each.primitive.name not in CALLS]
        if around and name in PRODUCTS and any(atom.aval.size > 1 for atom in operands):
            found.add(f"{name} inside {around[0]}")
    return found
