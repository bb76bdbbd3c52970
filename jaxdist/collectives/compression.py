"""Sending fewer bytes than the values have: bf16, and int8 with a scale a block and error feedback.

bf16 needs nothing but a cast around every permutation (`Group.permute`); sums stay in fp32. int8 loses too much for
that: a value is encoded once for each trip, blockwise, and what the encoding lost stays on the device that lost it, to
be added to its next contribution: over many sums the errors do not add up (error feedback; Seide et al. 2014,
Karimireddy et al. 2019). The caller carries that residual, in fp32.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.algorithm import padded_parts, unpadded
from jaxdist.collectives.algorithms import balanced_fusion, ring
from jaxdist.collectives.group import Group, shift

Array = jax.Array
BLOCK = 256  # values that share a scale
SCALE = 4  # bytes of a scale, which travels in front of its block


def encoded_bytes(size: int) -> int:
    """Bytes of `size` values in int8 blocks with their scales."""
    return -(-size // BLOCK) * (BLOCK + SCALE)


def encode(x: Array) -> Array:
    """[m] floats -> int8 [blocks, SCALE + BLOCK]. A block with a value that is not finite decodes to nan."""
    blocks = jnp.pad(x, (0, -x.size % BLOCK)).reshape(-1, BLOCK).astype(jnp.float32)
    largest = jnp.max(jnp.abs(blocks), axis=1, keepdims=True, initial=0.0)
    scale = jnp.where(largest == 0, jnp.ones_like(largest), largest / 127)
    levels = jnp.clip(jnp.round(blocks / scale), -127, 127)
    levels = jnp.where(jnp.isfinite(scale), levels, jnp.zeros_like(levels)).astype(jnp.int8)
    return jnp.concatenate([lax.bitcast_convert_type(scale, jnp.int8).reshape(-1, SCALE), levels], axis=1)


def decode(code: Array, size: int) -> Array:
    """The inverse of `encode`, to fp32 [size]."""
    scale = lax.bitcast_convert_type(code[:, :SCALE].reshape(-1, 1, SCALE), jnp.float32)
    return (code[:, SCALE:].astype(jnp.float32) * scale).ravel()[:size]


def _finite(lost: Array) -> Array:
    """What is not finite is in the sum already; carried along, it would spoil every sum to come."""
    return jnp.where(jnp.isfinite(lost), lost, jnp.zeros_like(lost))


def _ring(parts: Array, group: Group) -> tuple[Array, Array]:
    size = parts.shape[1]

    def round_(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        travelling, lost = carry
        code = encode(travelling)
        lost = ring.put(lost, travelling - decode(code, size), group.rank - 1 - step)
        arrived = decode(group.permute(code, shift(group.n)), size)
        return arrived + ring.part(parts, group.rank - 2 - step), lost

    return lax.fori_loop(0, group.n - 1, round_, (ring.part(parts, group.rank - 1), jnp.zeros_like(parts)))


def _balanced_fusion(parts: Array, group: Group) -> tuple[Array, Array]:
    size = parts.shape[1]
    codes = jax.vmap(encode)(parts)
    lost = parts - jax.vmap(lambda code: decode(code, size))(codes)
    came = jax.vmap(lambda code: decode(code, size))(balanced_fusion.exchange(codes, group))
    came = ring.put(came, ring.part(parts, group.rank), group.rank)  # its own part does not travel
    return came.sum(0), ring.put(lost, jnp.zeros_like(parts[0]), group.rank)


REDUCE_PARTS = {"ring": _ring, "balanced_fusion": _balanced_fusion}  # by algorithm


def reduce_parts_lossy(parts: Array, group: Group, algorithm: str) -> tuple[Array, Array]:
    """fp32 [n, m] -> (this device's part of the sum [m], what this device's encodings lost [n, m])."""
    mine, lost = REDUCE_PARTS[algorithm](parts, group)
    return mine, _finite(lost)


def all_reduce_lossy(x: Array, group: Group, algorithm: str) -> tuple[Array, Array]:
    """(the sum of x, the same bits on every device; what this device's encodings lost, fp32), both shaped like x."""
    mine, lost = reduce_parts_lossy(padded_parts(x.astype(jnp.float32), group.n), group, algorithm)
    code = encode(mine)
    lost = ring.put(lost, mine - decode(code, mine.size), group.rank)
    gather = {"ring": ring.gather_parts, "balanced_fusion": balanced_fusion.send_back}[algorithm]
    whole = jax.vmap(lambda code: decode(code, mine.size))(gather(code, group))
    return unpadded(whole, x).astype(x.dtype), unpadded(_finite(lost), x)
