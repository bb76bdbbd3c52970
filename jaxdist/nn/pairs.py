"""Arrays of 16-bit numbers as half as many words of 32 bits, for elementwise work on GPUs.

XLA:GPU gives a thread four numbers. Of 16 bits that is 8 bytes at a time, too few to keep the memory busy; of 32 bits
it is 16. On one H200, GELU of bf16 [32768, 4096] with a bias took 176 microseconds without and 146 with pairs, and
joining queries, keys and values 175 and 110.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def has_pairs(x: jax.Array) -> bool:
    """Whether `x` can be read as pairs: 16-bit numbers, evenly many in the last dim."""
    return x.dtype.itemsize == 2 and x.shape[-1] % 2 == 0


def as_words(x: jax.Array) -> jax.Array:
    """[..., F] of 16-bit numbers -> uint32 [..., F / 2]. JAX takes the derivative of both functions for zero."""
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint32)


def from_words(words: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `as_words`."""
    words = lax.optimization_barrier(words)  # or XLA would compute what the words consist of in 16 bits after all
    pairs = lax.bitcast_convert_type(words, dtype)
    return pairs.reshape(*pairs.shape[:-2], -1)


@jax.custom_vjp
def unzip(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The numbers of `x` [..., F] at even and at odd places, [..., F / 2] each."""
    words = as_words(x)
    low, high = words.astype(jnp.uint16), (words >> 16).astype(jnp.uint16)
    return lax.bitcast_convert_type(low, x.dtype), lax.bitcast_convert_type(high, x.dtype)


@jax.custom_vjp
def rezip(even: jax.Array, odd: jax.Array) -> jax.Array:
    """The inverse of `unzip`."""
    low, high = (lax.bitcast_convert_type(each, jnp.uint16).astype(jnp.uint32) for each in (even, odd))
    return from_words(low | (high << 16), even.dtype)


unzip.defvjp(lambda x: (unzip(x), None), lambda _, grads: (rezip(*grads),))
rezip.defvjp(lambda *halves: (rezip(*halves), None), lambda _, grad: unzip(grad))
