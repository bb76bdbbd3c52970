"""Rotary position embedding. Legend: B batch, S sequence, H heads, K head width."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.precision.policy import accumulation_dtype


def rotary(x_BSHK: jax.Array, theta: float, positions_BS: jax.Array | None = None) -> jax.Array:
    """Rotary position embedding (Su et al. 2021). Elements i and K/2 + i of a head are a pair, as in Llama.

    positions_BS: None for 0, 1, ... S - 1.
    """
    half = x_BSHK.shape[-1] // 2
    wide = accumulation_dtype(x_BSHK.dtype)
    frequencies = jnp.asarray(theta ** -(np.arange(half) / half), wide)
    positions = jnp.arange(x_BSHK.shape[1], dtype=wide) if positions_BS is None else positions_BS.astype(wide)
    angles = positions[..., None] * frequencies
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    a, b = jnp.split(x_BSHK.astype(wide), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSHK.dtype)
