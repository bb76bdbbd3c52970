"""The key/value cache, as one block sees it while text is generated (`jaxdist.generation`).

Legend: L blocks, B batch, S positions that are new, T slots of the cache, n key/value heads on this device, K head
width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.specs import PyTree


class Past(NamedTuple):
    """Keys and values of all blocks, and what is about to be added.

    stacks: a pair (keys, values) of arrays [L, B, T, n, K] for each attention layer of a block.
    layer: the block that reads them.
    slot: the first of the slots that the new keys and values get, the same in all rows.
    queries_BS: the positions of the new tokens in their texts. A row has its own, since prompts differ in length.
    keys_BT: the position of the token in each slot. That of an empty one is larger than any other.
    """

    stacks: tuple[tuple[jax.Array, jax.Array], ...]
    layer: jax.Array
    slot: jax.Array
    queries_BS: jax.Array
    keys_BT: jax.Array


class BlockCache:
    """The cache, as a block is given it. A block only passes it on to its attention layers, in a fixed order.

    past: None for the first pass, over whole prompts, which has nothing to read.
    kept: a pair (keys, values) of each attention layer so far: [B, S, n, K] of a first pass, else the stacks.
    """

    def __init__(self, past: Past | None) -> None:
        self.past = past
        self.kept: list[tuple[jax.Array, jax.Array]] = []

    @property
    def queries_BS(self) -> jax.Array | None:
        """The positions of the new tokens; None for 0, 1, ... S - 1."""
        return None if self.past is None else self.past.queries_BS

    @property
    def seen(self) -> tuple[jax.Array, jax.Array] | None:
        """(positions of queries, positions of keys); None for 0, 1, ... S - 1 of both."""
        return None if self.past is None else (self.past.queries_BS, self.past.keys_BT)

    def extend(self, k_BSnK: jax.Array, v_BSnK: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keep new keys and values. Returns those over which queries run: [B, T, n, K] each, with the new ones."""
        if self.past is None:
            self.kept.append((k_BSnK, v_BSnK))
            return k_BSnK, v_BSnK
        slot, layer = self.past.slot, self.past.layer
        first = jnp.zeros_like(slot)
        written = [
            lax.dynamic_update_slice(stack, new[None].astype(stack.dtype), (layer, first, slot, first, first))
            for stack, new in zip(self.past.stacks[len(self.kept)], (k_BSnK, v_BSnK), strict=True)
        ]
        self.kept.append((written[0], written[1]))
        k, v = (lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False) for stack in written)
        return k, v


def run_cached(block: Any, h: jax.Array, keys_B: jax.Array, past: Past | None) -> tuple[jax.Array, PyTree]:
    """(h after the block, what its cache kept). Pure, as transformations need it."""
    cache = BlockCache(past)
    h = block(h, keys_B, cache=cache)
    return h, tuple(cache.kept)
