"""Global norms of gradients, and clipping by them: optax's, or with the same bits in every layout."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdist.optim.update import leave_out
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.precision.reproducible import rounded
from jaxdist.specs import PyTree


def ordered_sum(x: jax.Array) -> jax.Array:
    """The sum of all elements, added in an order that depends on the shape only.

    `jnp.sum` adds the elements of a device first, so that its bits depend on the layout. Here every dim is cut into 2^k
    equal parts, with the largest k <= 10 that divides it. Elements are added by pairs inside each part, which lies on
    one device, and then the parts are added.
    """

    def fold(x: jax.Array) -> jax.Array:  # along dim 0
        while (n := x.shape[0]) > 1:
            pairs = x[: n - n % 2].reshape(n // 2, 2, *x.shape[1:])
            halved = pairs[:, 0] + pairs[:, 1]
            x = jnp.concatenate([halved, x[n - 1 :]]) if n % 2 else halved
        return x[0]

    if not x.size:
        return jnp.zeros((), x.dtype)
    for _ in range(x.ndim):
        parts = math.gcd(x.shape[0], 2**10)
        whole = x.reshape(parts, -1, *x.shape[1:])
        x = fold(fold(jnp.moveaxis(whole, 1, 0)))
    return x


def global_norm(tree: PyTree) -> jax.Array:
    """The global norm, as optax.tree.norm, in at least fp32: squares of half-precision gradients overflow."""
    return optax.tree.norm(jax.tree.map(lambda leaf: leaf.astype(accumulation_dtype(leaf.dtype)), tree))


def norm_without(rules: Iterable[str], *, ordered: bool) -> Callable[[PyTree], jax.Array]:
    """`global_norm`, or `ordered_norm`, of gradients without those of parameters with a rule of their own, by path."""
    norm, left_out = ordered_norm if ordered else global_norm, [*rules]
    return lambda grads: norm(leave_out(grads, left_out))


def ordered_norm(tree: PyTree) -> jax.Array:
    """The global norm with the same bits in every layout (`ordered_sum`)."""
    wide = max((accumulation_dtype(leaf.dtype) for leaf in jax.tree.leaves(tree)), key=lambda dtype: dtype.itemsize)
    leaves = [leaf.astype(wide) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(functools.reduce(jnp.add, [ordered_sum(rounded(leaf * leaf)) for leaf in leaves]))


def clip_by_ordered_norm(max_norm: float) -> optax.GradientTransformation:
    """Clipping as by optax.clip_by_global_norm, with the same bits in every layout (`GradSync(deterministic=True)`)."""

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        norm = ordered_norm(updates)
        factor = jnp.where(norm < max_norm, jnp.ones_like(norm), max_norm / norm)
        return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
