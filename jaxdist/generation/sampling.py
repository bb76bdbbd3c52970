"""Drawing the next token: temperature, top-k (Fan et al. 2018), top-p (nucleus sampling; Holtzman et al. 2020).

Legend: B rows, V vocabulary, C candidates.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.errors import UserError

_OTHER_ROWS = 1 << 31  # no position and no token id is as large: streams of rows and of positions stay apart


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits.

    Logits are divided by the temperature first. Then the `top_k` likeliest tokens are kept, and of these the fewest
    likeliest whose probabilities, among them, add up to at least `top_p`. One of what is left is drawn by its
    probability.

    temperature: 0 takes the likeliest token; of equal ones that with the smallest id.
    top_k: None keeps all.
    top_p: None keeps all. At least one token is always kept.

    Raises `UserError` for a number out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature: {self.temperature}; allowed: 0 (the likeliest token) and more, such as 0.8")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k: {self.top_k}; allowed: 1 and more; or leave it out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p: {self.top_p}; allowed: a number > 0 and <= 1, such as 0.95; or leave it out")


KEYS = "threefry2x32"  # the generator of rows, whatever `jax_default_prng_impl` says: each draws by its own key


def row_keys(seed: int, rows: range) -> np.ndarray:
    """The data of a random key for each row, uint32 [B, 2]. It depends on the seed and the row's number only."""
    key = jax.random.key(seed, impl=KEYS)
    keys = [jax.random.fold_in(key, _OTHER_ROWS + row) if row else key for row in rows]
    return np.stack([np.asarray(jax.random.key_data(each)) for each in keys])


def draw(logits_BV: jax.Array, keys_B: jax.Array, positions_B: jax.Array, sampling: Sampling) -> jax.Array:
    """Ids int32 [B], which depend on the logits, the key and the position of their own row only; -1 where a logit is
    NaN, of which `argmax` would make 0.

    keys_B: a random key a row, the same at all positions. positions_B: of the tokens that are drawn.
    """
    return jnp.where(jnp.isnan(logits_BV.max(axis=-1)), -1, _drawn(logits_BV, keys_B, positions_B, sampling))


def _drawn(logits_BV: jax.Array, keys_B: jax.Array, positions_B: jax.Array, sampling: Sampling) -> jax.Array:
    if sampling.temperature == 0:
        return logits_BV.argmax(axis=-1).astype(jnp.int32)
    scores_BV = logits_BV / sampling.temperature
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, positions_B)
    # The draw is the largest of scores plus noise (Gumbel 1954), which `jax.random.categorical` adds alike.
    noise_BV = jax.vmap(lambda key, row: jax.random.gumbel(key, row.shape, row.dtype))(keys_B, scores_BV)
    if sampling.top_k is None and sampling.top_p is None:
        return (scores_BV + noise_BV).argmax(axis=-1).astype(jnp.int32)
    count = min(sampling.top_k or scores_BV.shape[-1], scores_BV.shape[-1])
    scores_BC, ids_BC = lax.top_k(scores_BV, count)  # the likeliest first; of equal ones the smallest id
    noisy_BC = scores_BC + jnp.take_along_axis(noise_BV, ids_BC, axis=-1)
    if sampling.top_p is not None:
        shares_BC = jax.nn.softmax(scores_BC, axis=-1)
        likelier_BC = jnp.cumsum(shares_BC, axis=-1) - shares_BC  # of all candidates before
        kept_BC = (likelier_BC < sampling.top_p).at[:, 0].set(True)
        noisy_BC = jnp.where(kept_BC, noisy_BC, -jnp.inf)
    best_B1 = noisy_BC.argmax(axis=-1, keepdims=True)
    return jnp.take_along_axis(ids_BC, best_B1, axis=-1)[:, 0].astype(jnp.int32)
