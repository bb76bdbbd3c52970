"""Distributions of drawn tokens against NumPy, and where texts end."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.data.text.tokenizer import byte_tokenizer
from jaxdist.errors import UserError
from jaxdist.generation import sampling as module
from jaxdist.generation.sampling import Sampling, row_keys
from jaxdist.generation.texts import Completion, Ends, complete, ids_of

LOGITS = np.array([1.0, 3.0, 2.5, -1.0, 2.9, 0.0, 2.5])  # two are equal
DRAWS = 1 << 14
draw = jax.jit(module.draw, static_argnums=3)


def wanted(sampling: Sampling) -> np.ndarray:
    """The probabilities by their definition."""
    scores = LOGITS / sampling.temperature
    order = np.argsort(-scores, kind="stable")[: sampling.top_k]
    shares = np.exp(scores[order]) / np.exp(scores[order]).sum()
    if sampling.top_p is not None:
        count = 1 + int(np.searchsorted(np.cumsum(shares), sampling.top_p))
        order, shares = order[:count], shares[:count] / shares[:count].sum()
    found = np.zeros(len(LOGITS))
    found[order] = shares
    return found


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(0.5),
        Sampling(1.0, top_k=3),
        Sampling(1.0, top_k=100),
        Sampling(1.0, top_p=0.6),
        Sampling(1.5, top_k=5, top_p=0.7),
        Sampling(1.0, top_p=1e-9),
    ],
)
def test_tokens_are_drawn_by_their_probabilities(sampling: Sampling) -> None:
    """Frequencies lie within five standard deviations, and what is left out never comes."""
    keys, positions = jax.random.wrap_key_data(jnp.asarray(row_keys(3, range(1))))[0], jnp.arange(DRAWS)
    rows = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (DRAWS, len(LOGITS)))
    found = draw(rows, jnp.broadcast_to(keys, (DRAWS,)), positions, sampling)
    shares, want = np.bincount(np.asarray(found), minlength=len(LOGITS)) / DRAWS, wanted(sampling)
    assert (shares[want == 0] == 0).all()
    assert (np.abs(shares - want) <= 5 * np.sqrt(want * (1 - want) / DRAWS) + 1e-12).all()


@pytest.mark.slow
def test_a_draw_depends_on_key_and_position_of_its_row_alone() -> None:
    keys = jax.random.wrap_key_data(jnp.asarray(row_keys(0, range(4))))
    logits = jnp.zeros((4, 1000))
    for sampling in (Sampling(), Sampling(top_k=900, top_p=0.99)):
        both = draw(logits, keys, jnp.arange(4), sampling)
        alone = [int(draw(logits[i : i + 1], keys[i : i + 1], jnp.arange(i, i + 1), sampling)[0]) for i in range(4)]
        assert both.tolist() == alone and len(set(alone)) == 4
    assert row_keys(0, range(4))[2:].tolist() == row_keys(0, range(2, 4)).tolist()
    assert draw(jnp.asarray(LOGITS)[None], keys[:1], jnp.arange(1), Sampling(0.0)).tolist() == [1]


def test_rows_draw_by_one_generator_whatever_is_the_usual_one() -> None:
    """With `rbg` a text would depend on the rows beside it, and its keys have four numbers."""
    usual = row_keys(3, range(2))
    with jax.default_prng_impl("rbg"):
        assert np.array_equal(row_keys(3, range(2)), usual)


def test_logits_that_are_nan_give_no_id() -> None:
    keys = jax.random.wrap_key_data(jnp.asarray(row_keys(0, range(2))))
    logits = jnp.asarray([[1.0, jnp.nan, 0.0], [1.0, -jnp.inf, 0.0]])
    for sampling in (Sampling(0.0), Sampling(), Sampling(top_k=2), Sampling(top_p=0.5)):
        assert (draw(logits, keys, jnp.arange(2), sampling) < 0).tolist() == [True, False]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": -1.0}, r"^temperature: -1\.0; allowed: 0"),
        ({"temperature": float("nan")}, r"^temperature: nan"),
        ({"top_k": 0}, r"^top_k: 0; allowed: 1 and more"),
        ({"top_p": 0.0}, r"^top_p: 0\.0; allowed: a number > 0 and <= 1"),
        ({"top_p": 1.5}, r"^top_p: 1\.5"),
    ],
)
def test_numbers_out_of_range_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Sampling(**given)


class Scripted:
    """In place of a generator: it writes these texts, three tokens at a time."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.chunks = texts, 0

    def room(self, length: int, max_tokens: int) -> int:
        return min(max_tokens, 30 - length)

    def __call__(self, params: Any, prompts: Any, keys: Any, max_tokens: int) -> Iterator[np.ndarray]:
        rows = np.array([list(text.encode().ljust(60, b".")) for text in self.texts])
        for first in range(0, max_tokens, 3):
            self.chunks += 1
            yield rows[:, first : min(first + 3, max_tokens)]


def completions(texts: list[str], *, max_tokens: int = 20, **ends: Any) -> tuple[list[Completion], list[str], int]:
    """(completions of "a" in the end, what was shown of the first one after each chunk, chunks)."""
    scripted, shown = Scripted(*texts), []
    given = Ends(tokenizer=byte_tokenizer(), **ends)
    for found in complete(scripted, None, [[97]] * len(texts), np.zeros((1, 2)), max_tokens, given):  # type: ignore[arg-type]
        shown.append(found[0].shown(given.stop))
    return found, shown, scripted.chunks


def test_a_text_ends_at_a_token_a_stop_string_or_a_limit() -> None:
    (one, two, three), _, chunks = completions(["xy\nzz", "no end", "a STOP b"], eos=(10,), stop=("STOP", "OP"))
    assert (one.text, one.ended, one.ids) == ("xy", "eos", (120, 121))
    assert (two.text, two.ended, len(two.ids)) == ("no end" + "." * 14, "max_tokens", 20)
    assert (three.text, three.ended, bytes(three.ids)) == ("a ", "stop", b"a STOP")
    assert chunks == 7
    (one,), _, chunks = completions(["ab\n"], eos=(10,))
    assert one.text == "ab" and chunks == 1  # nothing is computed after the last text has ended
    (one,), _, _ = completions(["x"], max_tokens=40)
    assert (len(one.ids), one.ended) == (29, "positions")
    (one,), _, _ = completions(["abc\n"], eos=(10,), max_tokens=3)
    assert (one.text, one.ended) == ("abc", "max_tokens")


def test_what_is_shown_never_changes() -> None:
    """Half of a character is not shown, and no beginning of a stop string."""
    (one,), shown, _ = completions(["12é ST ST STOP later"], stop=("STOP",))
    assert shown == ["12", "12é ", "12é ST ", "12é ST ST ", "12é ST ST "] and one.text == shown[-1]
    assert completions(["1STAND"], stop=("STOP",), max_tokens=6)[1] == ["1", "1STAND"]


def test_texts_need_a_tokenizer() -> None:
    with pytest.raises(UserError, match=r"^stop: strings need a tokenizer"):
        Ends(stop=("x",))
    with pytest.raises(UserError, match=r"^stop: '' is in every text"):
        Ends(stop=("",), tokenizer=byte_tokenizer())
    with pytest.raises(UserError, match=r"^stop: 'x' is one text"):
        Ends(stop="x", tokenizer=byte_tokenizer())  # type: ignore[arg-type]
    assert ids_of("hi", byte_tokenizer()) == (104, 105) and ids_of(np.array([3, 4]), None) == (3, 4)  # type: ignore[arg-type]
