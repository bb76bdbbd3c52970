"""Updates of parameters by any optimizer: of those that are trained, and with the same bits in every layout."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from jaxdist.config.rules.fields import check_argument
from jaxdist.errors import UserError
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
    """Raise `UserError` for what is no optimizer of optax, such as a function that makes one, or needs the loss."""
    check_argument("optimizer", optimizer, hasattr(optimizer, "init") and hasattr(optimizer, "update"))
    taken = inspect.signature(optimizer.update).parameters.values()  # a chain's hide what its members need
    needs = [each.name for each in taken if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    if needs and needs != ["shardings"]:
        from jaxdist.config.wrong_calls import refuse_needs

        refuse_needs(needs)


def call_update(optimizer: Any, grads: PyTree, opt_state: Any, params: PyTree, **extra: Any) -> tuple[PyTree, Any]:
    """`optimizer.update`, with those extra arguments that all take that are given them: a chain hands on all it gets.

    Raises `UserError` for one that needs others.
    """
    try:
        found: tuple[PyTree, Any] = optax.with_extra_args_support(optimizer).update(grads, opt_state, params, **extra)
    except TypeError as error:
        if missing := re.search(r"update\w*\(\) missing .* required keyword-only arguments?: (.*)", str(error)):
            from jaxdist.config.wrong_calls import refuse_needs

            refuse_needs(re.findall(r"'(\w+)'", missing[1]), error)
        unknown = re.search(r"got an unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in extra:
            raise
        extra.pop(unknown[1])
        return call_update(optimizer, grads, opt_state, params, **extra)
    return found


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
    if rounded:
        from jaxdist.optim.rounding import with_rounded_products  # of deterministic steps alone

        optimizer = with_rounded_products(optimizer)
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
