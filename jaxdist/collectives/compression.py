"""Compression on the wire: bf16, or int8 with one scale a block and error feedback.

bf16 is a cast around every permutation (`Group.permute`); sums stay in fp32. int8 loses too much for that. A value is
encoded blockwise, once for each trip. What the encoding lost stays on the device, which adds it to its next
contribution, so that errors do not add up over many sums (error feedback; Seide et al. 2014, Karimireddy et al. 2019).
The caller carries this residual, in fp32.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.algorithm import Int8Halves, get_algorithm
from jaxdist.collectives.group import Array, Group
from jaxdist.collectives.parts import padded_parts, put_part, unpadded

SCALE_BLOCK = 256  # values that share a scale
SCALE_BYTES = 4  # bytes of a scale, which travels in front of its block


def encoded_bytes(size: int) -> int:
    """Bytes of `size` values in int8 blocks, scales included."""
    return -(-size // SCALE_BLOCK) * (SCALE_BLOCK + SCALE_BYTES)


def encode(x: Array) -> Array:
    """Floats [m] as int8 codes [blocks, SCALE_BYTES + SCALE_BLOCK]. A value that is not finite makes its block nan."""
    blocks = jnp.pad(x, (0, -x.size % SCALE_BLOCK)).reshape(-1, SCALE_BLOCK).astype(jnp.float32)
    largest = jnp.max(jnp.abs(blocks), axis=1, keepdims=True, initial=0.0)
    largest += jnp.sum(blocks * 0, axis=1, keepdims=True)  # XLA:CPU drops NaN in a maximum, and not in a sum
    scale = jnp.where(largest == 0, jnp.ones_like(largest), largest / 127)
    levels = jnp.clip(jnp.round(blocks / scale), -127, 127)
    levels = jnp.where(jnp.isfinite(scale), levels, jnp.zeros_like(levels)).astype(jnp.int8)
    return jnp.concatenate([lax.bitcast_convert_type(scale, jnp.int8).reshape(-1, SCALE_BYTES), levels], axis=1)


def decode(code: Array, size: int) -> Array:
    """The inverse of `encode`, to fp32 [size]."""
    scale = lax.bitcast_convert_type(code[:, :SCALE_BYTES].reshape(-1, 1, SCALE_BYTES), jnp.float32)
    return (code[:, SCALE_BYTES:].astype(jnp.float32) * scale).ravel()[:size]


def _halves(algorithm: str) -> Int8Halves:
    int8 = get_algorithm(algorithm).int8
    assert int8 is not None, algorithm  # `check_wire` has refused it
    return int8


def _finite(lost: Array) -> Array:
    """The loss of an encoding, with zeros for what is not finite."""
    # A nan is in this sum already. In the residual it would spoil every later sum, too.
    return jnp.where(jnp.isfinite(lost), lost, jnp.zeros_like(lost))


def reduce_parts_lossy(parts: Array, group: Group, algorithm: str) -> tuple[Array, Array]:
    """The first half of an int8 all-reduce: fp32 [n, m] -> (this device's part of the sum [m], its loss [n, m])."""
    mine, lost = _halves(algorithm).reduce_parts(parts, group)
    return mine, _finite(lost)


def all_reduce_lossy(x: Array, group: Group, algorithm: str) -> tuple[Array, Array]:
    """An int8 all-reduce: (the sum of x, the same bits on all devices; this device's loss, fp32), shaped like x."""
    mine, lost = reduce_parts_lossy(padded_parts(x.astype(jnp.float32), group.n), group, algorithm)
    code = encode(mine)
    lost = put_part(lost, mine - decode(code, mine.size), group.rank)
    codes = _halves(algorithm).gather_parts(code, group)
    whole = jax.vmap(lambda code: decode(code, mine.size))(codes)
    return unpadded(whole, x).astype(x.dtype), unpadded(_finite(lost), x)
