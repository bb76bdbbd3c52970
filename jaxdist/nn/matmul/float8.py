"""Matrix products in float8, with one scale a tensor, taken from its own largest value: torchao's "tensorwise" recipe
with dynamic scaling, Transformer Engine's `Float8CurrentScaling`. Formats: Micikevicius et al. 2022, arXiv 2209.05433.

Activations and weights are float8_e4m3fn (3 bits of mantissa), the gradients that come back float8_e5m2 (2 bits, and
the range of float16). Scales are powers of two: they round nothing, neither here nor in bfloat16. Nothing is remembered
from step to step.

XLA's rewriter for GPUs (gemm_rewriter.cc) takes a product of float8 arrays as it stands, if each has two dims, and puts
a number that its result is multiplied by into the same cuBLASLt call, if it has the result's type. The other form, with
float8 arrays that are widened and scaled before the product, is found by its pattern only, and has been missed before
(openxla/xla issue 17887): a product in a wider type then, and nobody is told.

Legend: T tokens, I input width, O output width.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.collectives import to_varying, varying_axes

E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
MULTIPLE = 16  # cuBLASLt multiplies float8 matrices in tiles of so many rows and columns
SMALLEST = 2.0**-100  # stands for a smaller maximum, so that no scale is zero or subnormal
FLOAT32_EXPONENT = 0x7F800000


def quantise(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """(x / scale in the float8 type, scale): fp32, the power of two above max |x| / the type's largest value.

    A value that is not finite makes the scale so, and with it every product.
    """
    largest = jnp.maximum(jnp.abs(x).max().astype(jnp.float32), SMALLEST) / float(jnp.finfo(dtype).max)
    exponent = lax.bitcast_convert_type(largest, jnp.int32) & FLOAT32_EXPONENT
    scale = lax.bitcast_convert_type(exponent, jnp.float32) * 2
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def fits(tokens: int, inputs: int, outputs: int) -> bool:
    """Whether a linear layer's product has sizes for float8: all three are contracted, forward or backward."""
    return tokens * inputs * outputs > 0 and all(size % MULTIPLE == 0 for size in (tokens, inputs, outputs))


def product(x: jax.Array, kernel: jax.Array, *, fp8: bool) -> jax.Array:
    """x [..., I] @ kernel [I, *O] -> [..., *O], in their type. fp8: multiplied in float8 where this device's sizes fit
    (`fits`), each device with the scales of its own shards."""
    inputs = x.shape[-1]
    if not (fp8 and fits(x.size // max(inputs, 1), inputs, kernel.size // max(inputs, 1))):
        return jnp.tensordot(x, kernel, 1)
    axes = varying_axes(x) | varying_axes(kernel)  # autodiff transposes the casts, and so sums gradients over axes
    x_TI, kernel_IO = to_varying((x.reshape(-1, inputs), kernel.reshape(inputs, -1)), axes)
    return float8_product(x_TI, kernel_IO).reshape(*x.shape[:-1], *kernel.shape[1:])


def _multiply(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array], dims: Any, dtype: Any, how: Any) -> Any:
    """The product of two quantised arrays, summed in fp32. how: DEFAULT sums faster on Hopper, with fewer bits."""
    y = lax.dot_general(a[0], b[0], (dims, ((), ())), precision=how, preferred_element_type=dtype)
    return y * (a[1] * b[1]).astype(dtype)


@jax.custom_vjp
def float8_product(x_TI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """x @ kernel -> [T, O] in the wider of their types, bfloat16 or float32; both must vary over the same mesh axes."""
    return _forward(x_TI, kernel_IO)[0]


def _forward(x_TI: jax.Array, kernel_IO: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    dtype = jnp.promote_types(x_TI.dtype, kernel_IO.dtype)
    y = _multiply(quantise(x_TI, E4M3), quantise(kernel_IO, E4M3), ((1,), (0,)), dtype, lax.Precision.DEFAULT)
    # Quantised again for the backward pass, as in torchao: a rematerialisation policy then keeps, drops and gathers
    # again what it does in bfloat16. A float8 kernel would be kept where its gathered parameter may not be.
    return y, (x_TI, kernel_IO)


def _backward(saved: tuple[jax.Array, jax.Array], dy_TO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_TI, kernel_IO = saved
    dy, exact = quantise(dy_TO, E5M2), lax.Precision.HIGHEST
    dx_TI = _multiply(dy, quantise(kernel_IO, E4M3), ((1,), (1,)), x_TI.dtype, exact)
    return dx_TI, _multiply(quantise(x_TI, E4M3), dy, ((0,), (0,)), kernel_IO.dtype, exact)


float8_product.defvjp(_forward, _backward)
