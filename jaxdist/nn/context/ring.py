"""Ring attention (Liu et al. 2023, arXiv 2310.01889): keys and values go round the devices of `context`.

In round i a device has the keys and values of the device i places before it. Of the four pairs of its two chunks of
queries with two chunks of keys, two are seen, wherever it stands: the second chunk of queries sees the first of the
keys, and besides the first sees the first (keys of a device before this one) or the second sees the second (of one
behind it). So a round is two unmasked tiles, side by side in the batch: the same work on every device, without
conditions. Results are merged by log-sum-exp.

The backward pass is written by hand. It sends keys and values round again, computes both tiles' gradients from the
whole softmax's lse, and sends the sums of the gradients of k and v the same way. It keeps q, k, v, the result and lse
of this device: 1/C of what one device would keep; autodiff of the rounds would keep every tile's scores.

A message has k and v together, and goes while the tiles of the round before it are computed. Rounds: C - 1 for the
forward pass; C - 1 for k and v, and C - 1 for their gradients, in the backward pass.

Legend: B batch, s = 2 c positions of this device, c those of a chunk, S of the whole sequence, n key/value heads, G
query heads of each, K head width, C devices of `context`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.collectives import make_group, to_varying, varying_axes
from jaxdist.collectives.group import Group, shift
from jaxdist.nn.context.cudnn_tiles import CUDNN_TILES
from jaxdist.nn.context.positions import own_context, own_numbers
from jaxdist.nn.context.tiles import XLA_TILES, TileKernel, TileMask, TileResult, Tokens, WholeResult, merged, unseen

TILES: dict[str, TileKernel] = {"xla": XLA_TILES, "cudnn": CUDNN_TILES}
RING_RESULT = "attention.ring"  # the name of the result and of its lse, which `memory.remat: dots` keeps
Halves = tuple[jax.Array, jax.Array]


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts_BS: jax.Array | None = None,
    *,
    window: int | None = None,
    kernel: str = "xla",
) -> jax.Array:
    """Causal attention of this device's queries [B, s, n, G, K] over all keys and values, [B, s, n, K] here.

    The result and its lse have the name attention.context (`memory.remat`): where it is kept, the backward pass does
    not run the ring of the forward pass again.

    starts_BS: the position at which each token's document starts, of the whole sequence [B, S]; None: a row is one.
    window: of the positions up to its own, how many a query sees, the last ones. None: all.
    kernel: of the tiles, a key of `TILES`.
    """
    axes = varying_axes(q) | varying_axes(k) | varying_axes(v) | {"context"}
    return _ring(*to_varying((q, k, v), axes), starts_BS, window, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _ring(
    q: jax.Array, k: jax.Array, v: jax.Array, starts_BS: jax.Array | None, window: int | None, kernel: str
) -> jax.Array:
    return _forward(q, k, v, starts_BS, window, kernel)[0]


def _halves(x: jax.Array) -> Halves:
    """Both chunks of positions."""
    first, second = jnp.split(x, 2, axis=1)
    return first, second


def queries_of_round(before: jax.Array, x: Any) -> Any:
    """The chunks of queries that see keys in this round, side by side in the batch: [2 B, c, ...]. before: whether the
    keys are those of a device before this one."""

    def one(x: jax.Array) -> jax.Array:
        first, second = _halves(x)
        return jnp.concatenate([second, jnp.where(before, first, second)])

    return jax.tree.map(one, x)


def keys_of_round(before: jax.Array, x: Any) -> Any:
    """The chunks of keys that the queries of `queries_of_round` see, in the same order."""

    def one(x: jax.Array) -> jax.Array:
        first, second = _halves(x)
        return jnp.concatenate([first, jnp.where(before, first, second)])

    return jax.tree.map(one, x)


def _back(before: jax.Array, x: jax.Array, *, queries: bool) -> jax.Array:
    """Gradients of a round's chunks of queries, or of keys, [2 B, c, ...], at their places: [B, 2 c, ...]."""
    sure, other = jnp.split(x, 2)
    none = jnp.zeros_like(sure)
    own = [none, sure] if queries else [sure, none]
    return jnp.concatenate(own, 1) + jnp.concatenate(
        [jnp.where(before, other, none), jnp.where(before, none, other)], 1
    )


def _hop(group: Group, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both to the next device, in one message."""
    both = group.permute(jnp.stack([k, v]), shift(group.n))
    return both[0], both[1]


class _Masks:
    """The masks of a device's tiles. Without documents and a window, only its own tile has one."""

    def __init__(self, q: jax.Array, starts_BS: jax.Array | None, window: int | None, group: Group) -> None:
        self.starts_BS, self.window, self.group = starts_BS, window, group
        self.shape = q.shape[:2]
        self.special = starts_BS is not None or window is not None

    def tokens(self, device: jax.Array | int) -> Tokens:
        """What masks need of the tokens of a device."""
        starts = None if self.starts_BS is None else own_context(self.starts_BS, dim=1, device=device)
        return Tokens(jnp.broadcast_to(own_numbers(self.shape[1], device=device), self.shape), starts)

    def own(self) -> TileMask:
        """Of this device's queries over its own keys. The second chunk is behind the first in the sequence, too."""
        mine = self.tokens(self.group.rank)
        return TileMask(causal=True, unseen_BST=unseen(mine, mine, self.window) if self.special else None)

    def of_round(self, i: int, before: jax.Array) -> TileMask:
        """Of the tiles of round i."""
        if not self.special:
            return TileMask()
        queries, keys = self.tokens(self.group.rank), self.tokens((self.group.rank - i) % self.group.n)
        return TileMask(unseen_BST=unseen(queries_of_round(before, queries), keys_of_round(before, keys), self.window))


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, starts_BS: jax.Array | None, window: int | None, kernel: str
) -> tuple[jax.Array, Any]:
    group, tile = make_group("context"), TILES[kernel].forward
    masks = _Masks(q, starts_BS, window, group)
    travel = _hop(group, k, v)
    out, lse = tile(q, k, v, masks.own())
    for i in range(1, group.n):
        # Left alone, XLA:GPU runs all hops first, and keeps all blocks.
        travel, out, lse = lax.optimization_barrier((travel, out, lse))
        keys, before = travel, group.rank >= i
        if i < group.n - 1:
            travel = _hop(group, *travel)
        k_i, v_i = keys_of_round(before, keys)
        found = tile(queries_of_round(before, q), k_i, v_i, masks.of_round(i, before))
        out, lse = _added(before, TileResult(out, lse), found)
    for name in ("attention.context", RING_RESULT):
        out, lse = (checkpoint_name(x, name) for x in (out.astype(q.dtype), lse))
    return out, (q, k, v, starts_BS, out, lse)


def _added(before: jax.Array, so_far: TileResult, found: TileResult) -> TileResult:
    """The result with the two tiles of a round merged into it."""
    (out1, out2), (lse1, lse2) = _halves(so_far.out), _halves(so_far.lse)
    (a, b), (lse_a, lse_b) = jnp.split(found.out, 2), jnp.split(found.lse, 2)
    out2, lse2 = merged(TileResult(out2, lse2), TileResult(a, lse_a))
    mine = TileResult(jnp.where(before, out1, out2), jnp.where(before, lse1, lse2))
    out, lse = merged(mine, TileResult(b, lse_b))
    put = lambda new, first, second: jnp.concatenate(  # noqa: E731
        [jnp.where(before, new, first), jnp.where(before, second, new)], 1
    )
    return TileResult(put(out, out1, out2), put(lse, lse1, lse2))


def _backward(
    window: int | None, kernel: str, saved: Any, dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, starts_BS, out, lse = saved
    group, gradients = make_group("context"), TILES[kernel].backward
    masks = _Masks(q, starts_BS, window, group)
    # Else XLA would merge these hops with those of the forward pass, and keep what they bring.
    k, v, dout = lax.optimization_barrier((k, v, dout))
    travel, whole = _hop(group, k, v), WholeResult(out, dout, lse)
    dq, dk, dv = gradients(q, k, v, masks.own(), whole)
    sums: tuple[jax.Array, jax.Array] | None = None
    for i in range(1, group.n):
        travel, dq = lax.optimization_barrier((travel, dq))
        keys, before = travel, group.rank >= i
        if i < group.n - 1:
            travel = _hop(group, *travel)
        q_i, whole_i = queries_of_round(before, (q, whole))
        k_i, v_i = keys_of_round(before, keys)
        dq_i, *own = gradients(q_i, k_i, v_i, masks.of_round(i, before), whole_i)
        dq = dq + _back(before, dq_i, queries=True)
        dk_i, dv_i = (_back(before, each, queries=False) for each in own)
        # Sums start on the device after the one whose they are, and come home with the last hop: C - 1 hops, not C.
        came = (jnp.zeros_like(dk_i), jnp.zeros_like(dv_i)) if sums is None else _hop(group, *sums)
        sums = dk_i + came[0], dv_i + came[1]
    assert sums is not None, "the ring has one device"
    home = _hop(group, *sums)
    return dq.astype(q.dtype), (dk + home[0]).astype(k.dtype), (dv + home[1]).astype(v.dtype), None


_ring.defvjp(_forward, _backward)
