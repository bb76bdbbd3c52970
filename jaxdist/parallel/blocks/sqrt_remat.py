"""Blocks in about sqrt(L) segments (Chen et al. 2016, arXiv 1604.06174, section 4.2): `memory.remat: sqrt`.

The forward pass keeps the input of each segment. The backward pass computes one segment again at a time, which gives
the inputs of its blocks; then it computes each of these blocks again, from the last to the first. Memory is that of
about 2 sqrt(L) inputs. Every block but the last of a segment is computed three times.

A scan inside a scan under `jax.checkpoint` would need segments of equal size, and would copy each segment's part of the
stacked parameters. The loops here take one row at a time.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import varying_axes, zeros_varying_like
from jaxdist.config.rules.remat import refuse_split_sequence
from jaxdist.jaxpr.evaluate import trimmed
from jaxdist.parallel.blocks.layers import AGAIN, BlockRows, OneBlock, at, put
from jaxdist.parallel.blocks.remat import after
from jaxdist.specs import PyTree, only


class SegmentedBlocks(NamedTuple):
    """A `BlockRunner` that keeps only the inputs of segments. Its blocks must not be rematerialised."""

    one: OneBlock

    def forward(self, rows: BlockRows, h: jax.Array, keys: PyTree) -> tuple[jax.Array, PyTree]:
        """(output of the last block, residuals for `backward`)."""
        if "tensor" in varying_axes(h):  # row numbers, which wait for a gradient, would vary over `tensor` like it
            refuse_split_sequence()
        size, count, left = sizes(len(rows.layers))

        def segment(h: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self._through(rows, h, first, size, keys), h

        last, inputs = lax.scan(segment, h, size * jnp.arange(count))
        h = self._through(rows, last, count * size, left, keys) if left else last
        return h, (inputs, last if left else None, keys)

    def _through(self, rows: BlockRows, h: jax.Array, first: Any, size: int, keys: PyTree) -> jax.Array:
        """h after the blocks of one segment."""
        step = lambda h, i: (self.one.after(rows, i, h, keys), None)  # noqa: E731
        return lax.scan(step, h, first + jnp.arange(size))[0]

    def backward(self, rows: BlockRows, saved: PyTree, dh: jax.Array) -> tuple[PyTree, jax.Array]:
        """(gradients with respect to diff, gradient of h)."""
        inputs, last, keys = saved
        size, count, left = sizes(len(rows.layers))
        carry = dh, zeros_varying_like(rows.diff)
        if left:
            carry = self._segment(rows, last, count * size, left, keys, carry)

        def step(carry: PyTree, own: PyTree) -> tuple[PyTree, None]:
            first, h = own
            return self._segment(rows, h, first, size, keys, carry), None

        (dh, grads), _ = lax.scan(step, carry, (size * jnp.arange(count), inputs), reverse=True)
        return grads, dh

    def _segment(
        self, rows: BlockRows, h: jax.Array, first: Any, size: int, keys: PyTree, carry: tuple[jax.Array, PyTree]
    ) -> tuple[jax.Array, PyTree]:
        """The carry (gradient of the segment's output, gradients so far) after this segment. h: the segment's input."""
        # XLA unrolls a loop of one round, and would merge this computation with that of the forward pass.
        first = after(carry[0], jnp.asarray(first))

        def input_of_next(inputs: jax.Array, j: jax.Array) -> tuple[jax.Array, None]:
            i = first + j
            with jax.named_scope(AGAIN):
                return put(inputs, j + 1, self.one.after(rows, i, at(inputs, j), keys)), None

        def gradients(i: jax.Array, h: jax.Array, dh: jax.Array) -> tuple[PyTree, jax.Array]:
            with jax.named_scope(AGAIN):
                unit, reduce = self.one.fetch(rows, i)
                _, kept = self.one.run(unit, rows, i, h, keys)
            grads, dh = kept(only(kept.wanted, unit), dh, kept.shared(keys))
            return reduce(grads)[0], dh

        def backward(carry: tuple[jax.Array, PyTree], j: jax.Array) -> tuple[PyTree, None]:
            dh, grads = carry
            i = first + j

            def work() -> tuple[jax.Array, PyTree]:
                own, before = trimmed(gradients, i, at(inputs, j), dh)  # without the output of the block
                return before, own

            before, own = self.one.in_row(rows, i, work, dh)
            return (before, put(grads, i, own)), None

        inputs = jnp.broadcast_to(h, (size, *h.shape))  # row 0 is right; the loop writes the others
        if size > 1:
            inputs, _ = lax.scan(input_of_next, inputs, jnp.arange(size - 1))
        return lax.scan(backward, carry, jnp.arange(size), reverse=True)[0]


def sizes(blocks: int) -> tuple[int, int, int]:
    """(blocks of a segment, number of such segments, blocks of one more segment, or 0)."""
    size = math.isqrt(blocks)
    return size, *divmod(blocks, size)
