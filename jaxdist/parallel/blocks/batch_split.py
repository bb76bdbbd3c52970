"""Batch split (`parallel.batch_split`): a block runs for two halves of a device's samples.

The halves need nothing of each other, so that XLA's scheduler can run a collective of one half, such as an all-gather
of sequence parallelism, beside products of the other. This is the batch split of Domino (Wang et al. 2024, arXiv
2409.15241), without an order that is fixed by hand. As many bytes of activations are sent, in twice as many calls;
gradients of norms, which are summed over `tensor`, are summed for each half. Figures: docs/compiler.md.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import varying_axes
from jaxdist.errors import UserError
from jaxdist.specs import PyTree


def in_halves(block: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A block (`ModelDef.block`) that runs for the first half of the samples, and then for the second.

    Raises `UserError`, when it is traced, for an odd number of samples, and for what a block reads besides h without a
    row for each sample.
    """

    def run(params: PyTree, h: jax.Array, *given: PyTree) -> jax.Array:
        """h, given: leaves [B, ...]."""
        count = h.shape[0]
        if count % 2:
            raise UserError(
                f"parallel.batch_split: 2 halves the samples that a device has of a microbatch, which are {count};"
                " allowed: an even number; or batch_split=1"
            )
        for leaf in jax.tree.leaves(given):
            if jnp.shape(leaf)[:1] != (count,):
                raise UserError(
                    f"parallel.batch_split: 2 halves what blocks read of a batch, and {jnp.shape(leaf)} has no row"
                    f" for each of {count} samples; let rows(batch) give arrays [B, ...], or take batch_split=1"
                )

        def half(i: int) -> PyTree:
            return jax.tree.map(lambda leaf: lax.slice_in_dim(leaf, i * count // 2, (i + 1) * count // 2), (h, *given))

        first = block(params, *half(0))
        # XLA:GPU's dot-merger would join the two products with a parameter into one, which waits for both halves.
        # Behind a barrier the second half's parameters are other values.
        second = block(behind_barriers(params), *half(1))
        return jnp.concatenate([first, second])

    return run


def behind_barriers(tree: PyTree) -> PyTree:
    """The same values, which XLA takes for others: an optimization barrier for the leaves that vary over the same axes.

    Not one for all: before jax 0.11 everything behind a barrier varies over whatever one of its values varies over. Not
    one for each leaf: XLA of jax 0.12.0 then cannot schedule some loops ("RET_CHECK ... hlo_schedule").
    """
    leaves, treedef = jax.tree.flatten(tree)
    alike = dict[frozenset[str], list[int]]()
    for i, leaf in enumerate(leaves):
        alike.setdefault(varying_axes(leaf), []).append(i)
    for places in alike.values():
        for i, leaf in zip(places, lax.optimization_barrier([leaves[i] for i in places]), strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)
