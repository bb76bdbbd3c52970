"""Cross-entropy over a vocabulary, a chunk of tokens at a time, so that the logits are never whole.

Logits of all tokens are by far the largest array of a small model with a large vocabulary. Here a loop over chunks
makes those of one chunk, forward and again backward (one matrix product more): gradient checkpointing (Chen et al.
2016) of the loss alone. Legend: B batch, S sequence, N tokens, C tokens of a chunk, D model width, V vocabulary.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import zeros_varying_like
from jaxdist.nn.embedding import vocab_cross_entropy, vocab_logits
from jaxdist.precision import accumulation_dtype

WHOLE_BYTES = 256 * 2**20  # logits of one microbatch on a device that are not cut up unless told to
CHUNK_BYTES = 128 * 2**20  # of a chunk's logits, where they are


def loss_chunk(h_BSD: jax.Array, table_VD: jax.Array, asked: int | None) -> int:
    """Tokens of a chunk; 0: no chunks. asked: `model.loss_chunk`. Null cuts up logits of more than `WHOLE_BYTES`, into
    chunks of at most `CHUNK_BYTES`, a multiple of 128 tokens (what matrix units like)."""
    tokens = h_BSD.shape[0] * h_BSD.shape[1]
    of_a_token = table_VD.shape[0] * accumulation_dtype(h_BSD.dtype).itemsize
    if asked is None:
        asked = max(128, CHUNK_BYTES // of_a_token // 128 * 128) if tokens * of_a_token > WHOLE_BYTES else 0
    return asked if asked < tokens else 0


def chunked_cross_entropy(
    h_BSD: jax.Array, table_VD: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array, *, chunk: int
) -> jax.Array:
    """Sum of weight times loss in nats over all tokens: that of `vocab_cross_entropy` of `vocab_logits`.

    The last chunk is filled up with tokens of weight 0. Gradients of the table are summed over chunks in at least fp32.
    No gradient flows to the weights. The table may be split over `tensor`.
    """
    tokens, width = math.prod(targets_BS.shape), h_BSD.shape[-1]
    count = -(-tokens // chunk)

    def cut(x: jax.Array, *dims: int) -> jax.Array:
        flat = x.reshape(tokens, *dims)
        return jnp.pad(flat, ((0, count * chunk - tokens), *((0, 0) for _ in dims))).reshape(count, 1, chunk, *dims)

    return _sum_of_chunks(cut(h_BSD, width), table_VD, cut(targets_BS), cut(weights_BS))


def _of_chunk(h_1CD: jax.Array, table_VD: jax.Array, targets_1C: jax.Array, weights_1C: jax.Array) -> jax.Array:
    return (vocab_cross_entropy(vocab_logits(h_1CD, table_VD), targets_1C) * weights_1C).sum()


@jax.custom_vjp
def _sum_of_chunks(h: jax.Array, table_VD: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """All but the table have a leading dim of chunks."""
    of_chunk = functools.partial(_of_chunk, table_VD=table_VD)

    def add(total: jax.Array, own: Any) -> tuple[jax.Array, None]:
        h, targets, weights = own
        return total + of_chunk(h, targets_1C=targets, weights_1C=weights), None

    first = jax.eval_shape(of_chunk, h[0], targets_1C=targets[0], weights_1C=weights[0])
    return lax.scan(add, zeros_varying_like(first), (h, targets, weights))[0]


def _forward(h: jax.Array, table_VD: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
    return _sum_of_chunks(h, table_VD, targets, weights), (h, table_VD, targets, weights)


def _backward(residuals: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    h, table_VD, targets, weights = residuals

    def add(total_VD: jax.Array, own: Any) -> tuple[jax.Array, jax.Array]:
        h, targets, weights = own
        _, pull = jax.vjp(lambda h, table: _of_chunk(h, table, targets, weights), h, table_VD)
        dh, dtable_VD = pull(grad)
        return total_VD + dtable_VD.astype(total_VD.dtype), dh

    zeros = zeros_varying_like(table_VD, accumulation_dtype(table_VD.dtype))
    dtable_VD, dh = lax.scan(add, zeros, (h, targets, weights))
    return dh, dtable_VD.astype(table_VD.dtype), None, None


_sum_of_chunks.defvjp(_forward, _backward)
