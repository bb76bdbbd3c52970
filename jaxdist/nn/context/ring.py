"""Ring attention (Liu et al. 2023, arXiv 2310.01889): keys and values go round the devices of `context`.

In round i a device has the keys and values of the device i places before it. Of the four pairs of its two chunks of
queries with two chunks of keys, two are seen, wherever it stands: the second chunk of queries sees the first of the
keys, and besides the first sees the first (keys of a device before this one) or the second sees the second (of one
behind it). So a round is two unmasked tiles: the same work on every device, without conditions. They are computed one
after the other, so that in the backward pass keys travel beside one and gradients beside the other: XLA:GPU has one
message under way at a time. Results are merged by log-sum-exp.

The backward pass is written by hand. It sends keys and values round again, computes both tiles' gradients from the
whole softmax's lse, and sends the sums of the gradients of k and v the same way. It keeps q, k, v, the result and lse
of this device: 1/C of what one device would keep; autodiff of the rounds would keep every tile's scores.

A device's own tile has three parts of one size, so that its masks are no larger than those of a round: each chunk over
itself, and the second over the first. In the backward pass the last one is computed beside the first message, and the
others beside the last.

A message has k and v together, and goes while the tiles of the round before it are computed. Rounds: C - 1 for the
forward pass; C - 1 for k and v, and C - 1 for their gradients, in the backward pass.

Legend: B batch, s = 2 c positions of this device, c those of a chunk, S of the whole sequence, n key/value heads, G
query heads of each, K head width, C devices of `context`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import make_group, to_varying, varying_axes
from jaxdist.collectives.group import Group, shift
from jaxdist.nn.context.cudnn_tiles import CUDNN_TILES
from jaxdist.nn.context.dropout_masks import kept_pairs
from jaxdist.nn.context.positions import own_context, own_numbers
from jaxdist.nn.context.tiles import (
    XLA_TILES,
    TileKernel,
    TileMask,
    TileResult,
    Tokens,
    WholeResult,
    merged,
    unseen_pairs,
    with_names,
)

TILES: dict[str, TileKernel] = {"xla": XLA_TILES, "cudnn": CUDNN_TILES}


class RingOptions(NamedTuple):
    """What is known of a ring before it runs. Arguments of `ring_attention`."""

    window: int | None
    kernel: str
    dropout: float
    site: int


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts_BS: jax.Array | None = None,
    keys_B: jax.Array | None = None,
    *,
    window: int | None = None,
    kernel: str = "xla",
    dropout: float = 0.0,
    site: int = 0,
) -> jax.Array:
    """Causal attention of this device's queries [B, s, n, G, K] over all keys and values, [B, s, n, K] here.

    The result and its lse have names (`with_names`): where one is kept, the backward pass does not run the ring of the
    forward pass again.

    starts_BS: the position at which each token's document starts, of the whole sequence [B, S]; None: a row is one.
    keys_B: of dropout, one for each sample; None: there is none.
    window: of the positions up to its own, how many a query sees, the last ones. None: all.
    kernel: of the tiles, a key of `TILES`. cudnn has no dropout.
    dropout, site: see `jaxdist.nn.dropout`.
    """
    axes = varying_axes(q) | varying_axes(k) | varying_axes(v) | {"context"}
    given = RingOptions(window, kernel, dropout, site)
    return _ring(*to_varying((q, k, v), axes), starts_BS, keys_B, given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _ring(
    q: jax.Array, k: jax.Array, v: jax.Array, starts_BS: jax.Array | None, keys_B: jax.Array | None, given: RingOptions
) -> jax.Array:
    return _forward(q, k, v, starts_BS, keys_B, given)[0]


def _halves(x: Any) -> tuple[Any, Any]:
    """Both chunks of positions, c each, of a tree of arrays [B, 2 c, ...]."""
    pairs = jax.tree.map(lambda leaf: jnp.split(leaf, 2, axis=1), x)
    first, second = (jax.tree.map(lambda _, pair: pair[i], x, pairs) for i in range(2))  # noqa: B023
    return first, second


def queries_of_round(before: jax.Array, x: Any) -> tuple[Any, Any]:
    """The chunks of queries of the two tiles of a round. before: whether its keys are those of a device before this
    one."""
    first, second = _halves(x)
    return second, _chosen(before, first, second)


def keys_of_round(before: jax.Array, x: Any) -> tuple[Any, Any]:
    """The chunks of keys that the queries of `queries_of_round` see, in the same order."""
    first, second = _halves(x)
    return first, _chosen(before, first, second)


def _chosen(before: jax.Array, first: Any, second: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(before, a, b), first, second)


def _placed(before: jax.Array, sure: jax.Array, other: jax.Array, *, queries: bool) -> jax.Array:
    """Gradients of the chunks of queries, or of keys, of both tiles of a round, at their places: [B, 2 c, ...]."""
    none = jnp.zeros_like(sure)
    own = [none, sure] if queries else [sure, none]
    return jnp.concatenate(own, 1) + jnp.concatenate(
        [jnp.where(before, other, none), jnp.where(before, none, other)], 1
    )


def _not_before(value: jax.Array, x: jax.Array) -> jax.Array:
    """x, which cannot be there before `value` is computed. An `optimization_barrier` is not enough: it orders what XLA
    rewrites, and is gone when XLA:GPU schedules. A `value` that begins with NaN makes all of x NaN."""
    number = lax.index_in_dim(value.reshape(-1), 0, keepdims=False)
    return jnp.where(number == number, x, jnp.full_like(x, jnp.nan))


def _hop(group: Group, both: jax.Array) -> jax.Array:
    """k and v, or their gradients, [2, B, s, n, K], to the next device."""
    return group.permute(both, shift(group.n))


class _Masks:
    """The masks of a device's tiles. Without documents, window and dropout, only its own tile has one."""

    def __init__(
        self, q: jax.Array, starts_BS: jax.Array | None, keys_B: jax.Array | None, given: RingOptions, group: Group
    ) -> None:
        self.starts_BS, self.keys_B, self.given, self.group = starts_BS, keys_B, given, group
        self.shape, self.heads = q.shape[:2], q.shape[2] * q.shape[3]
        self.apart = starts_BS is not None or given.window is not None
        self.mine = self._tokens(group.rank) if self.apart or given.dropout else None

    def _tokens(self, device: jax.Array | int) -> Tokens:
        """What masks need of the tokens of a device."""
        starts = None if self.starts_BS is None else own_context(self.starts_BS, dim=1, device=device)
        return Tokens(jnp.broadcast_to(own_numbers(self.shape[1], device=device), self.shape), starts)

    def own(self) -> tuple[TileMask, TileMask, TileMask]:
        """Of this device's queries over its own keys: each chunk over itself; the second over the first, which is
        before it."""
        if self.mine is None:
            return TileMask(causal=True), TileMask(causal=True), TileMask()
        first, second = _halves(self.mine)
        pairs = (first, first), (second, second), (second, first)
        one, two, across = (self._mask(queries, keys)._replace(causal=queries is keys) for queries, keys in pairs)
        return one, two, across

    def of_round(self, i: int, before: jax.Array) -> tuple[TileMask, TileMask]:
        """Of the two tiles of round i."""
        if self.mine is None:
            return TileMask(), TileMask()
        keys = self._tokens((self.group.rank - i) % self.group.n)
        both = zip(queries_of_round(before, self.mine), keys_of_round(before, keys), strict=True)
        sure, other = (self._mask(*each) for each in both)
        return sure, other

    def _mask(self, queries: Tokens, keys: Tokens) -> TileMask:
        rate, kept = self.given.dropout, None
        if rate:
            assert self.keys_B is not None, "dropout needs the keys of the samples"
            drawn: Any = {"site": self.given.site, "rate": rate, "heads": self.heads}
            length = self.shape[1] * self.group.n
            kept = kept_pairs(self.keys_B, queries.numbers_BS[0], keys.numbers_BS[0], length=length, **drawn)
        hidden = unseen_pairs(queries, keys, self.given.window) if self.apart else None
        return TileMask(unseen_BST=hidden, kept_BhST=kept, dropout=rate)


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, starts_BS: jax.Array | None, keys_B: jax.Array | None, given: RingOptions
) -> tuple[jax.Array, Any]:
    group, tile = make_group("context"), TILES[given.kernel].forward
    masks = _Masks(q, starts_BS, keys_B, given, group)
    travel = _hop(group, jnp.stack([k, v]))
    (q_1, q_2), (keys_1, keys_2) = _halves(q), _halves((k, v))
    tiles = zip((q_1, q_2, q_2), (keys_1, keys_2, keys_1), masks.own(), strict=True)
    one, two, across = (tile(q_t, k_t, v_t, mask) for q_t, (k_t, v_t), mask in tiles)
    halves = one, merged(two, across)
    for i in range(1, group.n):
        # Left alone, XLA:GPU runs all hops first, and keeps all blocks.
        travel, halves = lax.optimization_barrier((travel, halves))
        (k_i, v_i), before = travel, group.rank >= i
        if i < group.n - 1:
            travel = _hop(group, travel)
        queries, keys = queries_of_round(before, q), keys_of_round(before, (k_i, v_i))
        tiles = zip(queries, keys, masks.of_round(i, before), strict=True)
        sure, other = (tile(q_t, k_t, v_t, mask) for q_t, (k_t, v_t), mask in tiles)
        halves = _added(before, halves, sure, other)
    out, lse = (jnp.concatenate(both, axis=1) for both in zip(*halves, strict=True))
    out, lse = with_names(out.astype(q.dtype), lse)
    return out, (q, k, v, starts_BS, keys_B, out, lse)


def _added(
    before: jax.Array, halves: tuple[TileResult, TileResult], sure: TileResult, other: TileResult
) -> tuple[TileResult, TileResult]:
    """The results of both chunks of queries, with the two tiles of a round merged into them."""
    nothing = jnp.full_like(other.lse, -jnp.inf)
    in_first = other._replace(lse=jnp.where(before, other.lse, nothing))
    in_second = other._replace(lse=jnp.where(before, nothing, other.lse))
    return merged(halves[0], in_first), merged(merged(halves[1], sure), in_second)


def _backward(given: RingOptions, saved: Any, dout: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    q, k, v, starts_BS, keys_B, out, lse = saved
    group, gradients = make_group("context"), TILES[given.kernel].backward
    masks = _Masks(q, starts_BS, keys_B, given, group)
    # Else XLA would merge these hops with those of the forward pass, and keep what they bring.
    k, v, dout = lax.optimization_barrier((k, v, dout))
    travel, whole = _hop(group, jnp.stack([k, v])), WholeResult(out, dout, lse)
    (first, second), (keys_1, keys_2), (mask_1, mask_2, mask_across) = _halves((q, whole)), _halves((k, v)), masks.own()
    # Only a part of the own tile, beside which the first keys travel.
    across = gradients(second[0], keys_1[0], keys_1[1], mask_across, second[1])
    dq = jnp.concatenate([jnp.zeros_like(across[0]), across[0]], 1)
    sums: jax.Array | None = None
    for i in range(1, group.n):
        travel, dq = lax.optimization_barrier((travel, dq))
        (k_i, v_i), before = travel, group.rank >= i
        if i < group.n - 1:
            travel = _hop(group, travel)
        queries, keys = queries_of_round(before, (q, whole)), keys_of_round(before, (k_i, v_i))
        tiles = zip(queries, keys, masks.of_round(i, before), strict=True)
        sure, other = (gradients(q_t, k_t, v_t, mask, of_all) for (q_t, of_all), (k_t, v_t), mask in tiles)
        dq_i, *own_i = (_placed(before, a, b, queries=not j) for j, (a, b) in enumerate(zip(sure, other, strict=True)))
        dq, both_i = dq + dq_i, jnp.stack(own_i)
        # Sums start on the device after the one whose they are, and come home with the last hop: C - 1 hops, not C.
        # They are sent beside the second tile. Else keys would travel beside both, and sums beside none.
        sums = both_i if sums is None else both_i + _hop(group, _not_before(sure[0], sums))
    assert sums is not None, "the ring has one device"
    home = _hop(group, sums)
    # The rest of the own tile comes last, beside that hop.
    rest = zip((first, second), (keys_1, keys_2), (mask_1, mask_2), strict=True)
    late = lambda of_all: of_all._replace(lse=_not_before(other[0], of_all.lse))  # noqa: E731
    one, two = (gradients(q_t, k_t, v_t, mask, late(of_all)) for (q_t, of_all), (k_t, v_t), mask in rest)
    dq = dq + jnp.concatenate([one[0], two[0]], 1)
    dk, dv = (jnp.concatenate([one[i] + across[i], two[i]], 1) + home[i - 1] for i in (1, 2))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_ring.defvjp(_forward, _backward)
