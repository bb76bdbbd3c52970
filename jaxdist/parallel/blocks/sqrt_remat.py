"""Blocks in about sqrt(L) segments (Chen et al. 2016, arXiv 1604.06174, section 4.2): `memory.remat: sqrt`.

The forward pass keeps the input of each segment. The backward pass computes one segment at a time again, which gives
the inputs of its blocks, and then each of its blocks, the last first. So at most as many inputs are kept as there are
segments and blocks in a segment; each block but the last of a segment is computed three times.

Written by hand, not as a scan inside a scan under `jax.checkpoint`: segments need not be equal, and a scan over a part
of the stacked parameters would copy that part; here loops take one row at a time.
"""

import math
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import varying_axes, zeros_varying_like
from jaxdist.config.rules.remat import refuse_split_backward, refuse_split_sequence
from jaxdist.jaxpr.evaluate import trimmed
from jaxdist.parallel.blocks.layers import AGAIN, Blocks, Stack, at, put
from jaxdist.parallel.blocks.remat import after
from jaxdist.specs import PyTree, only


class Segments(NamedTuple):
    """In place of `Blocks`, where only the inputs of segments are kept.

    blocks: without rematerialisation.
    """

    blocks: Blocks

    def forward(
        self, diff: PyTree, held: PyTree, layers: jax.Array, h: jax.Array, keys: PyTree
    ) -> tuple[jax.Array, PyTree]:
        """(output of the last block, what `backward` needs). Segments have isqrt(L) blocks, the last what is left."""
        if "tensor" in varying_axes(h):  # and so would be the rows' numbers, behind a barrier with its gradient
            refuse_split_sequence()
        size, count, left = sizes(len(layers))

        def segment(h: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.through(diff, held, h, first, size, layers, keys), h

        last, inputs = lax.scan(segment, h, size * jnp.arange(count))
        h = self.through(diff, held, last, count * size, left, layers, keys) if left else last
        return h, (inputs, last if left else None, keys)

    def through(
        self, diff: PyTree, held: PyTree, h: jax.Array, first: Any, size: int, layers: jax.Array, keys: PyTree
    ) -> jax.Array:
        """h after the blocks of one segment."""

        def body(h: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            return self._after(diff, held, i, h, layers[i], keys), None

        return lax.scan(body, h, first + jnp.arange(size))[0]

    def _after(self, diff: PyTree, held: PyTree, i: Any, h: jax.Array, layer: jax.Array, keys: PyTree) -> jax.Array:
        """h after row i."""

        def work() -> tuple[jax.Array, None]:
            return self.blocks.block(self.blocks.gather(at(diff, i), at(held, i), None), h, layer, keys), None

        return self.blocks.in_row(layer, work, h)[0]

    def backward(
        self, diff: PyTree, held: PyTree, layers: jax.Array, saved: PyTree, dh: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """(gradients with respect to diff, gradient of the first block's input)."""
        inputs, last, keys = saved
        size, count, left = sizes(len(layers))
        carry = dh, zeros_varying_like(diff)
        if left:
            carry = self._segment(diff, held, last, count * size, left, layers, keys, carry)

        def body(carry: PyTree, own: PyTree) -> tuple[PyTree, None]:
            first, h = own
            return self._segment(diff, held, h, first, size, layers, keys, carry), None

        (dh, grads), _ = lax.scan(body, carry, (size * jnp.arange(count), inputs), reverse=True)
        return grads, dh

    def _segment(
        self,
        diff: PyTree,
        held: PyTree,
        h: jax.Array,
        first: Any,
        size: int,
        layers: jax.Array,
        keys: PyTree,
        carry: tuple[jax.Array, PyTree],
    ) -> tuple[jax.Array, PyTree]:
        """The carry, (gradient of the segment's output, gradients so far), after this segment."""
        first = after(carry[0], jnp.asarray(first))  # a loop of one round is unrolled, and merged with the forward one

        def input_of_next(inputs: jax.Array, j: jax.Array) -> tuple[jax.Array, None]:
            i = first + j
            with jax.named_scope(AGAIN):
                return put(inputs, j + 1, self._after(diff, held, i, at(inputs, j), layers[i], keys)), None

        def gradients(i: jax.Array, h: jax.Array, dh: jax.Array) -> tuple[PyTree, jax.Array]:
            with jax.named_scope(AGAIN):
                unit, reduce = self.blocks.fetch(diff, held, i)
                _, kept = self.blocks.run(unit, diff, h, layers[i], keys)
            behind, dh = kept(only(kept.wanted, unit), dh)
            return reduce(behind)[0], dh

        def backward(carry: tuple[jax.Array, PyTree], j: jax.Array) -> tuple[PyTree, None]:
            behind, grads = carry
            i = first + j

            def work() -> tuple[jax.Array, PyTree]:
                own, dh = trimmed(gradients, i, at(inputs, j), behind)  # nobody needs the block's output again
                return dh, own

            dh, own = self.blocks.in_row(layers[i], work, behind)
            return (dh, put(grads, i, own)), None

        inputs = jnp.broadcast_to(h, (size, *h.shape))  # row 0 is what it says, the others are written
        if size > 1:
            inputs, _ = lax.scan(input_of_next, inputs, jnp.arange(size - 1))
        return lax.scan(backward, carry, jnp.arange(size), reverse=True)[0]

    def backward_input(self, diff: PyTree, held: PyTree, layers: jax.Array, saved: PyTree, dh: jax.Array) -> NoReturn:
        """Raises `UserError`: no half of a backward pass."""
        refuse_split_backward()

    def backward_weights(
        self, diff: PyTree, held: PyTree, layers: jax.Array, saved: PyTree, crossing: PyTree, like: PyTree
    ) -> NoReturn:
        """The same."""
        refuse_split_backward()


def sizes(blocks: int) -> tuple[int, int, int]:
    """(blocks of a segment, segments of that size, blocks of one more)."""
    size = math.isqrt(blocks)
    return size, *divmod(blocks, size)


def segmented(segments: Segments) -> Stack:
    """The stack of blocks in segments, differentiable once, with respect to diff and h."""

    def forward(diff: PyTree, held: PyTree, layers: jax.Array, h: jax.Array, keys: PyTree) -> tuple[jax.Array, PyTree]:
        h, saved = segments.forward(diff, held, layers, h, keys)
        return h, (diff, held, layers, saved)

    def backward(residuals: PyTree, dh: jax.Array) -> tuple[PyTree, None, None, jax.Array, None]:
        diff, held, layers, saved = residuals
        grads, dh = segments.backward(diff, held, layers, saved, dh)
        return grads, None, None, dh, None

    stack = jax.custom_vjp(lambda *arguments: forward(*arguments)[0])
    stack.defvjp(forward, backward)
    return stack
