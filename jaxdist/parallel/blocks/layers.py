"""The stack of blocks: what a block keeps for its backward pass, and how the blocks of a stage run one after the other,
forward and backward, as two functions.

Differentiating the scan over blocks itself would keep, besides activations, a second copy of what each block reads of
its parameters. Here a block keeps its residuals without its parameters, which the backward pass takes from where they
rest: cast or gathered again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from optax import MaskedNode

from jaxdist.parallel.blocks.branch import Choose, work_or_pass
from jaxdist.parallel.blocks.split_backward import Halves, halve
from jaxdist.specs import PyTree

# (diff unit, held unit, None or which leaves are wanted) -> usable unit, with MaskedNodes for what is not wanted.
Gather = Callable[[PyTree, PyTree, PyTree | None], PyTree]
Block = Callable[[PyTree, jax.Array, jax.Array, PyTree], jax.Array]  # (usable unit, h, layer, keys) -> h
# (diff, held, layers, h, keys) -> h, where leaves of diff and held, and layers, are stacked [L, ...].
Stack = Callable[[PyTree, PyTree, jax.Array, jax.Array, PyTree], jax.Array]
AGAIN = "rematted_computation"  # what jax.checkpoint names the forward pass that runs in the backward pass


@jax.tree_util.register_pytree_node_class
class Kept:
    """A function that `jax.vjp` made, without those of its residuals that are parts of the unit: what a block keeps for
    its backward pass, but for its parameters. They are recognised by identity."""

    def __init__(self, pull: Callable[..., Any], unit: PyTree) -> None:
        leaves, self._treedef = jax.tree.flatten(pull)
        places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(unit))}
        self._places = tuple(places.get(id(leaf)) for leaf in leaves)
        self._leaves = [leaf for leaf, place in zip(leaves, self._places, strict=True) if place is None]
        self._unit: Any = jax.tree.structure(unit)

    @property
    def wanted(self) -> PyTree:
        """For each leaf of the unit, whether the backward pass reads it: not a bias, say."""
        count = self._unit.num_leaves
        return jax.tree.unflatten(self._unit, [place in self._places for place in range(count)])

    def __call__(self, unit: PyTree, grad: jax.Array) -> tuple[PyTree, jax.Array]:
        """(gradients of trained leaves, gradient of the block's input), given what is `wanted` of the unit anew."""
        wanted = [place for place, read in enumerate(jax.tree.leaves(self.wanted)) if read]
        given, rest = dict(zip(wanted, jax.tree.leaves(unit), strict=True)), iter(self._leaves)
        leaves = [next(rest) if place is None else given[place] for place in self._places]
        return jax.tree.unflatten(self._treedef, leaves)(grad)

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self._leaves, (self._treedef, self._places, self._unit)

    @classmethod
    def tree_unflatten(cls, aux: Any, leaves: Any) -> "Kept":
        self = object.__new__(cls)
        self._treedef, self._places, self._unit = aux
        self._leaves = list(leaves)
        return self


def trained_leaves(unit: PyTree, diff: PyTree) -> list[jax.Array]:
    """Leaves of the unit that are trained: diff has a MaskedNode in place of the others."""
    kept = jax.tree.map(lambda leaf, part: part if isinstance(part, MaskedNode) else leaf, unit, diff)
    return jax.tree.leaves(kept)


def _with_trained(unit: PyTree, diff: PyTree, trained: list[jax.Array]) -> PyTree:
    """The unit with these in place of its trained leaves."""
    given = iter(trained)
    return jax.tree.map(lambda leaf, part: leaf if isinstance(part, MaskedNode) else next(given), unit, diff)


def at(tree: PyTree, i: jax.Array | int) -> PyTree:
    """Row i of every leaf."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False), tree)


def put(tree: PyTree, i: jax.Array | int, unit: PyTree) -> PyTree:
    """The tree with `unit` as row i of its leaves, in their dtypes."""
    row = lambda leaf, new: lax.dynamic_update_index_in_dim(leaf, new.astype(leaf.dtype), i, 0)  # noqa: E731
    return jax.tree.map(row, tree, unit)


def rows_of(diff: PyTree, held: PyTree) -> int:
    """The number of rows of stacked blocks."""
    return jax.tree.leaves((diff, held))[0].shape[0]


def rounds_of(scan_blocks: int, blocks: int) -> int:
    """What `lax.scan` calls unroll: of so many blocks, those of a round of the loop; all for 0."""
    return min(scan_blocks or blocks, blocks)


class Blocks(NamedTuple):
    """gather: of one unit; what is differentiable in it is what its backward reduces. block: with whatever
    rematerialisation. choose: how rows that hold no block, with 0 in layers, are passed over; None: all hold one.
    unroll: blocks of a round of a loop, as `ModelDef.scan_blocks`."""

    gather: Gather
    block: Block
    choose: Choose | None = None
    unroll: int = 1

    def fetch(
        self, diff: PyTree, held: PyTree, i: jax.Array | int, wanted: PyTree | None = None
    ) -> tuple[PyTree, Callable[..., Any]]:
        """(usable block i, or what is wanted of it; what brings the gradients of its trained leaves back to diff)."""
        own = at(held, i)

        def trained(diff: PyTree) -> tuple[list[jax.Array], PyTree]:
            unit = self.gather(diff, own, wanted)
            return trained_leaves(unit, diff), unit

        found, reduce, unit = jax.vjp(trained, at(diff, i), has_aux=True)
        return _with_trained(unit, diff, found), reduce

    def run(self, unit: PyTree, diff: PyTree, h: jax.Array, layer: jax.Array, keys: PyTree) -> tuple[jax.Array, Kept]:
        """The output of a block, and what it keeps; the gradients are those of the trained leaves."""

        def call(trained: list[jax.Array], h: jax.Array) -> jax.Array:
            return self.block(_with_trained(unit, diff, trained), h, layer, keys)

        h, pull = jax.vjp(call, trained_leaves(unit, diff), h)
        return h, Kept(pull, unit)

    def again(self, diff: PyTree, held: PyTree, i: jax.Array | int, wanted: PyTree) -> PyTree:
        """What the backward pass reads of block i, gathered anew."""
        with jax.named_scope(AGAIN):
            return self.gather(at(diff, i), at(held, i), wanted)

    def in_row(self, layer: jax.Array, work: Callable[[], tuple[PyTree, PyTree]], passing: PyTree) -> Any:
        """work() -> (x, rest) in a row that holds a block, (passing, zeros) in another."""
        return work() if self.choose is None else work_or_pass(self.choose, layer > 0, work, passing)

    def forward(
        self, diff: PyTree, held: PyTree, layers: jax.Array, h: jax.Array, keys: PyTree
    ) -> tuple[jax.Array, PyTree]:
        """(output of the last block, what `backward` needs). Shapes as of a `Stack`."""

        def body(h: jax.Array, i: jax.Array) -> tuple[jax.Array, PyTree]:
            def work() -> tuple[jax.Array, PyTree]:
                unit, reduce = self.fetch(diff, held, i)
                out, kept = self.run(unit, diff, h, layers[i], keys)
                return out, (kept, reduce)

            return self.in_row(layers[i], work, h)

        return lax.scan(body, h, jnp.arange(len(layers)), unroll=rounds_of(self.unroll, len(layers)))

    def backward(
        self, diff: PyTree, held: PyTree, layers: jax.Array, saved: PyTree, dh: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """(gradients with respect to diff, gradient of the first block's input)."""

        def body(dh: jax.Array, own: PyTree) -> tuple[jax.Array, PyTree]:
            i, (kept, reduce) = own

            def work() -> tuple[jax.Array, PyTree]:
                behind, before = kept(self.again(diff, held, i, kept.wanted), dh)
                return before, reduce(behind)[0]

            return self.in_row(layers[i], work, dh)

        unroll = rounds_of(self.unroll, len(layers))
        dh, grads = lax.scan(body, dh, (jnp.arange(len(layers)), saved), reverse=True, unroll=unroll)
        return grads, dh

    def backward_input(
        self, diff: PyTree, held: PyTree, layers: jax.Array, saved: PyTree, dh: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """(what `backward_weights` needs, gradient of the first block's input)."""

        def body(dh: jax.Array, own: PyTree) -> tuple[jax.Array, PyTree]:
            i, (kept, _) = own

            def work() -> tuple[jax.Array, PyTree]:
                return self._halves(kept, diff, held, dh).input(self.again(diff, held, i, kept.wanted), dh)

            return self.in_row(layers[i], work, dh)

        dh, crossing = lax.scan(body, dh, (jnp.arange(len(layers)), saved), reverse=True)
        return crossing, dh

    def backward_weights(
        self, diff: PyTree, held: PyTree, layers: jax.Array, saved: PyTree, crossing: PyTree, like: PyTree
    ) -> PyTree:
        """Gradients with respect to diff. like: of the shape and type of the gradient of the last block's output."""

        def body(_: None, own: PyTree) -> tuple[None, PyTree]:
            i, (kept, reduce), crossing = own

            def work() -> tuple[None, PyTree]:
                halves = self._halves(kept, diff, held, like)
                reads, (wanted, treedef) = iter(halves.reads), jax.tree.flatten(kept.wanted)
                chosen = jax.tree.unflatten(treedef, [yes and next(reads) for yes in wanted])
                behind = halves.weights(jax.tree.leaves(self.again(diff, held, i, chosen)), crossing)
                return None, reduce(behind)[0]

            return self.in_row(layers[i], work, None)

        return lax.scan(body, None, (jnp.arange(len(layers)), saved, crossing))[1]

    def _halves(self, kept: Kept, diff: PyTree, held: PyTree, grad: Any) -> Halves:
        unit = jax.eval_shape(lambda: self.gather(at(diff, 0), at(held, 0), kept.wanted))
        return halve(kept, unit, jax.eval_shape(lambda: grad))
