"""The divergence from a teacher, beside NumPy: from whole logits, and from the largest of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.distill.divergence import TopLogits, distill_loss, divergence
from jaxdist.errors import UserError

TOKENS, VOCAB, TEMPERATURE, MIXING = 6, 40, 1.6, 0.7
RNG = np.random.default_rng(0)
STUDENT, TEACHER = RNG.standard_normal((TOKENS, VOCAB)), 2 * RNG.standard_normal((TOKENS, VOCAB))
TARGETS = RNG.integers(0, VOCAB, TOKENS)


def soft(logits: np.ndarray) -> np.ndarray:
    power = np.exp(logits - logits.max(-1, keepdims=True))
    return power / power.sum(-1, keepdims=True)


def top(k: int) -> TopLogits:
    ids = np.argsort(-TEACHER, axis=-1)[:, :k]
    total = np.log(np.exp(TEACHER / TEMPERATURE).sum(-1))
    return TopLogits(*map(jnp.asarray, (np.take_along_axis(TEACHER, ids, -1), ids.astype(np.uint16), total)))


def by_hand(k: int) -> np.ndarray:
    """KL with all but the k likeliest tokens as one class."""
    p, q, ids = soft(TEACHER / TEMPERATURE), soft(STUDENT / TEMPERATURE), np.argsort(-TEACHER, axis=-1)
    both = [np.take_along_axis(each, ids, -1) for each in (p, q)]
    (p, q) = (np.concatenate([each[:, :k], each[:, k:].sum(-1, keepdims=True)], -1) for each in both)
    return np.where(p > 0, p * np.log(np.where(p > 0, p / np.where(q > 0, q, 1), 1)), 0).sum(-1)


@pytest.mark.parametrize("k", [1, 7, VOCAB])
def test_the_largest_logits_and_the_rest_as_one_class(k: int) -> None:
    with jax.enable_x64(True):
        found = divergence(jnp.asarray(STUDENT), top(k), TEMPERATURE, axis=None)
    np.testing.assert_allclose(found, by_hand(k), rtol=1e-10)


@pytest.mark.slow
def test_gradients_of_all_logits_as_the_largest_ones() -> None:
    """Equal to those of whole logits; and with fewer, nearer to them than those of renormalised logits."""
    with jax.enable_x64(True):
        student, whole = jnp.asarray(STUDENT), jnp.asarray(TEACHER)

        def grad(teacher: jax.Array | TopLogits) -> np.ndarray:
            return np.asarray(jax.grad(lambda x: divergence(x, teacher, TEMPERATURE, axis=None).sum())(student))

        want = (soft(STUDENT / TEMPERATURE) - soft(TEACHER / TEMPERATURE)) / TEMPERATURE
        np.testing.assert_allclose(grad(whole), want, atol=1e-12)
        np.testing.assert_allclose(grad(top(VOCAB)), want, atol=1e-12)
        few = top(8)
        scaled = few._replace(logsumexp=jax.nn.logsumexp(few.values / TEMPERATURE, axis=-1))
        off = {name: np.linalg.norm(grad(each) - want) for name, each in (("rest", few), ("renormalised", scaled))}
    assert off["rest"] < 0.7 * off["renormalised"], off


def test_the_loss_for_a_loss_of_ones_own() -> None:
    with jax.enable_x64(True):
        args = jnp.asarray(STUDENT), jnp.asarray(TEACHER), jnp.asarray(TARGETS).at[2].set(-100)
        found = jaxdist.distill_loss(*args, temperature=TEMPERATURE, mixing=MIXING)
        plain = jaxdist.distill_loss(*args, mixing=0.0)
    hard = -np.log(np.take_along_axis(soft(STUDENT), TARGETS[:, None], -1))[:, 0]
    hard[2] = 0
    p, q = soft(TEACHER / TEMPERATURE), soft(STUDENT / TEMPERATURE)
    want = (1 - MIXING) * hard + MIXING * TEMPERATURE**2 * (p * np.log(p / q)).sum(-1)
    np.testing.assert_allclose(found, want, rtol=1e-10)
    np.testing.assert_allclose(plain, hard, rtol=1e-10)


@pytest.mark.slow
def test_a_rest_of_rounding_gives_no_nan() -> None:
    """A teacher that is sure of one token, in fp32: the listed probabilities may sum to more than 1."""
    logits = jnp.zeros((1, VOCAB)).at[0, 3].set(60.0)
    values, ids = jax.lax.top_k(logits, 4)
    teacher = TopLogits(values, ids, jax.nn.logsumexp(logits, axis=-1))
    loss, grads = jax.value_and_grad(lambda x: divergence(x, teacher, 1.0, axis=None).sum())(-logits)
    assert np.isfinite(loss) and np.isfinite(grads).all()


def test_what_the_teacher_rules_out_adds_nothing() -> None:
    """Logits of -inf, as of a masked vocabulary: 0 log 0 is 0, in values and gradients."""
    with jax.enable_x64(True):
        student, ruled_out = jnp.asarray(STUDENT), jnp.asarray(TEACHER).at[:, :3].set(-jnp.inf)
        values, ids = jax.lax.top_k(ruled_out, VOCAB - 1)
        top = TopLogits(values, ids, jax.nn.logsumexp(ruled_out / TEMPERATURE, axis=-1))
        p, log_q = jax.nn.softmax(ruled_out / TEMPERATURE), jax.nn.log_softmax(student / TEMPERATURE)
        want = jnp.where(p > 0, p * (jnp.log(jnp.where(p > 0, p, 1)) - log_q), 0).sum(-1)
        for teacher in (ruled_out, top):
            found, pull = jax.vjp(lambda x, t=teacher: divergence(x, t, TEMPERATURE, axis=None), student)
            np.testing.assert_allclose(found, want, rtol=1e-10)
            assert np.isfinite(pull(jnp.ones_like(found))[0]).all()


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.0), ("mixing", 2.0), ("mixing", -0.1)])
def test_numbers_out_of_range(name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"^{name}: {value}; allowed: a number "):
        jaxdist.distill_loss(jnp.ones((1, 4)), jnp.ones((1, 4)), jnp.zeros(1, jnp.int32), **{name: value})


def test_two_sizes_of_vocabulary() -> None:
    with pytest.raises(UserError, match="distill_loss: the teacher has a vocabulary of 8, the student of 40"):
        distill_loss(jnp.asarray(STUDENT), jnp.zeros((TOKENS, 8)), jnp.asarray(TARGETS))
