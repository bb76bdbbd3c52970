"""Vocabulary-parallel embedding, output projection and cross-entropy (Shoeybi et al. 2019, section 3).

Legend: B batch, S sequence, D model width, V vocabulary, V_t this device's part of the vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxdist.collectives import active_axes, pmax, psum, rank, to_varying, varying_axes
from jaxdist.errors import UserError
from jaxdist.mesh import traced_for_gpus
from jaxdist.nn.context.positions import devices_along, own_context
from jaxdist.nn.matmul.fp32_accumulation import einsum_fp32
from jaxdist.nn.param import normal, zeros
from jaxdist.nn.sequence_parallel import own_positions, sum_to_positions
from jaxdist.precision.policy import accumulation_dtype


def _local_ids(ids: jax.Array, local_vocab: int, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(ids counted from this device's first row and clipped into its range, whether they were in range, elsewhere).

    elsewhere: nan for an id outside the whole vocabulary, else 0, in `dtype`: silence would train on whatever row is
        read for it.
    """
    ids = ids.astype(jnp.int32)  # uint8 has no 256 to compare with
    local = ids - rank("tensor") * local_vocab
    here = (local >= 0) & (local < local_vocab)
    known = (ids >= 0) & (ids < local_vocab * devices_along("tensor"))
    elsewhere = jnp.where(known, jnp.zeros((), dtype), jnp.asarray(jnp.nan, dtype))
    return jnp.clip(local, 0, local_vocab - 1), here, elsewhere


class VocabEmbed(nnx.Module):
    """Token embedding: ids [B, S] -> [B, S, D]. Table [V, D], split by rows over `tensor`. Initial std 0.02 (GPT-2).

    An id outside 0 to V - 1 gets nan, so that the step's guard skips it. Pad with an id of the vocabulary, also where
    nothing counts.

    With `context`, the result is this device's positions (`jaxdist.nn.context.positions`).

    sequence: the result is this device's positions, [B, S / tensor, D] (`jaxdist.nn.sequence_parallel`).
    """

    def __init__(self, rngs: nnx.Rngs, vocab: int, width: int, *, sequence: bool = False) -> None:
        self.table = normal(rngs, (vocab, width), 0.02, ("tensor", None))
        self.sequence = sequence

    def __call__(self, ids_BS: jax.Array) -> jax.Array:
        table = self.table[...]
        local, here, elsewhere = _local_ids(own_context(ids_BS, dim=1), table.shape[0], table.dtype)
        # The lookup is in at least fp32, so that the backward pass adds a frequent token's gradients in it.
        rows = table.astype(accumulation_dtype(table.dtype))[local].astype(table.dtype)
        own = jnp.where(here[..., None], rows, elsewhere[..., None])
        return sum_to_positions(own) if self.sequence else psum(own, "tensor")


class PositionEmbed(nnx.Module):
    """Learned position embedding [S, D], with a copy on every device of `tensor`; initial std 0.02 (GPT-2).

    sequence: the result is this device's positions, [S / tensor, D], in at least fp32. Its gradient is then summed over
        `tensor` in this dtype.
    """

    def __init__(self, rngs: nnx.Rngs, length: int, width: int, *, sequence: bool = False) -> None:
        self.table = normal(rngs, (length, width), 0.02, (None, None))
        self.sequence = sequence

    def __call__(self, length: int, positions_BS: jax.Array | None = None) -> jax.Array:
        """The vectors of positions 0 to length - 1, [S, D], or of these, [B, S, D]: with `context` this device's. Of
        these, one outside the table gets nan.

        length, positions_BS: of the whole sequence.
        """
        rows = self.table[...]
        if positions_BS is None and length > rows.shape[0]:
            raise UserError(
                f"max_length: {rows.shape[0]} positions, and rows of a batch have {length} tokens; allowed: at most so"
                " many, or a model with a larger max_length"
            )
        if positions_BS is None:
            rows, dim = own_context(rows[:length], dim=0), 0
        else:
            own = own_context(positions_BS, dim=1)
            rows, dim = rows.at[own].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False), 1
        return own_positions(rows.astype(accumulation_dtype(rows.dtype)), dim=dim) if self.sequence else rows


class TypeEmbed(nnx.Module):
    """Embedding of segments (Devlin et al. 2019), a table [types, D] with a copy on every device of `tensor`.

    An id outside the table gets nan. sequence: the result is this device's positions.
    """

    def __init__(self, rngs: nnx.Rngs, types: int, width: int, *, sequence: bool = False) -> None:
        self.table = normal(rngs, (types, width), 0.02, (None, None))
        self.sequence = sequence

    def __call__(self, ids_BS: jax.Array | None) -> jax.Array:
        """Vectors of these segments, in at least fp32: [B, S, D]; None: that of segment 0, [D]."""
        table = self.table[...]
        wide = table.astype(accumulation_dtype(table.dtype))
        if ids_BS is None:
            return wide[0]
        known = (ids_BS >= 0) & (ids_BS < table.shape[0])
        rows = jnp.where(known[..., None], wide[jnp.where(known, ids_BS, 0)], jnp.nan)
        return own_positions(rows, dim=1) if self.sequence else rows


class VocabHead(nnx.Module):
    """The untied head: a table [V, D] for the logits, split by rows over `tensor` like the embedding."""

    def __init__(self, rngs: nnx.Rngs, vocab: int, width: int) -> None:
        self.table = normal(rngs, (vocab, width), width**-0.5, ("tensor", None))


class VocabBias(nnx.Module):
    """A bias of the logits, [V], split over `tensor` like the table."""

    def __init__(self, vocab: int) -> None:
        self.bias = zeros((vocab,), ("tensor",))


def vocab_logits(h_BSD: jax.Array, table_VD: jax.Array, bias_V: jax.Array | None = None) -> jax.Array:
    """Logits [B, S, V_t] of this device's part of the vocabulary, accumulated and stored in at least fp32."""
    logits_BSV = einsum_fp32("BSD,VD->BSV", h_BSD, table_VD)
    return logits_BSV if bias_V is None else logits_BSV + bias_V.astype(logits_BSV.dtype)


def vocab_argmax(logits_BSV: jax.Array) -> jax.Array:
    """The id of the largest logit, int32 [B, S], from logits [B, S, V_t]; of equal ones the smallest."""
    best_BS, first = logits_BSV.max(axis=-1), rank("tensor") * logits_BSV.shape[-1]
    ids_BS = logits_BSV.argmax(axis=-1).astype(jnp.int32) + first
    return -pmax(jnp.where(best_BS == pmax(best_BS, "tensor"), -ids_BS, jnp.iinfo(jnp.int32).min), "tensor")


def whole_vocab(logits_BSV: jax.Array) -> jax.Array:
    """Logits [B, S, V_t] -> [B, S, V] on every device of `tensor`. For sampling, not for training."""
    if not active_axes("tensor"):
        return logits_BSV
    return lax.all_gather(logits_BSV, "tensor", axis=logits_BSV.ndim - 1, tiled=True, to="invarying")


def vocab_cross_entropy(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """Cross-entropy of each token in nats, [B, S], from logits [B, S, V_t]. Three reductions over `tensor`.

    A target outside the vocabulary gives nan.
    """
    logits_BSV, on_gpus = logits_BSV.astype(accumulation_dtype(logits_BSV.dtype)), traced_for_gpus()
    if on_gpus:
        own_peak, own_total = _sum_of_exponentials(logits_BSV)
        own_peak = lax.stop_gradient(own_peak)
        peak = pmax(own_peak, "tensor")
        total = psum(own_total * jnp.exp(own_peak - peak), "tensor")
    else:  # XLA:CPU takes eight times as long for a sum like that
        peak = pmax(lax.stop_gradient(logits_BSV.max(axis=-1)), "tensor")
        total = psum(jnp.exp(logits_BSV - peak[..., None]).sum(axis=-1), "tensor")
    local, here, elsewhere = _local_ids(targets_BS, logits_BSV.shape[-1], logits_BSV.dtype)
    if on_gpus:
        axes = varying_axes(logits_BSV) | varying_axes(local)
        mine = _logit_of(logits_BSV.shape[-1], *to_varying((logits_BSV, local), axes))
    else:  # XLA:CPU would hold one more array as large as the logits
        mine = jnp.take_along_axis(logits_BSV, local[..., None], axis=-1)[..., 0]
    target = psum(jnp.where(here, mine, jnp.zeros((), mine.dtype)), "tensor")
    return jnp.log(total) + peak - target + elsewhere


def _peak_and_sum(logits_BSV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(peak, sum of exp(logits - peak)) over V, both [B, S], by reading the logits once (Milakov and Gimelshein 2018,
    Online normalizer calculation for softmax). The peak counts as a constant: what is computed from both must not
    depend on it. On one H200, of [32768, 50304] in fp32: 2.3 ms in place of 3.1."""

    def both(one: Any, other: Any) -> Any:
        (peak, total), (other_peak, other_total) = one, other
        higher = jnp.maximum(peak, other_peak)
        return higher, total * jnp.exp(peak - higher) + other_total * jnp.exp(other_peak - higher)

    zero = jnp.zeros((), logits_BSV.dtype)
    start = zero + jnp.finfo(logits_BSV.dtype).min, zero  # not -inf: -inf less -inf is nan
    return lax.reduce((logits_BSV, jnp.ones_like(logits_BSV)), start, both, (logits_BSV.ndim - 1,))


_sum_of_exponentials = jax.custom_vjp(_peak_and_sum)


def _sum_forward(logits_BSV: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    peak, total = _peak_and_sum(logits_BSV)
    return (peak, total), (logits_BSV, peak)


def _sum_backward(saved: tuple[jax.Array, jax.Array], grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array]:
    logits_BSV, peak = saved
    return (jnp.exp(logits_BSV - peak[..., None]) * grads[1][..., None],)


_sum_of_exponentials.defvjp(_sum_forward, _sum_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logit_of(vocab: int, logits_BSV: jax.Array, ids_BS: jax.Array) -> jax.Array:
    """The logit of each token's id, [B, S]. vocab: the size of V here.

    The gradient is a comparison with each id, which XLA fuses with that of the softmax. JAX's own would be a scatter,
    for which a GPU writes and reads the gradient of all logits once more.
    """
    return jnp.take_along_axis(logits_BSV, ids_BS[..., None], axis=-1)[..., 0]


def _logit_of_forward(vocab: int, logits_BSV: jax.Array, ids_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _logit_of(vocab, logits_BSV, ids_BS), ids_BS


def _logit_of_backward(vocab: int, ids_BS: jax.Array, grad_BS: jax.Array) -> tuple[jax.Array, None]:
    here = jnp.arange(vocab, dtype=ids_BS.dtype) == ids_BS[..., None]
    return jnp.where(here, grad_BS[..., None], jnp.zeros((), grad_BS.dtype)), None


_logit_of.defvjp(_logit_of_forward, _logit_of_backward)
