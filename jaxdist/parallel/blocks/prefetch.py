"""Block prefetch (`parallel.prefetch: 1`): the communication of one block runs beside the computation of another.

This has nothing to do with prefetching batches, which is the data loader's. Figures: docs/plan.md.

Forward: while block i computes, block i + 1 is gathered. Backward: while block i computes, the gradient of block i + 1
is reduced and block i - 1 gathered. In a round of either loop no computation waits for a collective of the same round,
so that XLA can run them side by side. (In a differentiated scan each block would be gathered right before it runs.)
This costs the memory of one more gathered block and of one more block's gradients. It saves two gathers: the last two
blocks stay gathered, because the backward pass starts with them.

- The first block. Its gather has no other block to run beside, and neither has its reduction. Both are split in two:
  the parameters that the block reads late are gathered while it computes with the others, and are reduced while it
  computes the gradients of the others.
- The order in a round of the backward pass. The reduction comes first. The gather of the next block, and the sum of
  shards over other axes, wait for it, and for the largest gradient of the computing block. So the reduction runs beside
  the first part of the computation, and the others beside the second. Without this order XLA would start all of them at
  once, although they share the links; and it believes that a sum over hosts takes 5 ms, and would start it first.
- The head. Its parameters are gathered a slice beside each block, and their gradients reduced likewise: see
  `prefetch_embed_head.HeadSlices`.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from jaxdist.collectives import varying_axes, zeros_varying_like
from jaxdist.jaxpr.walk import equations
from jaxdist.parallel.blocks.layers import AGAIN, BlockRows, OneBlock, RunBlock, at, put, trained_leaves
from jaxdist.parallel.blocks.prefetch_embed_head import HeadSlices, first_reads
from jaxdist.specs import PyTree, only


def opaque_index(tree: PyTree, i: jax.Array | int) -> jax.Array:
    """i, as a value that the compiler cannot know before it has the tree.

    Otherwise it would move a gather of row i out in front of all loops, or do it once for both passes and keep the
    result. A barrier does not help: barriers are gone when XLA combines collectives. The value is i + (one element of
    the tree is infinite), and with infinities the step is lost anyway.
    """
    # i must not vary over more axes than the parameters that it gathers. Of leaves that vary over equally few axes the
    # largest is the one that is most likely to have been communicated.
    leaf = min(jax.tree.leaves(tree), key=lambda leaf: (len(varying_axes(leaf)), -leaf.size))
    lost = leaf[(0,) * leaf.ndim] > jnp.finfo(leaf.dtype).max
    return i + lost.astype(jnp.result_type(i))


def order_after(tree: PyTree, grads: PyTree) -> PyTree:
    """The tree, as values that the compiler cannot have before it has the largest of these gradients.

    Otherwise, outside of loops, XLA would compute the first block's gradients last. It would keep everything that they
    are computed from, have no computation left beside which to reduce them, and combine reductions that should follow
    each other. Values become nan if an element of that gradient is infinite: then the step is lost anyway.
    """

    def one(x: jax.Array) -> jax.Array:
        axes = set(varying_axes(x))
        # A gradient that varies over more axes would make x vary over them too.
        known = [leaf for leaf in jax.tree.leaves(grads) if set(varying_axes(leaf)) <= axes]
        if not known:
            return x
        last = max(known, key=lambda leaf: leaf.size)  # a small one may not have been communicated at all
        return jnp.where(last[(0,) * last.ndim] > jnp.finfo(last.dtype).max, jnp.nan, x)

    return jax.tree.map(one, tree)


def largest_gradient(grads: PyTree) -> list[jax.Array]:
    """The largest of a block's gradients, or none of none: `order_after` this one alone waits for half of the block.

    With tensor parallelism the largest gradient varies over `tensor`, so that a norm's parameters, which do not, cannot
    wait for it. Given all gradients they would wait for a norm's, which may be the last that the block computes.
    """
    return sorted(jax.tree.leaves(grads), key=lambda leaf: leaf.size)[-1:]


def read_late(block: RunBlock, unit: PyTree, *arguments: Any) -> PyTree:
    """For each parameter whether block(unit, *arguments) reads it in the second half, counted by elements."""
    leaves, treedef = jax.tree.flatten(unit)
    order = jax.tree.leaves(first_reads(block, unit, *arguments))
    late, early, half = [True] * len(leaves), 0, sum(leaf.size for leaf in leaves) / 2
    for place in sorted(range(len(leaves)), key=order.__getitem__):
        early += leaves[place].size
        late[place] = early > half
    return jax.tree.unflatten(treedef, late)


def split_first_fetch(one: OneBlock, rows: BlockRows, late: PyTree) -> tuple[PyTree, Callable[..., Any]]:
    """`OneBlock.fetch` for block 0, in two parts that XLA cannot combine.

    late: for each parameter, whether it is gathered in the second part, and its gradient reduced in the first.

    The function that reduces takes (gradients, gradients that were reduced just before).
    """
    early = jax.tree.map(operator.not_, late)

    def fetch(wanted: PyTree, i: jax.Array | int) -> tuple[PyTree, Callable[..., Any]]:
        parts = rows._replace(diff=only(wanted, rows.diff), captured=only(wanted, rows.captured))
        return one.fetch(parts, i, wanted)

    def merged(first: PyTree, second: PyTree) -> PyTree:
        return jax.tree.map(lambda late, a, b: b if late else a, late, first, second)

    def reduce(reduce_first: Any, reduce_second: Any, grads: list[jax.Array], before: PyTree) -> tuple[PyTree]:
        flags: list[Any] = trained_leaves(late, rows.diff)
        own = [grad for grad, flag in zip(grads, flags, strict=True) if flag]
        (ahead,) = reduce_second(order_after(own, before))
        rest = [grad for grad, flag in zip(grads, flags, strict=True) if not flag]
        (reduced,) = reduce_first(order_after(rest, ahead))
        return (merged(reduced, ahead),)

    first, reduce_first = fetch(early, 0)
    types = [set(varying_axes(leaf)) for leaf in jax.tree.leaves(jax.eval_shape(lambda: fetch(late, 0)[0]))]
    # The second part waits for a large parameter of the first, since XLA may gather small ones apart. It must not vary
    # over other axes than the parameters of the second part: their index, and so they, would vary over these too.
    marks = [leaf for leaf in jax.tree.leaves(first) if all(set(varying_axes(leaf)) <= each for each in types)]
    mark = max(marks, key=lambda leaf: leaf.size, default=None)
    second, reduce_second = fetch(late, 0 if mark is None else opaque_index(mark, 0))
    return merged(first, second), Partial(reduce, reduce_first, reduce_second)


class PrefetchedBlocks(NamedTuple):
    """A `BlockRunner` that gathers each block while another one computes. h is (h, diff of the head's slices) before
    the blocks, and (h, usable parameters of the head) after them.

    inner, outer: blocks inside loops, and outside of them.
    plain: a block without rematerialisation.
    slices: the head's parameters.
    reduce_dtype: the dtype that gradients are reduced in.
    sums: what is done to a block's gradients besides their reduction, such as a sum over `data`; None for nothing.
    """

    inner: OneBlock
    outer: OneBlock
    plain: RunBlock
    slices: HeadSlices
    reduce_dtype: Any
    sums: Callable[[PyTree], PyTree] | None = None

    def forward(
        self, rows: BlockRows, h: tuple[jax.Array, PyTree], keys: PyTree
    ) -> tuple[tuple[jax.Array, PyTree], PyTree]:
        """((output of the last block, the head), residuals for `backward`)."""
        count, (x, sliced) = len(rows.layers), h
        one = self.inner if count > 4 else self.outer  # XLA unrolls by two: up to 3 rounds leave no loop

        def turn(carry: PyTree, i: jax.Array) -> tuple[PyTree, PyTree]:
            x, _, unit, whole = carry
            following, reduce_following = one.fetch(rows, i + 1)
            whole, reduce_slice = self.slices.fetch(sliced, whole, i)
            x, kept = one.run(unit, rows, i, x, keys)
            return (x, unit, following, whole), (kept, reduce_following, reduce_slice)

        shapes = jax.eval_shape(lambda: self.inner.fetch(rows, 0)[0])
        late = read_late(self.plain, shapes, x, rows.layers[0], keys)
        first, reduce_first = split_first_fetch(self.inner, rows, late)
        saved, carry = None, (x, zeros_varying_like(first), first, self.slices.empty(sliced))
        if count > 1:
            carry, saved = lax.scan(turn, carry, jnp.arange(count - 1))
        x, before, unit, whole = carry
        whole, reduce_slice = self.slices.fetch(sliced, whole, opaque_index(unit, count - 1))
        x, end = self.outer.run(unit, rows, -1, x, keys)
        units = only(end.wanted, unit), saved and only(saved[0].wanted, before)
        shared = [each.shared(keys) for each in (end, *(saved[:1] if saved else ()))]
        return (x, whole), (sliced, saved, end, units, reduce_first, reduce_slice, shared)

    def backward(
        self, rows: BlockRows, saved: PyTree, dh: tuple[jax.Array, PyTree]
    ) -> tuple[PyTree, tuple[jax.Array, PyTree]]:
        """(gradients with respect to diff, gradients of h)."""
        (sliced, saved, end, (unit, before), reduce_first, reduce_last, shared), (dx, dwhole) = saved, dh
        count, grads, slices = len(rows.layers), self.stored(rows.diff), self.stored(sliced)

        def gather_again(i: jax.Array | int, reduced: PyTree, own: PyTree, wanted: PyTree) -> PyTree:
            with jax.named_scope(AGAIN):
                unit = order_after(order_after(at(rows.diff, i), reduced), largest_gradient(own))
                return self.inner.gather(unit, at(rows.captured, i), wanted)

        def turn(carry: PyTree, i: jax.Array | int, saved: PyTree) -> PyTree:
            (dx, unit, following, grads, slices), (kept, reduce_following, reduce_slice) = carry, saved
            (reduced,) = reduce_following(following)
            slices = self.slices.reduce(slices, i, reduce_slice, dwhole)
            own, dx = kept(unit, dx, shared[-1])
            before = None if isinstance(i, int) and i == 0 else gather_again(i - 1, reduced, own, kept.wanted)
            grads = put(grads, i + 1, self.summed(reduced, following, own))
            return dx, before, own, grads, slices

        slices = self.slices.reduce(slices, count - 1, reduce_last, dwhole)
        own, dx = end(unit, dx, shared[0])
        carry = order_after(dx, own), before, own, grads, slices
        if count > 2:  # readers of the program would count a scan of no rounds
            rounds = jnp.arange(count - 2, 0, -1)
            carry, _ = lax.scan(lambda carry, i: (turn(carry, i, at(saved, i)), None), carry, rounds)
        if count > 1:
            carry = turn(carry, 0, at(saved, 0))
        dx, _, own, grads, slices = carry
        (reduced,) = reduce_first(own, () if count == 1 else at(grads, 1))
        grads = put(grads, 0, self.summed(reduced, own, ()))
        return as_types_of(rows.diff, grads), (dx, as_types_of(sliced, slices))

    def stored(self, diff: PyTree) -> PyTree:
        """Zeros for the gradients of all blocks, in the dtype of their reduction if that is narrower."""
        dtype = jnp.dtype(self.reduce_dtype)

        def zeros(leaf: jax.Array) -> jax.Array:
            return zeros_varying_like(leaf, dtype if dtype.itemsize < leaf.dtype.itemsize else None)

        return jax.tree.map(zeros, diff)

    def summed(self, reduced: PyTree, whole: list[jax.Array], beside: PyTree) -> PyTree:
        """A block's reduced gradients after `sums`.

        whole: the same gradients before their reduction.
        beside: gradients of the block that computes meanwhile. If `reduced` are shards, their sums wait for the largest
            of these.
        """
        if self.sums is None or not equations(jax.make_jaxpr(self.sums)(reduced)):
            return reduced
        shards = sum(leaf.size for leaf in jax.tree.leaves(reduced)) < sum(leaf.size for leaf in whole)
        return self.sums(order_after(reduced, largest_gradient(beside)) if shards else reduced)


def as_types_of(tree: PyTree, grads: PyTree) -> PyTree:
    """The gradients in the dtypes of the tree."""
    return jax.tree.map(lambda leaf, grad: grad.astype(leaf.dtype), tree, grads)
