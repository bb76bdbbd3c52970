"""Rotary position embedding, and its scaling for longer texts. Legend: B batch, S sequence, H heads, K head width."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.nn.context.positions import own_numbers
from jaxdist.precision.policy import accumulation_dtype


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are scaled, for texts longer than those that a model was trained on first.

    - kind: "linear" divides all frequencies by factor (Chen et al. 2023). "llama3" divides those of long wavelengths
        and keeps those of short ones, with a ramp between (Llama 3.1, Grattafiori et al. 2024).
    - low, high: of llama3. Wavelengths above positions / low are divided, and those below positions / high are kept.
    - positions: of llama3, the length of the texts of the first training.
    """

    kind: str
    factor: float
    low: float = 1.0
    high: float = 4.0
    positions: int = 8192


def frequencies(half: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """The angle per position of each of the `half` pairs of a head."""
    found: np.ndarray = theta ** -(np.arange(half) / half)
    if scaling is None:
        return found
    if scaling.kind == "linear":
        return found / scaling.factor
    assert scaling.kind == "llama3", scaling
    turns = scaling.positions * found / (2 * math.pi)  # of a pair, over a text of the first training
    kept = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return kept * found + (1 - kept) * found / scaling.factor


def rotary(
    x_BSHK: jax.Array, theta: float, scaling: RopeScaling | None = None, positions_BS: jax.Array | None = None
) -> jax.Array:
    """Rotary position embedding (Su et al. 2021). Elements i and K/2 + i of a head are a pair, as in Llama.

    positions_BS: None for those that this device has of the whole sequence, which are 0, 1, ... without `context`.
    """
    half = x_BSHK.shape[-1] // 2
    wide = accumulation_dtype(x_BSHK.dtype)
    positions = own_numbers(x_BSHK.shape[1], wide) if positions_BS is None else positions_BS.astype(wide)
    angles = positions[..., None] * jnp.asarray(frequencies(half, theta, scaling), wide)
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    a, b = jnp.split(x_BSHK.astype(wide), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSHK.dtype)
