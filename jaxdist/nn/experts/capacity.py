"""Dispatch with a capacity (GShard, Lepikhin et al. 2020; Switch Transformer, Fedus et al. 2021).

An expert has C places for a group of g neighbouring positions of one sample: first choices come first, then earlier
positions, and the rest is dropped. A group lies on one device in every layout, so that the same tokens are dropped in
all of them. All shapes are static, and products are batched. Two all-to-alls over `expert` bring rows there and back.

Legend: as in `dispatch.py`; C places of an expert for a group.
"""

import math

import jax
import jax.numpy as jnp

from jaxdist.collectives import active_axes, all_to_all
from jaxdist.config.sections.moe import MoEConfig
from jaxdist.errors import UserError
from jaxdist.nn.context.positions import context_size
from jaxdist.nn.experts.dispatch import Experts, RoutedTokens, combined
from jaxdist.nn.experts.permute import collect, dispatch, sources


def places(options: MoEConfig) -> int:
    """The number of places that an expert has for the tokens of a group: at least one."""
    wanted = options.group * options.top_k / options.experts * options.factor
    return max(1, math.ceil(round(wanted, 6)))  # 10 times 1.1 is 11, and not a little more


def by_capacity(tokens: RoutedTokens, experts: Experts, options: MoEConfig) -> tuple[jax.Array, jax.Array]:
    """A `Dispatch`. Raises `UserError` for a group that does not divide neighbouring positions of a device."""
    (B, S, D), K, E, g = tokens.x_BSD.shape, options.top_k, options.experts, options.group
    piece = S // 2 if context_size() > 1 else S
    if piece % g:
        raise UserError(
            f"experts: {piece} neighbouring positions on a device are not divisible by group={g}; allowed: a"
            f" divisor of {piece}, or dispatch='dropless'"
        )
    N, C = B * S // g, places(options)
    spread = bool(active_axes("expert"))
    chosen_NgK = tokens.experts_BSK.reshape(N, g, K)
    place_NgK = _places_in_turn(chosen_NgK, E)
    slot_NR = jnp.where(place_NgK < C, chosen_NgK * C + place_NgK, E * C).reshape(N, g * K)
    groups = tokens.x_BSD.reshape(N, g, D), slot_NR, sources(slot_NR, E * C), tokens.gates_BSK.reshape(N, g, K)

    def run(x_NgD: jax.Array, slot_NR: jax.Array, source_NM: jax.Array, gates_NgK: jax.Array) -> jax.Array:
        rows = dispatch(x_NgD, slot_NR, source_NM).reshape(-1, E, C, D)
        with jax.named_scope("dispatch"):
            rows = all_to_all(rows, "expert", split_dim=1, concat_dim=0) if spread else rows
        rows = experts(rows, lambda rows, kernels: jnp.einsum("NeCI,eIO->NeCO", rows, kernels))
        with jax.named_scope("combine"):
            rows = all_to_all(rows, "expert", split_dim=0, concat_dim=1) if spread else rows
        return combined(collect(rows.reshape(-1, E * C, D), slot_NR, source_NM), gates_NgK)

    # In pieces: while one is computed, another one travels.
    cut = [jnp.split(each, math.gcd(N, options.pieces)) for each in groups]
    y = jnp.concatenate([run(*own) for own in zip(*cut, strict=True)])
    return y.reshape(B, S, D), (place_NgK >= C).reshape(B, S, K)


def _places_in_turn(chosen_NgK: jax.Array, experts: int) -> jax.Array:
    """[N, g, K] how many choices of the same expert come before each: all first choices before all second ones."""
    N, g, K = chosen_NgK.shape
    in_turn = chosen_NgK.transpose(0, 2, 1).reshape(N, K * g)
    hot = jax.nn.one_hot(in_turn, experts, dtype=jnp.int32)
    before = jnp.cumsum(hot, axis=1, dtype=jnp.int32) - hot
    place = jnp.take_along_axis(before, in_turn[..., None], axis=2)[..., 0]
    return place.reshape(N, K, g).transpose(0, 2, 1)
