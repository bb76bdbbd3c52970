"""Products of half-precision arrays with an fp32 result, whose backward pass multiplies in half precision."""

import functools

import jax
import jax.numpy as jnp

from jaxdist.collectives import to_varying, varying_axes
from jaxdist.precision.policy import accumulation_dtype


def einsum_fp32(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum(spec, a, b) with a result in at least fp32, for scores and logits.

    JAX's own backward pass would multiply the fp32 gradient with half-precision operands, cast to fp32: a product in
    fp32, at a fraction of the speed. Here the gradient is rounded to the operands' dtype first, as it is for all other
    products, and in PyTorch. Sums inside the products stay fp32.

    spec: as for `jnp.einsum`, with two operands and a result. Each index of an operand is in another term, too.
    """
    wide = accumulation_dtype(a.dtype)
    if wide == a.dtype or a.dtype != b.dtype:
        return jnp.einsum(spec, a, b, preferred_element_type=wide)
    axes = varying_axes(a) | varying_axes(b)  # autodiff transposes the casts, and so sums gradients over axes
    return _einsum_fp32(spec, *to_varying((a, b), axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _einsum_fp32(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=accumulation_dtype(a.dtype))


def _forward(spec: str, a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _einsum_fp32(spec, a, b), (a, b)


def _backward(spec: str, saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    (a, b), grad = saved, grad.astype(saved[0].dtype)
    operands, _, result = spec.partition("->")
    of_a, of_b = operands.split(",")
    return jnp.einsum(f"{result},{of_b}->{of_a}", grad, b), jnp.einsum(f"{result},{of_a}->{of_b}", grad, a)


_einsum_fp32.defvjp(_forward, _backward)
