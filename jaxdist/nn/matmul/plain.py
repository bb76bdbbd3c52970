"""Matrix products of activations and kernels, whose backward pass transposes nothing.

JAX's own gradient of a kernel is the product dy^T x, and then its transpose. XLA for CPUs makes x^T dy of it by a
transposed copy of dy, and multiplies this at two thirds of the speed. Here it is x^T dy from the start: a step of GPT-2
with 4 blocks of 256 took 361 ms in place of 407 (8 x 128 tokens, one core).

Legend: T tokens, I input width, O output width.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import to_varying, varying_axes
from jaxdist.precision.autocast import casting


def plain_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The product x [..., I] @ kernel [I, *O] -> [..., *O], in the wider of their dtypes."""
    inputs = kernel.shape[0]
    if casting.value or x.dtype != kernel.dtype:  # autocast leaves a product with a rule of its own as it is
        return jnp.tensordot(x, kernel, 1)
    axes = varying_axes(x) | varying_axes(kernel)  # autodiff transposes the casts, and so sums gradients over axes
    x_TI, kernel_IO = to_varying((x.reshape(-1, inputs), kernel.reshape(inputs, -1)), axes)
    return _product(x_TI, kernel_IO).reshape(*x.shape[:-1], *kernel.shape[1:])


@jax.custom_vjp
def _product(x_TI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    return jnp.dot(x_TI, kernel_IO)


def _forward(x_TI: jax.Array, kernel_IO: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jnp.dot(x_TI, kernel_IO), (x_TI, kernel_IO)


def _backward(saved: tuple[jax.Array, jax.Array], dy_TO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_TI, kernel_IO = saved
    # First the kernel's, after which x is not needed any more.
    of_kernel = lax.dot_general(x_TI, dy_TO, (((0,), (0,)), ((), ())))
    return lax.dot_general(dy_TO, kernel_IO, (((1,), (1,)), ((), ()))), of_kernel


_product.defvjp(_forward, _backward)
