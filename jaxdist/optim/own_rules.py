"""Parameters that no optimizer updates, but a rule of their own does: biases and counts of experts."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from jaxdist.specs import PyTree, path_name


def with_rules(
    optimizer: optax.GradientTransformation, rules: Mapping[str, Callable[[jax.Array], jax.Array]]
) -> optax.GradientTransformation:
    """The optimizer, which neither sees nor keeps a state for parameters that have a rule: no norm, decay or moment has
    them.

    rules: by path ("blocks.mlp.router.bias"), "gradient" -> update. A frozen parameter, a MaskedNode among the
        gradients, stays.
    """
    inner = optax.with_extra_args_support(optimizer)
    masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731

    def others(tree: PyTree) -> PyTree:
        left = lambda path, leaf: optax.MaskedNode() if path_name(path) in rules else leaf  # noqa: E731
        return jax.tree_util.tree_map_with_path(left, tree)

    def update(grads: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        updates, state = inner.update(others(grads), state, None if params is None else others(params), **extra)
        leaves, treedef = jax.tree_util.tree_flatten_with_path(grads, is_leaf=masked)
        found = [
            own if masked(grad) or path_name(path) not in rules else rules[path_name(path)](grad)
            for (path, grad), own in zip(leaves, jax.tree.leaves(updates, is_leaf=masked), strict=True)
        ]
        return jax.tree.unflatten(treedef, found), state

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(others(params)), update)
