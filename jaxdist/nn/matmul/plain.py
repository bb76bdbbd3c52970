"""Matrix products of activations and kernels, with a backward pass that is fast on CPUs, too.

JAX's own gradient of a kernel is the product dy^T x, and then its transpose. XLA for CPUs makes x^T dy of it by a
transposed copy of dy, and multiplies this at two thirds of the speed. Here it is x^T dy from the start: a step of GPT-2
with 4 blocks of 256 took 361 ms in place of 407 (8 x 128 tokens, one core). Only where x is wider than dy, as in the
second product of an MLP, dy^T x and its transpose are the faster way.

A process on one core, as a rank on CPUs, multiplies a transposed copy of the narrower array where the other is twice as
wide: a step of this model with 16 x 128 tokens took 690 ms in place of 800.

Legend: T tokens, I input width, O output width.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import to_varying, varying_axes
from jaxdist.mesh import traced_for_gpus
from jaxdist.precision.autocast import casting

# Whether all processes of the job have one core each: set by `runtime.start`, since their programs must be alike.
one_core = jax.make_user_context(False)


def plain_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The product x [..., I] @ kernel [I, *O] -> [..., *O], in their dtype.

    Like all functions with a `jax.custom_vjp` it has derivatives by `jax.grad`, `jax.vjp` and `jax.hessian`, and none
    by `jax.jvp` and `jax.jacfwd`. Under autocast (O1), and for operands of two dtypes, it is `jnp.dot`.
    """
    if casting.value or x.dtype != kernel.dtype:
        return as_matrices(jnp.dot, x, kernel)
    precision = jax.config.jax_default_matmul_precision  # of the caller: the backward pass is traced elsewhere
    return as_matrices(functools.partial(_product, precision), x, kernel)


def as_matrices(multiply: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, kernel: jax.Array) -> jax.Array:
    """multiply(x [T, I], kernel [I, O]) -> [T, O], for x [..., I] and kernel [I, *O] -> [..., *O].

    multiply gets both arrays typed varying over the mesh axes of both.
    """
    axes = varying_axes(x) | varying_axes(kernel)  # autodiff transposes the casts, and so sums gradients over axes
    (*rows, inputs), (width, *features) = x.shape, kernel.shape
    matrices = x.reshape(math.prod(rows), inputs), kernel.reshape(width, math.prod(features))
    return multiply(*to_varying(matrices, axes)).reshape(*rows, *features)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(precision: Any, x_TI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    return jnp.dot(x_TI, kernel_IO, precision=precision)


def _forward(precision: Any, x_TI: jax.Array, kernel_IO: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jnp.dot(x_TI, kernel_IO, precision=precision), (x_TI, kernel_IO)


def _backward(precision: Any, saved: tuple[jax.Array, jax.Array], dy_TO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_TI, kernel_IO = saved
    of_kernel = _over_rows(precision, x_TI, dy_TO)  # first the kernel's, after which x is not needed any more
    return lax.dot_general(dy_TO, kernel_IO, (((1,), (1,)), ((), ())), precision=precision), of_kernel


def _over_rows(precision: Any, x_TI: jax.Array, dy_TO: jax.Array) -> jax.Array:
    """The product x^T dy [I, O]: the kernel's gradient. XLA:CPU does not see through the barriers."""
    if not traced_for_gpus():
        if x_TI.shape[1] > dy_TO.shape[1]:  # a wide x^T is multiplied at two thirds of the speed
            return lax.optimization_barrier(_over_rows(precision, dy_TO, x_TI)).T
        if dy_TO.shape[1] >= 2 * x_TI.shape[1] and one_core.value:  # at half of it, on one core
            return jnp.dot(lax.optimization_barrier(x_TI.T), dy_TO, precision=precision)
    return lax.dot_general(x_TI, dy_TO, (((0,), (0,)), ((), ())), precision=precision)


_product.defvjp(_forward, _backward)
