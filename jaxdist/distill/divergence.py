"""The divergence of a student from its teacher, over a vocabulary that may be split over `tensor`.

With a temperature T, the teacher's probabilities are p = softmax(logits / T), the student's are q, alike. The loss of a
token is (1 - mixing) * cross-entropy + mixing * T^2 * KL(p || q) (Hinton et al. 2015, section 2). T^2 keeps the size of
the gradient, which falls as 1 / T^2.

Legend: B batch, S sequence, V vocabulary, V_t this device's part of it, K logits that are kept of a token.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import pmax, psum, rank
from jaxdist.errors import UserError
from jaxdist.precision.policy import accumulation_dtype


class TopLogits(NamedTuple):
    """The largest logits that a teacher gives for a token.

    values: the logits, [B, S, K], unscaled. ids: their tokens, [B, S, K].
    logsumexp: of all the teacher's logits divided by the temperature, [B, S].
    """

    values: jax.Array
    ids: jax.Array
    logsumexp: jax.Array


def vocab_logsumexp(logits_BSV: jax.Array, *, axis: str | None = "tensor") -> jax.Array:
    """log(sum(exp(logits))) over the whole vocabulary, [B, S], from logits [B, S, V_t]. Two reductions over `axis`.

    axis: the mesh axis that splits the vocabulary; None: each device has all of it.
    """
    peak = _reduced(pmax, lax.stop_gradient(logits_BSV.max(axis=-1)), axis)
    return jnp.log(_reduced(psum, jnp.exp(logits_BSV - peak[..., None]).sum(axis=-1), axis)) + peak


def divergence(
    student_BSV: jax.Array, teacher: jax.Array | TopLogits, temperature: float, *, axis: str | None = "tensor"
) -> jax.Array:
    """KL(p || q) of each token in nats, [B, S], from logits [B, S, V_t]. No gradient flows to the teacher's.

    teacher: logits [B, S, V_t], or the largest ones. Then all other tokens are one class, which gives a lower bound of
        the divergence. To scale the listed probabilities up to a sum of 1 instead would teach probabilities that the
        teacher does not have.
    axis: as of `vocab_logsumexp`.
    """
    student, teacher = student_BSV / temperature, lax.stop_gradient(teacher)
    lse = vocab_logsumexp(student, axis=axis)
    if isinstance(teacher, TopLogits):
        return _of_top(student, lse, teacher, temperature, axis)
    scaled = teacher / temperature
    log_p = scaled - vocab_logsumexp(scaled, axis=axis)[..., None]
    return _reduced(psum, _weighted(log_p, student - lse[..., None]).sum(axis=-1), axis)


def _weighted(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """p (log p - log q), elementwise; 0 where p is, as of a teacher's logit of -inf."""
    p = jnp.exp(log_p)
    return jnp.where(p > 0, p * (jnp.where(p > 0, log_p, 0) - log_q), 0)


def _of_top(
    student_BSV: jax.Array, lse_BS: jax.Array, teacher: TopLogits, temperature: float, axis: str | None
) -> jax.Array:
    """`divergence` from the largest logits. student_BSV: divided by the temperature. lse_BS: of it."""
    local_vocab, parts = student_BSV.shape[-1], 1 if axis is None else lax.axis_size(axis)
    local = teacher.ids.astype(jnp.int32) - (0 if axis is None else rank(axis) * local_vocab)
    here = (local >= 0) & (local < local_vocab)
    found = jnp.take_along_axis(student_BSV, jnp.where(here, local, 0), axis=-1)
    listed = _reduced(psum, jnp.where(here, found, jnp.zeros((), found.dtype)), axis)
    values, total = (each.astype(student_BSV.dtype) for each in (teacher.values, teacher.logsumexp))
    log_p = values / temperature - total[..., None]
    known = _weighted(log_p, listed - lse_BS[..., None]).sum(axis=-1)
    if teacher.ids.shape[-1] == local_vocab * parts:
        return known
    # The student's rest is summed, not taken as 1 - sum(q), of which rounding would leave nothing where it is small.
    unlisted = _without(student_BSV, jnp.where(here, local, local_vocab))
    rest = jnp.maximum(1 - jnp.exp(log_p).sum(axis=-1), 0)
    log_rest = jnp.log(jnp.where(rest > 0, rest, 1))
    return known + rest * (log_rest - (vocab_logsumexp(unlisted, axis=axis) - lse_BS))


def _without(logits_BSV: jax.Array, places_BSK: jax.Array) -> jax.Array:
    """The logits with the lowest number of their type at these places; a place outside is none."""
    drop = lambda logits_V, places_K: logits_V.at[places_K].set(jnp.finfo(logits_V.dtype).min, mode="drop")  # noqa: E731
    for _ in range(logits_BSV.ndim - 1):
        drop = jax.vmap(drop)
    return drop(logits_BSV, places_BSK)


def _reduced(reduce: Callable[..., jax.Array], x: jax.Array, axis: str | None) -> jax.Array:
    return x if axis is None else reduce(x, axis)


def distill_loss(
    student_logits: jax.Array,
    teacher_logits: jax.Array | TopLogits,
    targets: jax.Array,
    *,
    temperature: float = 2.0,
    mixing: float = 0.5,
) -> jax.Array:
    """(1 - mixing) * cross-entropy + mixing * T^2 * KL(teacher || student) of each token in nats, for a loss of your
    own: [...] from logits [..., V]. No gradient flows to the teacher's.

    - teacher_logits: [..., V], or a `TopLogits` of the largest, whose others are one class.
    - targets: [...] ids; a negative one counts nothing in the cross-entropy.
    - temperature: T, by which logits of both are divided in the divergence.

    Raises `UserError` for vocabularies of two sizes, and numbers out of range. See docs/distillation.md.

    >>> student, teacher = jnp.zeros((1, 4)), jnp.log(jnp.array([[0.7, 0.1, 0.1, 0.1]]))
    >>> loss = jaxdist.distill_loss(student, teacher, jnp.array([0]), temperature=1.0, mixing=1.0)
    >>> round(float(loss[0]), 3)
    0.446
    """
    if not isinstance(teacher_logits, TopLogits):
        check_vocabularies(student_logits.shape[-1], teacher_logits.shape[-1], key="distill_loss")
    if not temperature > 0:
        raise UserError(f"temperature: {temperature}; allowed: a number > 0")
    if not 0 <= mixing <= 1:
        raise UserError(f"mixing: {mixing}; allowed: a number from 0 to 1")
    wide = student_logits.astype(accumulation_dtype(student_logits.dtype))
    chosen = jnp.take_along_axis(wide, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    hard = jnp.where(targets < 0, 0, vocab_logsumexp(wide, axis=None) - chosen)
    return mixed(hard, lambda: divergence(wide, teacher_logits, temperature, axis=None), temperature, mixing)


def mixed(hard: jax.Array, soft: Callable[[], jax.Array], temperature: float, mixing: float) -> jax.Array:
    """The loss of each token, from its cross-entropy and its divergence."""
    if not mixing:
        return hard
    return (1 - mixing) * hard + mixing * temperature**2 * soft()


def check_vocabularies(student: int, teacher: int, *, key: str) -> None:
    """Raise `UserError` for vocabularies of two sizes."""
    if student != teacher:
        raise UserError(
            f"{key}: the teacher has a vocabulary of {teacher}, the student of {student}; they must agree: give a"
            " teacher with the student's tokenizer, or the student the teacher's vocabulary"
        )
