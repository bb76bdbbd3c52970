"""Parameters that patterns of their paths choose."""

import fnmatch
from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec as P
from optax import MaskedNode

from jaxdist.errors import UserError
from jaxdist.specs import STACKED, PyTree, path_name


def fitting(tree: PyTree, patterns: Sequence[str], *, key: str, optional: Sequence[str] = ()) -> PyTree:
    """Whether each leaf's path ("blocks.mlp.up.kernel") fits a pattern ("embed.*"), as a tree of bools. What fits one
    after a "!" ("!head.*") does not. Of several patterns that a path fits, the last counts.

    tree: its leaves may be PartitionSpecs and MaskedNodes, too.
    key: the setting that errors name.
    optional: patterns that may fit no leaf.

    Raises `UserError` if any other pattern fits no leaf.
    """
    if isinstance(patterns, str):
        raise UserError(f"{key}: {patterns!r} is one text; give a list of patterns, [{patterns!r}]")
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, P | MaskedNode))
    names = [path_name(path) for path, _ in leaves]
    for pattern in patterns:
        if pattern not in optional and not any(fnmatch.fnmatchcase(name, pattern.lstrip("!")) for name in names):
            some = pattern.lstrip("!").startswith((f"{STACKED}.[", *(f"{STACKED}.{digit}" for digit in range(10))))
            mend = f"; all blocks are one array: for some, give optimizer.groups {{match: {pattern}, lr: 0}}"
            raise UserError(
                f"{key}: {pattern!r} fits no parameter; allowed: patterns such as {names[0]!r} or "
                f"'{names[0].partition('.')[0]}.*'{mend * some}; parameters: {', '.join(names[:40])}"
            )

    def fits(name: str) -> bool:
        found = [pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern.lstrip("!"))]
        return bool(found) and not found[-1].startswith("!")

    return jax.tree.unflatten(treedef, [fits(name) for name in names])
