"""The stack of blocks with its communication one block away from its computation (`parallel.prefetch`).

While block i computes, block i + 1 is gathered; in the backward pass the gradient of block i + 1 is reduced, and
block i - 1 gathered: no computation in an iteration of either loop waits for a collective of the same iteration, so
a scheduler can run them side by side. Differentiating a scan would gather each block right before its first use. Costs
one more gathered block and one more block's gradients; saves two gathers, since the last two blocks are kept for the
backward pass, which starts with both of them on the device anyway.

The first block's gather has no block to stand beside, nor has its reduction, the last one. They are in two parts: what
the block reads late is gathered beside what reads the rest, and reduced beside what computes the rest's gradients.

What rides along (`ends`: the head's tables) is gathered a slice a block, and its gradient reduced a slice a block.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from jaxdist.collectives import varying_axes, zeros_varying_like
from jaxdist.mesh import AnyMesh, on_cpu
from jaxdist.parallel.ends import Riders, first_reads
from jaxdist.parallel.stack import AGAIN, Block, Blocks, Gather, at, put, rows_of, trained_leaves
from jaxdist.parallel.strategy import StrategyOptions
from jaxdist.specs import STACKED, bytes_per_device, dim_of, is_model, only

PyTree = Any
AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"
BY_TWO = "xla_gpu_enable_while_loop_double_buffering"
COMBINED = 1.2  # of a block's bytes, that of a slice of the head included: what XLA makes one collective of


def compiler_options(params: PyTree, options: StrategyOptions, mesh: AnyMesh) -> dict[str, int | bool] | None:
    """What XLA:GPU is told beside a program that prefetches. To combine the collectives of one block, but not those of
    two: its thresholds, 30 MiB, would leave each large parameter of a block to itself, to wait for its own moment. To
    have two under way at once, or three with sums of shards. And to take two rounds of a loop for one: what a round
    hands to the next, a gathered block and gradients, would be copied. Figures: docs/plan.md."""
    if not options.prefetch or not is_model(params) or on_cpu(mesh):
        return None

    def gathered(leaf: Any) -> int:  # elements of one block's; what is no shard does not travel
        shard = bytes_per_device(leaf, leaf.sharding.spec, mesh) // leaf.dtype.itemsize // leaf.shape[0]
        return shard * mesh.shape["fsdp"] if dim_of(leaf.sharding.spec, "fsdp") is not None else 0

    block = sum(map(gathered, jax.tree.leaves(params[STACKED])))
    received, reduced = (jnp.dtype(each).itemsize for each in (options.precision.received, options.precision.reduce))
    least, parts = 30 * 2**20, mesh.shape["fsdp"]  # the first: XLA's own
    whole, sums = max(least, int(COMBINED * block * received)), max(least, int(COMBINED * block * reduced))
    told = {"all_gather": whole, "reduce_scatter": sums // parts}  # it counts what comes out of them
    if mesh.shape["data"] > 1:
        told["all_reduce"] = max(least, sums // parts)  # of shards
    sizes = {f"xla_gpu_{op}_combine_threshold_bytes": size for op, size in told.items()}
    at_once = 3 if mesh.shape["data"] > 1 else 2
    return {**sizes, BY_TWO: True, AT_ONCE: at_once}


def known_after(tree: PyTree, i: jax.Array | int) -> jax.Array:
    """i, which the compiler cannot know before it has the tree: it would gather what is outside of loops before all of
    them, or once for both passes, and keep it. (Barriers are gone by the time that it combines collectives, and what a
    loop has counted to it knows.) Read off a leaf that varies over the fewest axes, as what is gathered with i is of
    i's type; the largest, since a small one may not have travelled."""
    leaf = min(jax.tree.leaves(tree), key=lambda leaf: (len(varying_axes(leaf)), -leaf.size))
    lost = leaf[(0,) * leaf.ndim] > jnp.finfo(leaf.dtype).max  # infinity: then all is lost anyway
    return i + lost.astype(jnp.result_type(i))


def held_back(tree: PyTree, grads: PyTree) -> PyTree:
    """The tree, which the compiler cannot have before it has the largest of these gradients: a small one may not have
    travelled. Of two blocks outside of loops it would compute the first one's last, keep all that they are made of, and
    have nothing left to hide their reduction behind. And of reductions that do not wait for each other it would make
    one."""

    def one(x: jax.Array) -> jax.Array:
        axes = set(varying_axes(x))  # what varies over more would give x its type
        known = [leaf for leaf in jax.tree.leaves(grads) if set(varying_axes(leaf)) <= axes]
        if not known:
            return x
        last = max(known, key=lambda leaf: leaf.size)
        return jnp.where(last[(0,) * last.ndim] > jnp.finfo(last.dtype).max, jnp.nan, x)

    return jax.tree.map(one, tree)


def read_late(block: Block, unit: PyTree, *arguments: Any) -> PyTree:
    """For each leaf of the unit whether block(unit, *arguments) reads it after others that make up to half of the
    elements."""
    leaves, treedef = jax.tree.flatten(unit)
    order = jax.tree.leaves(first_reads(block, unit, *arguments))
    late, early, half = [True] * len(leaves), 0, sum(leaf.size for leaf in leaves) / 2
    for place in sorted(range(len(leaves)), key=order.__getitem__):
        early += leaves[place].size
        late[place] = early > half
    return jax.tree.unflatten(treedef, late)


def in_two(of: Blocks, diff: PyTree, held: PyTree, late: PyTree) -> tuple[PyTree, Callable[..., Any]]:
    """What `Blocks.fetch` says of block 0, in two parts that cannot be combined. late: the leaves of the second gather,
    and of the first reduction. What brings gradients back takes beside them what was reduced just before."""
    early = jax.tree.map(operator.not_, late)

    def fetch(wanted: PyTree, i: jax.Array | int) -> tuple[PyTree, Callable[..., Any]]:
        return of.fetch(only(wanted, diff), only(wanted, held), i, wanted)

    def merged(first: PyTree, second: PyTree) -> PyTree:
        return jax.tree.map(lambda late, a, b: b if late else a, late, first, second)

    def reduce(reduce_first: Any, reduce_second: Any, behind: list[jax.Array], before: PyTree) -> tuple[PyTree]:
        flags: list[Any] = trained_leaves(late, diff)
        own = [grad for grad, flag in zip(behind, flags, strict=True) if flag]
        (ahead,) = reduce_second(held_back(own, before))
        rest = [grad for grad, flag in zip(behind, flags, strict=True) if not flag]
        (reduced,) = reduce_first(held_back(rest, ahead))
        return (merged(reduced, ahead),)

    first, reduce_first = fetch(early, 0)
    types = [set(varying_axes(leaf)) for leaf in jax.tree.leaves(jax.eval_shape(lambda: fetch(late, 0)[0]))]
    # Large, for the gather of small ones is another; and of no other type than what is gathered with the index.
    marks = [leaf for leaf in jax.tree.leaves(first) if all(set(varying_axes(leaf)) <= each for each in types)]
    mark = max(marks, key=lambda leaf: leaf.size, default=None)
    second, reduce_second = fetch(late, 0 if mark is None else known_after(mark, 0))
    return merged(first, second), Partial(reduce, reduce_first, reduce_second)


class _Ahead(NamedTuple):
    """Both passes. inner, outer: blocks in loops, and outside. plain: a block, not rematerialised. riders, sums,
    in_turn: see `prefetched`."""

    inner: Blocks
    outer: Blocks
    plain: Block
    riders: Riders
    sums: Callable[[PyTree], PyTree] | None
    in_turn: bool

    def forward(
        self, diff: PyTree, held: PyTree, layers: jax.Array, h: jax.Array, keys: PyTree, riding: PyTree
    ) -> tuple[tuple[jax.Array, PyTree], PyTree]:
        """((h, what rides, usable), what `backward` needs)."""

        count = len(layers)
        of = self.inner if count > 4 else self.outer  # a loop of one round is none, and rounds are taken by two

        def turn(carry: PyTree, i: jax.Array) -> tuple[PyTree, PyTree]:
            h, _, unit, whole = carry
            following, reduce_following = of.fetch(diff, held, i + 1)
            whole, reduce_slice = self.riders.fetch(riding, whole, i)
            h, kept = of.run(unit, diff, h, layers[i], keys)
            return (h, unit, following, whole), (kept, reduce_following, reduce_slice)

        shapes = jax.eval_shape(lambda: self.inner.fetch(diff, held, 0)[0])
        first, reduce_first = in_two(self.inner, diff, held, read_late(self.plain, shapes, h, layers[0], keys))
        saved, carry = None, (h, zeros_varying_like(first), first, self.riders.empty(riding))
        if count > 1:
            carry, saved = lax.scan(turn, carry, jnp.arange(count - 1))
        h, before, unit, whole = carry
        whole, reduce_slice = self.riders.fetch(riding, whole, known_after(unit, count - 1))
        h, end = self.outer.run(unit, diff, h, layers[-1], keys)
        units = only(end.wanted, unit), saved and only(saved[0].wanted, before)
        return (h, whole), (diff, held, riding, saved, end, units, reduce_first, reduce_slice)

    def backward(self, residuals: PyTree, given: PyTree) -> tuple[PyTree, None, None, jax.Array, None, PyTree]:
        """Gradients of the arguments of `forward`."""
        (diff, held, riding, saved, end, (unit, before), reduce_first, reduce_last), (dh, dwhole) = residuals, given
        count, grads, slices = rows_of(diff, held), zeros_varying_like(diff), zeros_varying_like(riding)
        sums = self.sums_of(at(grads, 0))

        def again(i: jax.Array | int, done: PyTree, wanted: PyTree) -> PyTree:
            with jax.named_scope(AGAIN):
                return self.inner.gather(held_back(at(diff, i), done), at(held, i), wanted)

        def summed(grads: PyTree, i: jax.Array | int) -> PyTree:
            return grads if sums is None else put(grads, i, sums(at(grads, i)))

        def turn(carry: PyTree, i: jax.Array | int, saved: PyTree) -> PyTree:
            (dh, unit, behind, grads, slices), (kept, reduce_following, reduce_slice) = carry, saved
            (reduced,) = reduce_following(behind)
            first, last = (isinstance(i, int) and i == edge for edge in (count - 2, 0))
            before = None if last else again(i - 1, reduced if self.in_turn else behind, kept.wanted)
            grads = put(grads if first else summed(grads, i + 2), i + 1, reduced)
            slices = self.riders.reduce(slices, i, reduce_slice, dwhole)
            behind, dh = kept(unit, dh)
            return dh, before, behind, grads, slices

        slices = self.riders.reduce(slices, count - 1, reduce_last, dwhole)
        behind, dh = end(unit, dh)
        carry, i = (held_back(dh, behind), before, behind, grads, slices), count - 2
        if sums is not None and i > 0:  # nothing is to be summed yet
            carry, i = turn(carry, i, at(saved, i)), i - 1
        if i > 0:  # a scan of none would still be counted by who reads the program
            carry, _ = lax.scan(lambda carry, i: (turn(carry, i, at(saved, i)), None), carry, jnp.arange(i, 0, -1))
        if count > 1:
            carry = turn(carry, 0, at(saved, 0))
        dh, _, behind, grads, slices = carry
        (reduced,) = reduce_first(behind, () if count == 1 else at(grads, 1))
        grads = put(grads if count == 1 else summed(grads, 1), 0, reduced)
        return summed(grads, 0), None, None, dh, None, slices

    def sums_of(self, shards: PyTree) -> Callable[[PyTree], PyTree] | None:
        """What sums a block's gradients further, if that does anything for such."""
        return self.sums if self.sums is not None and jax.make_jaxpr(self.sums)(shards).eqns else None


def prefetched(
    gather: Gather, block: Block, last: Block, plain: Block, riders: Riders,
    sums: Callable[[PyTree], PyTree] | None = None, in_turn: bool = True,
) -> Callable[..., tuple[jax.Array, PyTree]]:
    """(diff, held, layers, h, keys, diff of what rides) -> (h, what rides, usable): a `Stack` that is differentiable
    once, with respect to diff, h and what rides. What is differentiable in `gather` is what its backward reduces.
    block: with whatever rematerialisation. last: the same, where it stands outside a loop. plain: without. sums:
    what else is done to a block's gradients once they are reduced; one block later, as it would wait for that.
    in_turn: a round of the backward pass gathers when it has reduced, not beside it. XLA gives collectives that are
    under way at once the time of one, and a block's whole gradients would be kept longer; but it takes those over
    several hosts for so slow (5 ms) that two in turn would not fit beside a block. Figures: docs/plan.md."""
    ahead = _Ahead(Blocks(gather, block), Blocks(gather, last), plain, riders, sums, in_turn)
    stack = jax.custom_vjp(lambda *arguments: ahead.forward(*arguments)[0])
    stack.defvjp(ahead.forward, ahead.backward)
    return stack
