"""The stack of blocks with its communication one block away from its computation (`parallel.prefetch`).

While block i computes, block i + 1 is gathered, and in the backward pass block i - 1, while the gradient of block
i + 1 is reduced: nothing in an iteration of either loop waits for a collective of the same iteration, so a scheduler
can run them side by side. Differentiating a scan would gather each block right before its first use. Costs one more
gathered block and one more block's gradients; saves a gather, since the last block is kept for the backward pass, which
starts with it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from optax import MaskedNode

from jaxdist.collectives import zeros_varying_like
from jaxdist.parallel.remat import after
from jaxdist.specs import only

PyTree = Any
# (diff unit, held unit, None or which leaves are wanted) -> usable unit, with MaskedNodes for what is not wanted.
Gather = Callable[[PyTree, PyTree, PyTree | None], PyTree]
Block = Callable[[PyTree, jax.Array, jax.Array, PyTree], jax.Array]  # (usable unit, h, layer, keys) -> h
# (diff, held, h, layers, keys) -> h, where leaves of diff and held, and layers, are stacked [L, ...].
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


def _trained(unit: PyTree, diff: PyTree) -> list[jax.Array]:
    """Leaves of the unit that are trained: diff has a MaskedNode in place of the others."""
    kept = jax.tree.map(lambda leaf, part: part if isinstance(part, MaskedNode) else leaf, unit, diff)
    return jax.tree.leaves(kept)


def _with_trained(unit: PyTree, diff: PyTree, trained: list[jax.Array]) -> PyTree:
    """The unit with these in place of its trained leaves."""
    given = iter(trained)
    return jax.tree.map(lambda leaf, part: leaf if isinstance(part, MaskedNode) else next(given), unit, diff)


def _at(tree: PyTree, i: jax.Array | int) -> PyTree:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False), tree)


def _put(tree: PyTree, i: jax.Array | int, unit: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, new: lax.dynamic_update_index_in_dim(leaf, new, i, 0), tree, unit)


def prefetched(gather: Gather, block: Block, last: Block) -> Stack:
    """The stack of blocks, differentiable once, with respect to diff and h.

    What is differentiable in `gather` is what its backward reduces. block: with whatever rematerialisation. last: the
    same, where it stands outside a loop.
    """
    rules = _Rules(gather, block, last)
    stack = jax.custom_vjp(lambda *arguments: rules.forward(*arguments)[0])
    stack.defvjp(rules.forward, rules.backward)
    return stack


class _Rules(NamedTuple):
    gather: Gather
    block: Block
    last: Block

    def fetch(self, diff: PyTree, held: PyTree, i: jax.Array | int) -> tuple[PyTree, Callable[..., Any]]:
        """(usable block i, what brings the gradients of its trained leaves back to diff)."""
        own = _at(held, i)

        def trained(diff: PyTree) -> tuple[list[jax.Array], PyTree]:
            unit = self.gather(diff, own, None)
            return _trained(unit, diff), unit

        found, reduce, unit = jax.vjp(trained, _at(diff, i), has_aux=True)
        return _with_trained(unit, diff, found), reduce

    def run(
        self, block: Block, unit: PyTree, diff: PyTree, h: jax.Array, layer: jax.Array, keys: PyTree
    ) -> tuple[jax.Array, Kept]:
        """The output of a block, and what it keeps; the gradients are those of the trained leaves."""

        def call(trained: list[jax.Array], h: jax.Array) -> jax.Array:
            return block(_with_trained(unit, diff, trained), h, layer, keys)

        h, pull = jax.vjp(call, _trained(unit, diff), h)
        return h, Kept(pull, unit)

    def forward(
        self, diff: PyTree, held: PyTree, h: jax.Array, layers: jax.Array, keys: PyTree
    ) -> tuple[jax.Array, PyTree]:
        def body(carry: PyTree, i: jax.Array) -> tuple[PyTree, PyTree]:
            h, unit = carry
            following, reduce_following = self.fetch(diff, held, i + 1)
            h, kept = self.run(self.block, unit, diff, h, layers[i], keys)
            return (h, following), (kept, reduce_following)

        unit, reduce_first = self.fetch(diff, held, 0)
        inner = None
        if len(layers) > 1:
            (h, unit), inner = lax.scan(body, (h, unit), jnp.arange(len(layers) - 1))
        h, end = self.run(self.last, unit, diff, h, layers[-1], keys)
        return h, (diff, held, inner, end, only(end.wanted, unit), reduce_first)

    def backward(self, residuals: PyTree, dh: jax.Array) -> tuple[PyTree, None, jax.Array, None, None]:
        diff, held, inner, end, unit, reduce_first = residuals
        wanted = None if inner is None else inner[0].wanted  # the same in all blocks
        count = jax.tree.leaves((diff, held))[0].shape[0]
        grads = zeros_varying_like(diff)

        def again(i: jax.Array | int, dh: jax.Array) -> PyTree:
            if count <= 3:  # loops of one round are unrolled: the compiler would merge gathers of both passes, and keep
                i = after(dh, jnp.asarray(i, jnp.int32))
            with jax.named_scope(AGAIN):
                return self.gather(_at(diff, i), _at(held, i), wanted)

        def body(carry: PyTree, i: jax.Array) -> tuple[PyTree, None]:
            dh, unit, behind, grads = carry
            before = again(i - 1, dh)
            kept, reduce_following = _at(inner, i)
            grads = _put(grads, i + 1, *reduce_following(behind))
            behind, dh = kept(unit, dh)
            return (dh, before, behind, grads), None

        before = again(count - 2, dh) if count > 1 else None
        behind, dh = end(unit, dh)
        carry = (dh, before, behind, grads)
        if count > 2:  # a scan of none would still be counted by who reads the program
            carry, _ = lax.scan(body, carry, jnp.arange(count - 2, 0, -1))
        dh, unit, behind, grads = carry
        if count > 1:
            kept, reduce_second = _at(inner, 0)
            grads = _put(grads, 1, *reduce_second(behind))
            behind, dh = kept(unit, dh)
        return _put(grads, 0, *reduce_first(behind)), None, dh, None, None
