"""Layer norm and RMS norm as one function, whose backward pass reads its input and two numbers a position.

JAX's own gradient keeps arrays in fp32 as large as the input, or computes the statistics in each of its kernels again:
on one H200 a layer norm of bf16 [32768, 1024] took 303 microseconds forward and backward, and takes 240 so.

Legend: D model width.
"""

import functools
from typing import Any

import jax
from jax import lax

from jaxdist.collectives import to_varying, varying_axes
from jaxdist.precision.policy import accumulation_dtype

# Of shorter rows, as those of the norms of queries and keys by head, XLA:GPU computes all in one kernel, and sums apart
# took longer: 1836 in place of 1792 ms a step of Qwen3 30B A3B, compiled for 8 H200 and replayed.
_LONG = 512


def mean_of_last(x: jax.Array) -> jax.Array:
    """The mean over the last dim, which stays with size 1."""
    # Not `jnp.mean`, which divides: the compiler turns a quotient by a constant into a product in some layouts only,
    # which rounds differently (`parallel.grad_sync.deterministic`).
    return x.sum(axis=-1, keepdims=True) * (1 / x.shape[-1])


def normalize(x: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None, *, centred: bool, eps: float) -> jax.Array:
    """(x - mean) / std * scale + bias over the last dim of x [..., D], in x's dtype; computed in at least fp32.

    Like all functions with a `jax.custom_vjp` it has derivatives by `jax.grad`, `jax.vjp` and `jax.hessian`, and none
    by `jax.jvp` and `jax.jacfwd`.

    centred: whether the mean is subtracted (layer norm); without, std is the root of the mean square (RMS norm).
    """
    wide = accumulation_dtype(x.dtype)
    # Cast here, so that a gradient is summed over `tensor` in at least fp32 when it has shrunk to the parameter's size.
    parameters = jax.tree.map(lambda each: each.astype(wide), (scale_D, bias_D))
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves((x, parameters))))
    x, parameters = to_varying((x, parameters), axes)
    if x.shape[-1] < _LONG:
        return _normalized(centred, eps, x, *parameters)[0]
    return _normalize(centred, eps, x, *parameters)


def _normalized(
    centred: bool, eps: float, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """(the result, the mean if it is subtracted, 1 / std)."""
    wide = x.astype(scale_D.dtype)
    mean = mean_of_last(wide) if centred else None
    wide = wide if mean is None else wide - mean
    inverse = lax.rsqrt(mean_of_last(wide * wide) + eps)
    y = wide * inverse * scale_D
    return (y if bias_D is None else y + bias_D).astype(x.dtype), mean, inverse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normalize(centred: bool, eps: float, *given: Any) -> jax.Array:
    return _normalized(centred, eps, *given)[0]


def _forward(
    centred: bool, eps: float, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None
) -> tuple[jax.Array, Any]:
    y, mean, inverse = _normalized(centred, eps, x, scale_D, bias_D)
    # Behind barriers, or XLA:GPU would compute both again in each kernel of the backward pass.
    statistics = None if mean is None else lax.optimization_barrier(mean), lax.optimization_barrier(inverse)
    return y, (x, statistics, scale_D, bias_D is not None)


def _backward(centred: bool, eps: float, saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x, (mean, inverse), scale_D, has_bias = saved
    wide, rows = x.astype(scale_D.dtype), tuple(range(x.ndim - 1))
    normal, dy = (wide if mean is None else wide - mean) * inverse, dy.astype(scale_D.dtype)
    scaled = dy * scale_D
    dx = scaled - normal * mean_of_last(scaled * normal)
    dx = dx if mean is None else dx - mean_of_last(scaled)
    return (inverse * dx).astype(x.dtype), (dy * normal).sum(rows), dy.sum(rows) if has_bias else None


_normalize.defvjp(_forward, _backward)
