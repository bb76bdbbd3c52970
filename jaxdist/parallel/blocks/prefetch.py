"""The stack of blocks with its communication one block away from its computation (`parallel.prefetch`).

While block i computes, block i + 1 is gathered; in the backward pass the gradient of block i + 1 is reduced, and
block i - 1 gathered: no computation in an iteration of either loop waits for a collective of the same iteration, so
a scheduler can run them side by side. Differentiating a scan would gather each block right before its first use. Costs
one more gathered block and one more block's gradients; saves two gathers, since the last two blocks are kept for the
backward pass, which starts with both of them on the device anyway.

The first block's gather has no block to stand beside, nor has its reduction, the last one. They are in two parts: what
the block reads late is gathered beside what reads the rest, and reduced beside what computes the rest's gradients.

In a round of the backward pass the reduction is first. What follows it, the gather of the next block, and the sum of
the shards over other axes, waits for it, and for the largest gradient of the block that computes: the reduction runs
beside the one part of the block, these beside the other. Left alone, XLA gives collectives that are under way at once
the time of one; and it takes those over several hosts for so slow (5 ms) that a round would begin with them, and with
nothing beside the reduction. Figures: docs/plan.md.

What rides along (`ends`: the head's tables) is gathered a slice a block, and its gradient reduced a slice a block.
"""

import operator
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from jaxdist.collectives import varying_axes, zeros_varying_like
from jaxdist.config.rules.xla_flags import names_given
from jaxdist.jaxpr.walk import equations
from jaxdist.mesh import AnyMesh, on_cpu
from jaxdist.parallel.blocks.layers import AGAIN, Block, Blocks, Gather, at, put, rows_of, trained_leaves
from jaxdist.parallel.blocks.prefetch_embed_head import Riders, first_reads
from jaxdist.parallel.options import StrategyOptions
from jaxdist.specs import STACKED, PyTree, bytes_per_device, dim_of, is_model, only

AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"
BY_TWO = "xla_gpu_enable_while_loop_double_buffering"
LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
COMBINED = 1.2  # of a block's bytes, that of a slice of the head included: what XLA makes one collective of


def compiler_options(params: PyTree, options: StrategyOptions, mesh: AnyMesh) -> dict[str, int | bool] | None:
    """What XLA:GPU is told beside a program that prefetches. To combine the collectives of one block, but not those of
    two: its thresholds, 30 MiB, would leave each large parameter of a block to itself, to wait for its own moment. To
    have two under way at once, or three with sums of shards. To take two rounds of a loop for one: what a round hands
    to the next, a gathered block and gradients, would be copied. And to let computation run meanwhile, which it does by
    itself only from Hopper on. A flag in XLA_FLAGS wins (not one in a file that it names). Figures: docs/plan.md."""
    if not options.prefetch or not is_model(params) or on_cpu(mesh):
        return None

    def gathered(leaf: Any) -> int:  # elements of one block's; what is no shard does not travel
        shard = bytes_per_device(leaf, leaf.sharding.spec, mesh) // leaf.dtype.itemsize // leaf.shape[0]
        return shard * mesh.shape["fsdp"] if dim_of(leaf.sharding.spec, "fsdp") is not None else 0

    block = sum(map(gathered, jax.tree.leaves(params[STACKED])))
    received, reduced = (jnp.dtype(each).itemsize for each in (options.precision.received, options.precision.reduce))
    least, parts = 30 * 2**20, mesh.shape["fsdp"]  # the first: XLA's own
    whole, sums = max(least, int(COMBINED * block * received)), max(least, int(COMBINED * block * reduced))
    limits = {"all_gather": whole, "reduce_scatter": sums // parts}  # it counts what comes out of them
    if mesh.shape["data"] > 1:
        limits["all_reduce"] = max(least, sums // parts)  # of shards
    sizes = {f"xla_gpu_{op}_combine_threshold_bytes": size for op, size in limits.items()}
    at_once = 3 if mesh.shape["data"] > 1 else 2
    told = {**sizes, BY_TWO: True, AT_ONCE: at_once, LATENCY_HIDING: True}
    given = names_given(os.environ.get("XLA_FLAGS", ""))
    return {name: value for name, value in told.items() if f"--{name}" not in given}


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


def largest(grads: PyTree) -> list[jax.Array]:
    """The largest of a block's gradients, if there are any: another may be the block's last, such as that of a norm,
    which is all that a norm's parameters could wait for with tensor parallelism. They wait for none then."""
    return sorted(jax.tree.leaves(grads), key=lambda leaf: leaf.size)[-1:]


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
    reduce_dtype: see `prefetched`."""

    inner: Blocks
    outer: Blocks
    plain: Block
    riders: Riders
    sums: Callable[[PyTree], PyTree] | None
    reduce_dtype: Any

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
        count, grads, slices = rows_of(diff, held), self.stored(diff), self.stored(riding)

        def again(i: jax.Array | int, reduced: PyTree, own: PyTree, wanted: PyTree) -> PyTree:
            with jax.named_scope(AGAIN):
                return self.inner.gather(held_back(held_back(at(diff, i), reduced), largest(own)), at(held, i), wanted)

        def turn(carry: PyTree, i: jax.Array | int, saved: PyTree) -> PyTree:
            (dh, unit, behind, grads, slices), (kept, reduce_following, reduce_slice) = carry, saved
            (reduced,) = reduce_following(behind)
            slices = self.riders.reduce(slices, i, reduce_slice, dwhole)
            own, dh = kept(unit, dh)
            before = None if isinstance(i, int) and i == 0 else again(i - 1, reduced, own, kept.wanted)
            grads = put(grads, i + 1, self.summed(reduced, behind, own))
            return dh, before, own, grads, slices

        slices = self.riders.reduce(slices, count - 1, reduce_last, dwhole)
        behind, dh = end(unit, dh)
        carry = held_back(dh, behind), before, behind, grads, slices
        if count > 2:  # a scan of none would still be counted by who reads the program
            rounds = jnp.arange(count - 2, 0, -1)
            carry, _ = lax.scan(lambda carry, i: (turn(carry, i, at(saved, i)), None), carry, rounds)
        if count > 1:
            carry = turn(carry, 0, at(saved, 0))
        dh, _, behind, grads, slices = carry
        (reduced,) = reduce_first(behind, () if count == 1 else at(grads, 1))
        grads = put(grads, 0, self.summed(reduced, behind, ()))
        return as_types_of(diff, grads), None, None, dh, None, as_types_of(riding, slices)

    def stored(self, diff: PyTree) -> PyTree:
        """Zeros for gradients with respect to diff, in the dtype in which they are reduced if that is narrower: nothing
        is lost, and those of all blocks are there at the end."""
        dtype = jnp.dtype(self.reduce_dtype)

        def zeros(leaf: jax.Array) -> jax.Array:
            return zeros_varying_like(leaf, dtype if dtype.itemsize < leaf.dtype.itemsize else None)

        return jax.tree.map(zeros, diff)

    def summed(self, reduced: PyTree, whole: list[jax.Array], beside: PyTree) -> PyTree:
        """A block's reduced gradients, which were whole, with what else is to be done to them. If they are shards now,
        not before the largest of `beside` is there: gradients of the block that computes meanwhile."""
        if self.sums is None or not equations(jax.make_jaxpr(self.sums)(reduced)):
            return reduced
        shards = sum(leaf.size for leaf in jax.tree.leaves(reduced)) < sum(leaf.size for leaf in whole)
        return self.sums(held_back(reduced, largest(beside)) if shards else reduced)


def as_types_of(tree: PyTree, grads: PyTree) -> PyTree:
    """The gradients in the dtypes of the tree."""
    return jax.tree.map(lambda leaf, grad: grad.astype(leaf.dtype), tree, grads)


def prefetched(
    gather: Gather,
    block: Block,
    last: Block,
    plain: Block,
    riders: Riders,
    reduce_dtype: Any,
    sums: Callable[[PyTree], PyTree] | None = None,
) -> Callable[..., tuple[jax.Array, PyTree]]:
    """(diff, held, layers, h, keys, diff of what rides) -> (h, what rides, usable): a `Stack` that is differentiable
    once, with respect to diff, h and what rides. What is differentiable in `gather` is what its backward reduces.
    block: with whatever rematerialisation. last: the same, where it stands outside a loop. plain: without. sums:
    what else is done to a block's gradients once they are reduced."""
    ahead = _Ahead(Blocks(gather, block), Blocks(gather, last), plain, riders, sums, reduce_dtype)
    stack = jax.custom_vjp(lambda *arguments: ahead.forward(*arguments)[0])
    stack.defvjp(ahead.forward, ahead.backward)
    return stack
