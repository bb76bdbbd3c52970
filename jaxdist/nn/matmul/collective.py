"""Collective matmul (Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition", ASPLOS):
the collectives beside the products of `sequence`, cut into as many pieces as `tensor` has devices, so that one piece
travels while another is multiplied.

Two rings, each the other's transpose: `gather_product` for an all-gather before a product, `product_scatter` for a
reduce-scatter behind one. A piece is a device's positions. Bytes are those of the collectives that they replace, sent
in n - 1 `ppermute`s of one direction: behind a switch (NVLink) a device sends both ways through the same port.

Gradients of kernels stay one product, of all positions: as a sum of n products they would be rounded n times.

Two habits of XLA:GPU would undo the cut, and barriers keep it from them. It merges products that share an operand into
one (the pass dot-merger), which waits for all pieces: the kernel of a round comes out of the round before. And it adds
the sum that comes in inside the product, which then waits for it.

Legend: B batch, S sequence, s positions of one device, I input width; kernels are [I, *O].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import make_group, to_varying, varying_axes
from jaxdist.collectives.group import shift
from jaxdist.errors import UserError
from jaxdist.precision.policy import accumulation_dtype

Multiply = Callable[[jax.Array, jax.Array], jax.Array]  # activations, kernel


def gather_product(x_BsI: jax.Array, kernel: jax.Array) -> jax.Array:
    """[B, s, I], [I, *O] -> [B, S, *O]: the product of all devices' positions with this device's kernel."""
    return _gather_product(*_alike(x_BsI, kernel)) if make_group("tensor") else jnp.tensordot(x_BsI, kernel, 1)


def product_scatter(x_BSI: jax.Array, kernel: jax.Array) -> jax.Array:
    """[B, S, I], [I, *O] -> [B, s, *O]: this device's positions of the sum of all devices' products.

    The sum travels in the products' type and is added to in at least fp32, so it is rounded once a device, as NCCL's
    rings do.
    """
    if make_group("tensor") is None:
        return jnp.tensordot(x_BSI, kernel, 1)
    check_positions(x_BSI.shape[1])
    return _product_scatter(*_alike(x_BSI, kernel))


def check_positions(length: int) -> None:
    """Raise `UserError` unless all devices of `tensor` get equally many positions."""
    if length % (count := lax.axis_size("tensor")):
        raise UserError(
            f"sequence_parallel: {length} positions are not divisible by tensor={count}; allowed: a"
            " sequence length that is, or sequence_parallel=False"
        )


def _alike(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both varying over the axes of either: autodiff transposes the casts, and so sums gradients over axes."""
    both: tuple[jax.Array, jax.Array] = to_varying((x, kernel), varying_axes(x) | varying_axes(kernel) | {"tensor"})
    return both


def _times(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.tensordot(x, kernel, 1)


def _times_transposed(dy: jax.Array, kernel: jax.Array) -> jax.Array:
    dims = kernel.ndim - 1
    return jnp.tensordot(dy, kernel, (tuple(range(2, 2 + dims)), tuple(range(1, 1 + dims))))


def _of_kernel(x_BSI: jax.Array, dy: jax.Array) -> jax.Array:
    return jnp.tensordot(x_BSI, dy, ((0, 1), (0, 1)))


def _gather(multiply: Multiply, own: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(multiply(whole, kernel), whole): in round i each device multiplies what the i-th before it had, and passes it
    on."""
    group = make_group("tensor")
    assert group is not None
    n, s = group.n, own.shape[1]

    def put(whole: jax.Array | None, piece: jax.Array, i: int) -> jax.Array:
        if whole is None:
            zeros = jnp.zeros((piece.shape[0], n * s, *piece.shape[2:]), piece.dtype)
            whole = to_varying(zeros, varying_axes(piece))
        return lax.dynamic_update_slice_in_dim(whole, piece, (group.rank - i) % n * s, axis=1)

    piece, product, whole = own, None, None
    for i in range(n):
        following = group.permute(piece, shift(n)) if i < n - 1 else piece
        result = multiply(piece, kernel)
        following, result, kernel = lax.optimization_barrier((following, result, kernel))
        product, whole = put(product, result, i), put(whole, piece, i)
        piece = following
    assert product is not None and whole is not None
    return product, whole


def _scatter(multiply: Multiply, whole: jax.Array, kernel: jax.Array) -> jax.Array:
    """This device's piece of the sum of multiply(whole, kernel): each sum starts behind the device that it is for, and
    comes round to it."""
    group = make_group("tensor")
    assert group is not None
    n, s = group.n, whole.shape[1] // group.n

    def part(i: int, kernel: jax.Array) -> jax.Array:
        return multiply(lax.dynamic_slice_in_dim(whole, (group.rank - 1 - i) % n * s, s, axis=1), kernel)

    total = part(0, kernel)
    for i in range(1, n):
        come = group.permute(total, shift(n))
        total, kernel = lax.optimization_barrier((total, kernel))
        own = lax.optimization_barrier(part(i, kernel))
        wide = accumulation_dtype(own.dtype)
        total = (come.astype(wide) + own.astype(wide)).astype(own.dtype)
    return total


@jax.custom_vjp
def _gather_product(x_BsI: jax.Array, kernel: jax.Array) -> jax.Array:
    return _gather(_times, x_BsI, kernel)[0]


def _gather_product_forward(x_BsI: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    y, x_BSI = _gather(_times, x_BsI, kernel)
    return y, (x_BSI, kernel)


def _gather_product_backward(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BSI, kernel = saved
    return _scatter(_times_transposed, dy, kernel), _of_kernel(x_BSI, dy)


_gather_product.defvjp(_gather_product_forward, _gather_product_backward)


@jax.custom_vjp
def _product_scatter(x_BSI: jax.Array, kernel: jax.Array) -> jax.Array:
    return _scatter(_times, x_BSI, kernel)


def _product_scatter_forward(x_BSI: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product_scatter(x_BSI, kernel), (x_BSI, kernel)


def _product_scatter_backward(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BSI, kernel = saved
    dx_BSI, whole = _gather(_times_transposed, dy, kernel)
    return dx_BSI, _of_kernel(x_BSI, whole)


_product_scatter.defvjp(_product_scatter_forward, _product_scatter_backward)
