"""Dispatch that drops nothing: tokens are all-gathered over `expert`, every device computes those of its experts, and a
reduce-scatter adds up the results.

Shapes are static although nobody knows how many tokens choose an expert: rows are sorted by expert into blocks
(`grouped`), as many as are needed if all tokens choose this device. Blocks without rows are skipped.

It sends (n - 1) times a device's tokens each way, for n devices of `expert`; a capacity with factor f sends (n - 1) / n
times K f of them. So both send the same where n is K f.

Legend: as in `dispatch.py`; n devices of `expert`, T tokens of all of them.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxdist.collectives import active_axes, all_gather, rank, reduce_scatter, to_varying, varying_axes
from jaxdist.config.sections.moe import MoEConfig
from jaxdist.nn.experts.dispatch import Experts, RoutedTokens, combined
from jaxdist.nn.experts.grouped import block_rows, grouped_product
from jaxdist.nn.experts.permute import collect, dispatch, sources


def dropless(tokens: RoutedTokens, experts: Experts, options: MoEConfig) -> tuple[jax.Array, jax.Array]:
    """A `Dispatch`."""
    shape, local = tokens.x_BSD.shape, experts.local
    x, chosen, gates = (each.reshape(shape[0] * shape[1], -1) for each in tokens)
    if active_axes("expert"):
        with jax.named_scope("dispatch"):
            # Named, because a gather over `expert` without a name is one of parameters to `memory.remat: none`.
            x, chosen, gates = (
                checkpoint_name(all_gather(each, "expert", dim=0), "mlp.tokens") for each in (x, chosen, gates)
            )
    mine = chosen.ravel() - rank("expert") * local
    mine = jnp.where((mine >= 0) & (mine < local), mine, local)  # `local` stands for those of other devices
    size = block_rows(len(mine), options.experts)
    blocks = -(-len(mine) // size) + local  # the last block of each expert may have room
    slot, owner = _blocks_by_expert(mine, local, size, blocks)
    source = sources(slot[None], blocks * size)
    rows = dispatch(x[None], slot[None], source)[0]
    rows = experts(rows, lambda rows, kernels: grouped_product(rows, kernels, owner))
    y = combined(collect(rows[None], slot[None], source), gates[None])[0]
    if active_axes("expert"):
        with jax.named_scope("combine"):
            y = reduce_scatter(y, "expert", dim=0)
    return y.reshape(shape), jnp.zeros_like(tokens.experts_BSK, bool)


def _blocks_by_expert(mine: jax.Array, local: int, size: int, blocks: int) -> tuple[jax.Array, jax.Array]:
    """(the place of each choice among blocks of rows that are sorted by expert, or `blocks * size` for a choice of
    another device; the owner of each block, `local` for none).

    mine: the expert of each choice, `local` for none. size: rows of a block.
    """
    order = jnp.argsort(mine, stable=True).astype(jnp.int32)
    counts = to_varying(jnp.zeros(local + 1, jnp.int32), varying_axes(mine)).at[mine].add(1)
    full = -(-counts // size)  # blocks of each expert
    ends, numbers = jnp.cumsum(full, dtype=jnp.int32), jnp.arange(len(mine), dtype=jnp.int32)
    shift = (ends - full) * size - (jnp.cumsum(counts, dtype=jnp.int32) - counts)
    place = jnp.where(mine[order] < local, numbers + shift[mine[order]], blocks * size)
    slot = jnp.zeros_like(place).at[order].set(place)
    owner = jnp.searchsorted(ends[:local], jnp.arange(blocks, dtype=jnp.int32), side="right", method="compare_all")
    return slot, owner.astype(jnp.int32)
