"""Grouped products: rows that are sorted by expert, each multiplied with the kernel of its expert.

`jax.lax.ragged_dot` is exact, but XLA computes it for every expert over all rows (CPU), or with temporaries many times
as large as the rows (GPU). Here rows lie in blocks of one size, each with rows of one expert, and a loop multiplies
block by block. Work and memory are those of the rows alone.

Legend: M rows in blocks of b, G experts, I input width, O output width.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import to_varying, varying_axes, zeros_varying_like
from jaxdist.precision.policy import accumulation_dtype

LARGEST_BLOCK = 1024


def block_rows(rows: int, experts: int) -> int:
    """The number of rows of a block: about a quarter of what an expert gets, so that little of it is padding."""
    size = 8
    while size < LARGEST_BLOCK and size * 4 * experts <= rows:
        size *= 2
    return size


def grouped_product(rows_MI: jax.Array, kernels_GIO: jax.Array, owner: jax.Array) -> jax.Array:
    """[M, O] each row times the kernel of its block's owner, in the rows' dtype.

    owner: [M / b] the expert of each block; G for a block of zeros, which is skipped.
    """
    axes = varying_axes(rows_MI) | varying_axes(kernels_GIO) | varying_axes(owner)
    return _grouped(*to_varying((rows_MI, kernels_GIO, owner), axes))


@jax.custom_vjp
def _grouped(rows_MI: jax.Array, kernels_GIO: jax.Array, owner: jax.Array) -> jax.Array:
    return _times(rows_MI, kernels_GIO, owner, "bi,io->bo")


def _times(rows: jax.Array, kernels: jax.Array, owner: jax.Array, spec: str) -> jax.Array:
    """Each block by the kernel of its owner. spec: of one block's product."""
    blocks = rows.reshape(len(owner), -1, rows.shape[1])
    zeros = zeros_varying_like(jax.eval_shape(lambda: jnp.einsum(spec, blocks[0], kernels[0])))
    zeros = to_varying(zeros, varying_axes(owner))

    def one(_: None, own: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        block, expert = own
        product = lambda: jnp.einsum(spec, block, lax.dynamic_index_in_dim(kernels, expert, 0, keepdims=False))  # noqa: E731
        return None, lax.cond(expert < len(kernels), product, lambda: zeros)

    found = lax.scan(one, None, (blocks, owner))[1]
    return found.reshape(-1, found.shape[-1])


def _backward(kept: tuple[jax.Array, ...], grad_MO: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows_MI, kernels_GIO, owner = kept
    blocks, grads = (x.reshape(len(owner), -1, x.shape[1]) for x in (rows_MI, grad_MO))

    def add(sums: jax.Array, own: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        block, grad, expert = own

        def added() -> jax.Array:
            product = jnp.einsum("bi,bo->io", block, grad, preferred_element_type=sums.dtype)
            old = lax.dynamic_index_in_dim(sums, expert, 0, keepdims=False)
            return lax.dynamic_update_index_in_dim(sums, old + product, expert, 0)

        return lax.cond(expert < len(sums), added, lambda: sums), None

    zeros = zeros_varying_like(kernels_GIO, accumulation_dtype(kernels_GIO.dtype))
    sums = lax.scan(add, zeros, (blocks, grads, owner))[0]
    return _times(grad_MO, kernels_GIO, owner, "bo,io->bi"), sums.astype(kernels_GIO.dtype), None


_grouped.defvjp(lambda *given: (_grouped(*given), given), _backward)
