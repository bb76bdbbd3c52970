"""The forward passes of generation, in the checked region: over whole prompts, then over one new token at a time.

Two ways give the same logits, but for rounding. With a key/value cache a new token costs a pass over one position;
without one, a pass over the whole text. Both work on any rows of a batch by themselves.

Legend: L blocks, B rows of this device, S positions of the longest prompt, T slots of the cache, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import psum, to_varying
from jaxdist.mesh import BATCH_LIKE, AnyMesh
from jaxdist.model import ModelDef
from jaxdist.nn.attention.cache import Past
from jaxdist.nn.dropout import unused_keys
from jaxdist.parallel.pipeline.relay import blocks_of_chunk, on_first_stage
from jaxdist.parallel.program import make_program
from jaxdist.parallel.strategy import Strategy
from jaxdist.parallel.units import EMBED_LAYER, Units, fold
from jaxdist.specs import STACKED, PyTree, batch_spec, unit_specs, without_idle

EMPTY = 1 << 30  # as the position of a slot: later than any query


class Forward(NamedTuple):
    """The two passes. What they keep between them is a pytree.

    begin: parameters as they are stored -> what the others read, once a program.
    start: (begun, prompts [B, S], their lengths [B], new slots) -> (logits of the next token [B, V], kept).
    go_on: (begun, kept, tokens [B], their positions [B]) -> (logits of the next token [B, V], kept).
    specs: the PartitionSpecs of what is kept.
    """

    begin: Callable[[PyTree], PyTree]
    start: Callable[..., tuple[jax.Array, PyTree]]
    go_on: Callable[..., tuple[jax.Array, PyTree]]
    specs: PyTree


class Cache(NamedTuple):
    """What the pass with a cache keeps. The prompts have slots 0 to S - 1, whatever their lengths; a new token of each
    row gets the next slot.

    stacks: keys and values, see `Past`. They are split over `tensor` by heads, and over batch axes by rows.
    positions_BT: of the token in each slot, or `EMPTY`.
    slot: the next one.
    """

    stacks: Any
    positions_BT: Any
    slot: Any


def why_no_cache(model: ModelDef, mesh: AnyMesh) -> str | None:
    """The reason why this model cannot generate with a cache on this mesh; None if it can."""
    if model.cached is None:
        return "the model has none: its embedding takes no positions, its blocks no cache, or they look at later tokens"
    if mesh.shape["pipe"] > 1 or model.chunks > 1 or model.stages:
        return "blocks are spread over pipe, where a token goes through one stage after the other"
    return None


def cached_passes(model: ModelDef, mesh: AnyMesh, specs: PyTree, strategy: Strategy) -> Forward:
    """The passes with a key/value cache.

    Parameters are gathered as the strategy does it: by zero1 and zero2 in `begin`, by zero3 one block at a time, for
    each token.
    """
    units = Units(model, strategy, unit_specs(specs), specs[STACKED])
    cached = model.cached
    assert cached is not None, why_no_cache(model, mesh)

    def embed(begun: PyTree, tokens_BS: jax.Array, positions_BS: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        diff, captured = begun
        params = units.gather("embed", diff["embed"], captured["embed"])
        keys: jax.Array = to_varying(unused_keys(len(tokens_BS)), BATCH_LIKE)
        batch = {"inputs": tokens_BS, "keys": keys}
        return units.run("embed", model.embed, params, batch, fold(keys, EMBED_LAYER), positions_BS), keys

    def block(own: PyTree, h: jax.Array, keys: jax.Array, past: Past | None) -> tuple[jax.Array, PyTree]:
        diff, captured, layer = own
        params = units.gather_block(diff, captured, None)
        found: tuple[jax.Array, PyTree] = units.run(STACKED, cached, params, h, fold(keys, layer), past)
        return found

    def rows_of(begun: PyTree) -> PyTree:
        diff, captured = begun
        return tuple(blocks_of_chunk(diff[STACKED], captured[STACKED], 0, chunks=1, counts=()))

    def logits(begun: PyTree, h_B1D: jax.Array) -> jax.Array:
        diff, captured = begun
        table = units.gather("embed", diff["embed"], captured["embed"]) if model.tied else None
        params = units.gather("head", diff["head"], captured["head"])
        return units.run("head", model.logits, params, table, h_B1D)[:, 0]

    def start(begun: PyTree, tokens_BS: jax.Array, lengths_B: jax.Array, new: int) -> tuple[jax.Array, Cache]:
        h, keys = embed(begun, tokens_BS, None)
        h, stacks = lax.scan(lambda h, own: block(own, h, keys, None), h, rows_of(begun))
        last_B1D = jnp.take_along_axis(h, (lengths_B - 1)[:, None, None], axis=1)
        length = tokens_BS.shape[1]
        stacks = jax.tree.map(lambda leaf: jnp.pad(leaf, [(0, new if dim == 2 else 0) for dim in range(5)]), stacks)
        slots = jnp.arange(length + new, dtype=jnp.int32)
        in_prompt = jnp.where(slots < lengths_B[:, None], slots, EMPTY)
        positions_BT = jnp.where(slots < length, in_prompt, lengths_B[:, None] + slots - length)
        return logits(begun, last_B1D), Cache(stacks, positions_BT, jnp.int32(length))

    def go_on(begun: PyTree, kept: Cache, tokens_B: jax.Array, positions_B: jax.Array) -> tuple[jax.Array, Cache]:
        h, keys = embed(begun, tokens_B[:, None], positions_B[:, None])

        def body(carry: PyTree, own: PyTree) -> tuple[PyTree, None]:
            h, stacks = carry
            past = Past(stacks, own[2] - 1, kept.slot, positions_B[:, None], kept.positions_BT)
            return block(own, h, keys, past), None

        (h, stacks), _ = lax.scan(body, (h, kept.stacks), rows_of(begun))
        return logits(begun, h), kept._replace(stacks=stacks, slot=kept.slot + 1)

    rows = batch_spec(mesh)
    kept = Cache(without_idle(P(None, *rows, None, "tensor"), mesh), rows, P())
    return Forward(lambda params: strategy.begin(params, specs, STACKED), start, go_on, kept)


def make_logits(model: ModelDef, strategy: Strategy, specs: PyTree) -> Callable[..., jax.Array]:
    """The function (parameters, batch [b, S], position) -> logits of the token after `position`, [b, vocabulary].

    For sampling. position: one, or one a row [b]. The parameters are sharded as the strategy stores them.
    """
    units, program = unit_specs(specs), make_program(model, strategy, specs)
    hidden = program.hidden
    assert hidden is not None

    def logits(params: PyTree, batch: PyTree, position: jax.Array) -> jax.Array:
        diff, captured = strategy.begin(params, specs, STACKED)
        h = hidden(diff, captured, batch)
        rows = jnp.broadcast_to(position, h.shape[:1])[:, None, None]
        h = jnp.take_along_axis(h, rows, axis=1)  # the head sees one position: no [b, S, vocabulary]
        tied = strategy.gather(diff["embed"], captured["embed"], units["embed"]) if model.tied else None
        params = strategy.gather(diff["head"], captured["head"], units["head"])
        return psum(on_first_stage(lambda h: model.logits(params, tied, h)[:, 0], h), "pipe")

    return logits


def whole_passes(model: ModelDef, mesh: AnyMesh, specs: PyTree, strategy: Strategy) -> Forward:
    """The passes that compute the whole text for each token. They keep the texts, [B, T]."""
    logits_of = make_logits(model, strategy, specs)

    def logits(params: PyTree, tokens_BT: jax.Array, positions_B: jax.Array) -> jax.Array:
        batch = to_varying({"inputs": tokens_BT, "keys": unused_keys(len(tokens_BT))}, BATCH_LIKE)
        return logits_of(params, batch, positions_B)

    def start(params: PyTree, tokens_BS: jax.Array, lengths_B: jax.Array, new: int) -> tuple[jax.Array, jax.Array]:
        tokens_BT = jnp.pad(tokens_BS, ((0, 0), (0, new)))
        return logits(params, tokens_BT, lengths_B - 1), tokens_BT

    def go_on(
        params: PyTree, tokens_BT: jax.Array, tokens_B: jax.Array, positions_B: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        here = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32) == positions_B[:, None]
        tokens_BT = jnp.where(here, tokens_B[:, None], tokens_BT)
        return logits(params, tokens_BT, positions_B), tokens_BT

    return Forward(lambda params: params, start, go_on, batch_spec(mesh))
