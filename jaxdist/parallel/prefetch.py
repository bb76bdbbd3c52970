"""The stack of blocks with its communication one block away from its computation (`parallel.prefetch`).

While block i computes, block i + 1 is gathered, and in the backward pass block i - 1, while the gradient of block
i + 1 is reduced: nothing in an iteration of either loop waits for a collective of the same iteration, so a scheduler
can run them side by side. Differentiating a scan would gather each block right before its first use. Costs one more
gathered block and one more block's gradients; saves a gather, since the last block is kept for the backward pass, which
starts with it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import zeros_varying_like
from jaxdist.parallel.remat import after
from jaxdist.parallel.stack import Block, Blocks, Gather, Stack, at, put, rows_of
from jaxdist.specs import only

PyTree = Any


def prefetched(gather: Gather, block: Block, last: Block) -> Stack:
    """The stack of blocks, differentiable once, with respect to diff and h.

    What is differentiable in `gather` is what its backward reduces. block: with whatever rematerialisation. last: the
    same, where it stands outside a loop.
    """
    blocks, ending = Blocks(gather, block), Blocks(gather, last)

    def forward(diff: PyTree, held: PyTree, layers: jax.Array, h: jax.Array, keys: PyTree) -> tuple[jax.Array, PyTree]:
        def body(carry: PyTree, i: jax.Array) -> tuple[PyTree, PyTree]:
            h, unit = carry
            following, reduce_following = blocks.fetch(diff, held, i + 1)
            h, kept = blocks.run(unit, diff, h, layers[i], keys)
            return (h, following), (kept, reduce_following)

        unit, reduce_first = blocks.fetch(diff, held, 0)
        inner = None
        if len(layers) > 1:
            (h, unit), inner = lax.scan(body, (h, unit), jnp.arange(len(layers) - 1))
        h, end = ending.run(unit, diff, h, layers[-1], keys)
        return h, (diff, held, inner, end, only(end.wanted, unit), reduce_first)

    def backward(residuals: PyTree, dh: jax.Array) -> tuple[PyTree, None, None, jax.Array, None]:
        diff, held, inner, end, unit, reduce_first = residuals
        wanted = None if inner is None else inner[0].wanted  # the same in all blocks
        count = rows_of(diff, held)
        grads = zeros_varying_like(diff)

        def again(i: jax.Array | int, dh: jax.Array) -> PyTree:
            if count <= 3:  # loops of one round are unrolled: the compiler would merge gathers of both passes, and keep
                i = after(dh, jnp.asarray(i, jnp.int32))
            return blocks.again(diff, held, i, wanted)

        def body(carry: PyTree, i: jax.Array) -> tuple[PyTree, None]:
            dh, unit, behind, grads = carry
            before = again(i - 1, dh)
            kept, reduce_following = at(inner, i)
            grads = put(grads, i + 1, *reduce_following(behind))
            behind, dh = kept(unit, dh)
            return (dh, before, behind, grads), None

        before = again(count - 2, dh) if count > 1 else None
        behind, dh = end(unit, dh)
        carry = (dh, before, behind, grads)
        if count > 2:  # a scan of none would still be counted by who reads the program
            carry, _ = lax.scan(body, carry, jnp.arange(count - 2, 0, -1))
        dh, unit, behind, grads = carry
        if count > 1:
            kept, reduce_second = at(inner, 0)
            grads = put(grads, 1, *reduce_second(behind))
            behind, dh = kept(unit, dh)
        return put(grads, 0, *reduce_first(behind)), None, None, dh, None

    stack = jax.custom_vjp(lambda *arguments: forward(*arguments)[0])
    stack.defvjp(forward, backward)
    return stack
