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

from jaxdist.collectives import zeros_varying_like

PyTree = Any
Gather = Callable[[PyTree, PyTree], PyTree]  # (diff unit, held unit) -> usable unit
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

    def __call__(self, unit: PyTree, grad: jax.Array) -> tuple[PyTree, jax.Array]:
        """(gradient of the unit, gradient of the block's input), given the unit anew."""
        units, rest = jax.tree.leaves(unit), iter(self._leaves)
        leaves = [next(rest) if place is None else units[place] for place in self._places]
        return jax.tree.unflatten(self._treedef, leaves)(grad)

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self._leaves, (self._treedef, self._places)

    @classmethod
    def tree_unflatten(cls, aux: Any, leaves: Any) -> "Kept":
        self = object.__new__(cls)
        self._treedef, self._places = aux
        self._leaves = list(leaves)
        return self


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
        """(usable block i, what brings its gradient back to diff)."""
        own = _at(held, i)
        return jax.vjp(lambda unit: self.gather(unit, own), _at(diff, i))

    def forward(
        self, diff: PyTree, held: PyTree, h: jax.Array, layers: jax.Array, keys: PyTree
    ) -> tuple[jax.Array, PyTree]:
        def run(block: Block, unit: PyTree, h: jax.Array, layer: jax.Array) -> tuple[jax.Array, Kept]:
            h, pull = jax.vjp(lambda unit, h: block(unit, h, layer, keys), unit, h)
            return h, Kept(pull, unit)

        def body(carry: PyTree, i: jax.Array) -> tuple[PyTree, PyTree]:
            h, unit = carry
            following, reduce_following = self.fetch(diff, held, i + 1)
            h, kept = run(self.block, unit, h, layers[i])
            return (h, following), (kept, reduce_following)

        unit, reduce_first = self.fetch(diff, held, 0)
        inner = None
        if len(layers) > 1:
            (h, unit), inner = lax.scan(body, (h, unit), jnp.arange(len(layers) - 1))
        h, end = run(self.last, unit, h, layers[-1])
        return h, (diff, held, inner, end, unit, reduce_first)

    def backward(self, residuals: PyTree, dh: jax.Array) -> tuple[PyTree, None, jax.Array, None, None]:
        diff, held, inner, end, unit, reduce_first = residuals
        count = jax.tree.leaves((diff, held))[0].shape[0]
        grads = zeros_varying_like(diff)

        def again(i: jax.Array | int, dh: jax.Array) -> PyTree:
            if count <= 3:  # loops of one round are unrolled: the compiler would merge gathers of both passes, and keep
                i, _ = lax.optimization_barrier((jnp.asarray(i, jnp.int32), dh))
            with jax.named_scope(AGAIN):
                return self.gather(_at(diff, i), _at(held, i))

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
