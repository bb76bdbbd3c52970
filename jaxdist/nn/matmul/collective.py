"""Collective matmul: a matrix product and its collective, cut into pieces that are sent while others are multiplied.

The collectives are those of sequence parallelism; a piece is one device's positions, so there are n pieces for tensor=n
(Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition", ASPLOS). `gather_product` is an
all-gather and then a product; `product_scatter` is a product and then a reduce-scatter. Each is the other's transpose.
They send as many bytes as the collectives that they replace, in n - 1 `ppermute`s in one direction: behind a switch
(NVLink) a device would send both directions through the same port.

The gradient of a kernel stays one product over all positions. A sum of n products would be rounded n times.

Legend: B batch, S sequence, s positions of one device, I input width; kernels are [I, *O].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import active_axes, make_group, to_varying, varying_axes
from jaxdist.collectives.group import shift
from jaxdist.errors import UserError
from jaxdist.precision.policy import accumulation_dtype

Multiply = Callable[[jax.Array, jax.Array], jax.Array]  # activations, kernel


def gather_product(x_BsI: jax.Array, kernel: jax.Array) -> jax.Array:
    """The product of all devices' positions with this device's kernel: [B, s, I], [I, *O] -> [B, S, *O]."""
    return _gather_product(*_alike(x_BsI, kernel)) if active_axes("tensor") else jnp.tensordot(x_BsI, kernel, 1)


def product_scatter(x_BSI: jax.Array, kernel: jax.Array) -> jax.Array:
    """The sum of all devices' products, at this device's positions: [B, S, I], [I, *O] -> [B, s, *O].

    Partial sums are sent in the products' dtype and added in at least fp32. They are rounded once on each device, as in
    NCCL's rings.
    """
    if not active_axes("tensor"):
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
    """Both arguments, typed varying over the axes of both and over `tensor`."""
    # Autodiff transposes these casts: gradients are summed over the axes that a cast adds.
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
    """(multiply(whole, kernel), whole), where whole is the all-gather of `own`.

    In round i a device multiplies the piece of the rank i places before it, and sends this piece on.
    """
    group = make_group("tensor")
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
        # XLA:GPU's dot-merger joins products that share an operand into one, which would wait for all pieces. Behind a
        # barrier the kernel of each round is another value.
        following, result, kernel = lax.optimization_barrier((following, result, kernel))
        product, whole = put(product, result, i), put(whole, piece, i)
        piece = following
    assert product is not None and whole is not None
    return product, whole


def _scatter(multiply: Multiply, whole: jax.Array, kernel: jax.Array) -> jax.Array:
    """The reduce-scatter of multiply(whole, kernel): this device's piece of the sum.

    The sum for a rank starts at the rank after it, and travels once round the ring.
    """
    group = make_group("tensor")
    n, s = group.n, whole.shape[1] // group.n

    def part(i: int, kernel: jax.Array) -> jax.Array:
        return multiply(lax.dynamic_slice_in_dim(whole, (group.rank - 1 - i) % n * s, s, axis=1), kernel)

    total = part(0, kernel)
    for i in range(1, n):
        come = group.permute(total, shift(n))
        # Barriers keep XLA:GPU from merging products (see `_gather`), and from adding `come` inside a product, which
        # would have to wait for it.
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
