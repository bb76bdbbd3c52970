"""Matrix products in float8, with one scale a tensor that comes from the tensor's largest value.

This is torchao's "tensorwise" recipe with dynamic scaling, and Transformer Engine's `Float8CurrentScaling`. Formats are
those of Micikevicius et al. 2022, arXiv 2209.05433: activations and weights are float8_e4m3fn (3 bits of mantissa),
gradients of results are float8_e5m2 (2 bits, with the range of float16). Scales are powers of two, which round nothing,
neither here nor in bfloat16. No state is carried from step to step.

Legend: T tokens, I input width, O output width.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.nn.matmul.plain import as_matrices, plain_product

E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
MULTIPLE = 16  # cuBLASLt's tiles of float8 matrices have this many rows and columns
SMALLEST = 2.0**-100  # the least maximum: a scale is never zero or subnormal
FLOAT32_EXPONENT = 0x7F800000


def quantise(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """(x / scale in the float8 dtype, scale). The scale is fp32: the power of two above max |x| / the dtype's maximum.

    If a value of x is not finite, neither is the scale, nor any product.
    """
    largest = jnp.maximum(jnp.abs(x).max().astype(jnp.float32), SMALLEST) / float(jnp.finfo(dtype).max)
    exponent = lax.bitcast_convert_type(largest, jnp.int32) & FLOAT32_EXPONENT
    scale = lax.bitcast_convert_type(exponent, jnp.float32) * 2
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def fits(tokens: int, inputs: int, outputs: int) -> bool:
    """Whether float8 can multiply these sizes. Forward or backward, each of the three is contracted."""
    return tokens * inputs * outputs > 0 and all(size % MULTIPLE == 0 for size in (tokens, inputs, outputs))


def product(x: jax.Array, kernel: jax.Array, *, fp8: bool) -> jax.Array:
    """The product x [..., I] @ kernel [I, *O] -> [..., *O], in their dtype.

    fp8: multiply in float8 if this device's sizes fit (`fits`). Each device has the scales of its own shards.

    It has no forward-mode derivatives (`jax.jvp`): see `plain_product`.
    """
    inputs = x.shape[-1]
    if not (fp8 and fits(x.size // max(inputs, 1), inputs, kernel.size // max(inputs, 1))):
        return plain_product(x, kernel)
    return as_matrices(float8_product, x, kernel)


def _multiply(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array], dims: Any, dtype: Any, how: Any) -> Any:
    """The product of two quantised arrays, accumulated in fp32. how: DEFAULT adds faster on Hopper, with fewer bits."""
    # XLA:GPU (gemm_rewriter.cc) keeps a product of two-dimensional float8 arrays in float8. It puts the factor of the
    # result into the same cuBLASLt call, if the factor has the result's dtype. The other form casts and scales arrays
    # before the product, and is recognised by its pattern. This has failed before (openxla/xla issue 17887), and gave
    # a product in a wider dtype without a message.
    y = lax.dot_general(a[0], b[0], (dims, ((), ())), precision=how, preferred_element_type=dtype)
    return y * (a[1] * b[1]).astype(dtype)


@jax.custom_vjp
def float8_product(x_TI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """The product x @ kernel -> [T, O], in the wider of their dtypes. Both must vary over the same mesh axes."""
    return _forward(x_TI, kernel_IO)[0]


def _forward(x_TI: jax.Array, kernel_IO: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    dtype = jnp.promote_types(x_TI.dtype, kernel_IO.dtype)
    y = _multiply(quantise(x_TI, E4M3), quantise(kernel_IO, E4M3), ((1,), (0,)), dtype, lax.Precision.DEFAULT)
    # The backward pass quantises again, as in torchao. Residuals are then the same as in bfloat16, and remat policies
    # keep, drop and gather the same arrays. A float8 kernel would be kept even if its gathered parameter may not be.
    return y, (x_TI, kernel_IO)


def _backward(saved: tuple[jax.Array, jax.Array], dy_TO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_TI, kernel_IO = saved
    dy, exact = quantise(dy_TO, E5M2), lax.Precision.HIGHEST
    dx_TI = _multiply(dy, quantise(kernel_IO, E4M3), ((1,), (1,)), x_TI.dtype, exact)
    return dx_TI, _multiply(quantise(x_TI, E4M3), dy, ((0,), (0,)), kernel_IO.dtype, exact)


float8_product.defvjp(_forward, _backward)
