"""Updates of parameters by any optimizer: of those that are trained, and with the same bits in every layout."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from jaxdist.config.rules.grad_sync import refuse_optimizer
from jaxdist.errors import UserError
from jaxdist.precision.reproducible import PRODUCTS, products_rounded
from jaxdist.specs import PyTree, fitting, path_name

Rules = Mapping[str, Callable[[jax.Array], jax.Array]]  # by path, see `ModelDef.update_rules`


def leave_out(tree: PyTree, patterns: Sequence[str]) -> PyTree:
    """The tree with a MaskedNode (optax) for every leaf whose path ("blocks.mlp.up.kernel") fits a pattern ("embed.*").

    tree: its leaves may be PartitionSpecs, too. Raises `UserError` if a pattern fits no leaf, or if no leaf remains.
    """
    frozen = fitting(tree, patterns, key="optimizer.freeze")
    if patterns and len(found := {*jax.tree.leaves(frozen)}) == 1:
        mend = "leaves nothing to train; leave one of them out" if True in found else "freezes nothing; put '*' first"
        raise UserError(f"optimizer.freeze: {', '.join(patterns)} {mend}")
    return jax.tree.map(lambda out, leaf: optax.MaskedNode() if out else leaf, frozen, tree)


def optimized(tree: PyTree, rules: Rules) -> PyTree:
    """The tree with a MaskedNode for every leaf with an update rule of its own. A gradient of one is none."""
    if not rules:
        return tree
    masked = lambda path, leaf: optax.MaskedNode() if path_name(path) in rules else leaf  # noqa: E731
    return jax.tree_util.tree_map_with_path(masked, tree)


def only_trained(
    optimizer: optax.GradientTransformation,
    patterns: Sequence[str],
    rules: Rules | None = None,
    *,
    rounded: bool = False,
) -> optax.GradientTransformation:
    """The optimizer for a tree with frozen parameters, and with some that have a rule of their own. It has no state for
    parameters that fit a pattern or have a rule, and these count in no norm.

    rules: by path, "gradient" -> update. A frozen parameter stays, whatever its rule.
    rounded: `with_rounded_products`.
    """
    optimizer = with_rounded_products(optimizer) if rounded else optimizer
    if not patterns and not rules:
        return optimizer
    inner, own = optax.with_extra_args_support(optimizer), rules or {}
    seen = lambda tree: optimized(leave_out(tree, patterns), own)  # noqa: E731

    def update(grads: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        trained = None if params is None else seen(params)
        updates, state = inner.update(seen(grads), state, trained, **extra)

        def chosen(path: tuple[Any, ...], grad: Any, update: Any) -> Any:
            rule = None if isinstance(grad, optax.MaskedNode) else own.get(path_name(path))
            return update if rule is None else rule(grad)

        return _map_masked(chosen, leave_out(grads, patterns), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(seen(params)), update)


def _map_masked(function: Callable[..., Any], tree: PyTree, other: PyTree) -> PyTree:
    """`tree_map_with_path` in which a MaskedNode is a leaf, of both trees."""
    masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=masked)
    others = jax.tree.leaves(other, is_leaf=masked)
    return jax.tree.unflatten(treedef, [function(*leaf, own) for leaf, own in zip(leaves, others, strict=True)])


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
