"""Chunked cross-entropy over a vocabulary, where logits exist for one chunk of tokens at a time; losses of labels.

The logits of all tokens are by far the largest array of a small model with a large vocabulary. Here a loop computes
them chunk by chunk. If the loss is differentiated, the same loop computes the gradients, for a cotangent of 1: the loss
is a sum, so its gradients are proportional to its cotangent. Each chunk takes three matrix products, where gradient
checkpointing of the loss would take four (fp16 is the exception, see `_forward`). Of arrays with the vocabulary's size,
only the gradient of the table waits for the backward pass. This is the fused linear cross-entropy of Hsu et al. 2024,
Liger Kernel.

Legend: B batch, S sequence, C tokens of a chunk, D model width, V vocabulary, L labels.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import to_varying, varying_axes, zeros_varying_like
from jaxdist.errors import UserError
from jaxdist.nn.embedding import vocab_cross_entropy, vocab_logits
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import PyTree

# Logits of a microbatch on a device stay whole up to this size. Larger ones are cut into chunks of at most this size.
# With far smaller chunks, adding each one's gradient of the table would take as long as its products.
WHOLE_BYTES = 256 * 2**20

Projection = tuple[jax.Array, ...]  # (table [V, D],), or with the bias [V] of the logits
OfChunk = Callable[[jax.Array, PyTree, PyTree], jax.Array]  # (logits [1, C, V_t], rows, fixed) -> a sum


def loss_chunk(h_BSD: Any, table_VD: Any, asked: int | None) -> int:
    """The number of tokens of a chunk; 0: no chunks. The arrays may be ShapeDtypeStructs.

    asked: the value of `model.loss_chunk`. None cuts logits above `WHOLE_BYTES` into chunks of at most that.
    """
    tokens = h_BSD.shape[0] * h_BSD.shape[1]
    of_a_token = table_VD.shape[0] * accumulation_dtype(h_BSD.dtype).itemsize
    if asked is None:
        most = max(1, WHOLE_BYTES // of_a_token // 128) * 128
        # Multiples of 128 suit matrix units. Of these, choose the size that leaves the least padding in the last chunk.
        sizes = range(most, most // 2, -128)
        asked = min(sizes, key=lambda size: -tokens % size) if tokens * of_a_token > WHOLE_BYTES else 0
    return asked if asked < tokens else 0


def chunked_cross_entropy(
    h_BSD: jax.Array,
    table_VD: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    *,
    chunk: int,
    bias_V: jax.Array | None = None,
) -> jax.Array:
    """The sum of weight times cross-entropy in nats over all tokens, as by `vocab_logits` and `vocab_cross_entropy`.

    Table and bias may be split over `tensor`. See `sum_over_chunks`.

    chunk: tokens of a chunk.
    bias_V: of the logits.
    """
    projection = (table_VD,) if bias_V is None else (table_VD, bias_V)
    return sum_over_chunks(_cross_entropies, h_BSD, projection, (targets_BS, weights_BS), chunk=chunk)


def _cross_entropies(logits_1CV: jax.Array, rows: PyTree, _: PyTree) -> jax.Array:
    targets_1C, weights_1C = rows
    return (vocab_cross_entropy(logits_1CV, targets_1C) * weights_1C).sum()


def sum_over_chunks(
    of_chunk: OfChunk, h_BSD: jax.Array, projection: Projection, rows: PyTree, fixed: PyTree = (), *, chunk: int
) -> jax.Array:
    """The sum of of_chunk(logits [1, C, V_t], rows, fixed) over chunks of tokens, with `vocab_logits`.

    The last chunk is padded with zeros: a token whose rows are zeros, its weight among them, must add nothing.
    Gradients of the projection are summed over chunks in at least fp32. No gradient flows to rows and fixed.

    of_chunk: a function that holds no traced arrays; it is the same object from call to call.
    rows: arrays [B, S, ...], which of_chunk gets as [1, C, ...]. fixed: arrays that it gets whole.
    chunk: tokens of a chunk.
    """
    tokens = math.prod(h_BSD.shape[:2])
    count = -(-tokens // chunk)
    own = {axis for leaf in jax.tree.leaves((h_BSD, rows)) for axis in varying_axes(leaf)}
    samples = own | {*varying_axes(projection[0])} - {"tensor"}  # the table may be split over tensor

    def cut(x: jax.Array) -> jax.Array:
        flat = x.reshape(tokens, *x.shape[2:])
        padded = jnp.pad(flat, ((0, count * chunk - tokens), *((0, 0) for _ in x.shape[2:])))
        return padded.reshape(count, 1, chunk, *x.shape[2:])

    # Autodiff sums the gradients over the axes that these casts add. It must do so out here: inside, devices may have
    # different cotangents.
    h_BSD, projection = to_varying((h_BSD, projection), samples)
    return _sum_of_chunks(of_chunk, cut(h_BSD), projection, jax.tree.map(cut, rows), fixed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_chunks(of_chunk: OfChunk, h: jax.Array, projection: Projection, rows: PyTree, fixed: PyTree) -> jax.Array:
    """The sum over chunks. h and rows have a leading dim of chunks."""

    def add(total: jax.Array, own: Any) -> tuple[jax.Array, None]:
        return total + of_logits(*own), None

    def of_logits(h: jax.Array, rows: PyTree) -> jax.Array:
        return of_chunk(vocab_logits(h, *projection), rows, fixed)

    first = jax.eval_shape(of_logits, h[0], jax.tree.map(lambda leaf: leaf[0], rows))
    return lax.scan(add, zeros_varying_like(first), (h, rows))[0]


def _with_gradients(
    of_chunk: OfChunk, grad: jax.Array, h: jax.Array, projection: Projection, rows: PyTree, fixed: PyTree
) -> tuple[jax.Array, tuple[jax.Array, Projection]]:
    """(the sum, (gradient of h, gradient of the projection)). grad: the cotangent of the sum."""
    table, *bias = projection

    def add(totals: Any, own: Any) -> tuple[Any, jax.Array]:
        (total, of_table, *of_bias), (h, rows) = totals, own
        logits = vocab_logits(h, table, *bias)
        loss, pull = jax.vjp(lambda logits: of_chunk(logits, rows, fixed), logits)
        (wide,) = pull(grad)
        narrow = wide.astype(h.dtype) if h.dtype == table.dtype else wide  # as `einsum_fp32` multiplies
        dh = jnp.einsum("BSV,VD->BSD", narrow, table, preferred_element_type=narrow.dtype).astype(h.dtype)
        summed = tuple(varying_axes(dh) - varying_axes(h))  # the table may be split over tensor
        dh = lax.psum(dh, summed) if summed else dh
        # In fp32, as it is added: XLA:GPU then adds it inside the product, and writes and reads nothing in between.
        of_table += jnp.einsum("BSV,BSD->VD", narrow, h, preferred_element_type=of_table.dtype)
        return (total + loss, of_table, *(each + wide.sum(axis=(0, 1)).astype(each.dtype) for each in of_bias)), dh

    zeros = (zeros_varying_like(each, accumulation_dtype(each.dtype)) for each in projection)
    (total, *sums), dh = lax.scan(add, (zeros_varying_like(grad), *zeros), (h, rows))
    return total, (dh, tuple(each.astype(like.dtype) for each, like in zip(sums, projection, strict=True)))


def _forward(
    of_chunk: OfChunk, h: jax.Array, projection: Projection, rows: PyTree, fixed: PyTree
) -> tuple[jax.Array, Any]:
    given = h, projection, rows, fixed
    if jnp.float16 in (h.dtype, projection[0].dtype):
        # Gradients for a cotangent of 1 underflow in fp16: they wait for the loss scale, which is in the cotangent.
        return _sum_of_chunks(of_chunk, *given), (given, None)
    one = zeros_varying_like(jax.eval_shape(functools.partial(_sum_of_chunks, of_chunk), *given)) + 1
    loss, grads = _with_gradients(of_chunk, one, *given)
    return loss, (None, grads)


def _backward(of_chunk: OfChunk, residuals: Any, grad: jax.Array) -> tuple[jax.Array, Projection, None, None]:
    given, grads = residuals
    if grads is None:
        grads = _with_gradients(of_chunk, grad, *given)[1]
    else:
        grads = jax.tree.map(lambda leaf: (leaf.astype(grad.dtype) * grad).astype(leaf.dtype), grads)
    return *grads, None, None


_sum_of_chunks.defvjp(_forward, _backward)


def counted_targets(targets: jax.Array, weights: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """(targets, weights), where a negative target, such as PyTorch's ignore_index -100, counts nothing.

    dtype: of what the loss is computed from; weights are in at least fp32.
    """
    weights = jnp.where(targets < 0, 0, weights).astype(accumulation_dtype(dtype))
    return jnp.where(weights == 0, 0, targets), weights  # what counts nothing may be any number


def _counted_labels(logits_BL: jax.Array, label_B: jax.Array, weights_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    if label_B.shape != logits_BL.shape[:1] or not jnp.issubdtype(label_B.dtype, jnp.integer):
        raise UserError(
            f"batch: label is {label_B.dtype.name}{list(label_B.shape)} for {len(logits_BL)} samples of a device;"
            " allowed: one integer for each sample"
        )
    return counted_targets(label_B.astype(jnp.int32), weights_B, logits_BL.dtype)  # uint8 has no -1


def label_cross_entropy(
    logits_BL: jax.Array, label_B: jax.Array, weights_B: jax.Array, smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """(sum of weighted cross-entropies in nats, sum of weights) of one label a sample. A negative label counts nothing;
    one that is no label of the model gives nan, which the step's guard sees.

    logits_BL: in at least fp32
    smoothing: the share of a label's probability that is spread evenly over all L labels (Szegedy et al. 2016)
    """
    label_B, weights_B = _counted_labels(logits_BL, label_B, weights_B)
    chosen_B = jnp.take_along_axis(logits_BL, label_B[:, None], axis=1, mode="fill", fill_value=jnp.nan)[:, 0]
    if smoothing:
        chosen_B = (1 - smoothing) * chosen_B + smoothing * logits_BL.mean(axis=1)
    return ((jax.nn.logsumexp(logits_BL, axis=1) - chosen_B) * weights_B).sum(), weights_B.sum()


def label_accuracy(logits_BL: jax.Array, label_B: jax.Array, weights_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum of the weights of samples whose likeliest label is theirs, sum of weights), as for `label_cross_entropy`."""
    label_B, weights_B = _counted_labels(logits_BL, label_B, weights_B)
    right_B = logits_BL.argmax(axis=1).astype(jnp.int32) == label_B
    return jnp.where(right_B, weights_B, 0).sum(), weights_B.sum()
