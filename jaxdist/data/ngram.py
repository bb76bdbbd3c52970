"""Baselines for a language model: models that count pairs or triples of tokens, on the same held-out text.

Legend: V vocabulary. Bits per token, i.e. per byte for bytes; divide a model's loss in nats by ln 2 to compare.
"""

import numpy as np

from jaxdist.data.file_array import Ids

BIGRAM_MAX_VOCAB = 4096  # V**2 counts of 8 bytes: 134 MB
TRIGRAM_MAX_VOCAB = 256  # V**3 counts of 8 bytes: 134 MB
_CHUNK = 1 << 23  # n-grams counted at a time; bounds the working memory to about 0.5 GB


def bigram_bits(train: Ids, held_out: Ids, vocab: int, *, smoothing: float = 0.1) -> float:
    """Bits per token of `held_out` under p(b|a) = (count(ab) + smoothing) / (count(a) + smoothing V), counted in train.

    The average is over all tokens of `held_out` but the first, which has no context; a language model's loss leaves it
    out too. Returns nan for V > 4096, where a table of counts is too large and, on most texts, too thin to mean much.
    """
    if vocab > BIGRAM_MAX_VOCAB:
        return float("nan")
    assert held_out.size >= 2, "a bigram needs two held-out tokens"
    counts_VV = _counts(train, 2, vocab).reshape(vocab, vocab)
    seen_VV = _counts(held_out, 2, vocab).reshape(vocab, vocab)
    first, second = np.nonzero(seen_VV)
    p = (counts_VV[first, second] + smoothing) / (counts_VV.sum(axis=1)[first] + smoothing * vocab)
    return _mean_bits(p, seen_VV[first, second])


def trigram_bits(train: Ids, held_out: Ids, vocab: int) -> float:
    """Bits per token of `held_out` under a trigram model counted in `train`, with interpolated Witten-Bell smoothing.

    p(c|ab) = (count(abc) + kinds(ab) p(c|b)) / (count(ab) + kinds(ab)), kinds(ab) = the number of different tokens seen
    after ab; p(c|b) is made from p(c) in the same way, and p(c) from 1/V (Witten and Bell 1991; Chen and Goodman 1999).
    The average is over all tokens of `held_out` but the first two. Returns nan for V > 256.
    """
    if vocab > TRIGRAM_MAX_VOCAB:
        return float("nan")
    assert held_out.size >= 3, "a trigram needs three held-out tokens"
    lower = np.full(vocab, 1 / vocab)
    for order in (1, 2):
        every = np.arange(vocab**order)
        lower = _witten_bell(_counts(train, order, vocab), every, lower, vocab)
    seen = _counts(held_out, 3, vocab)
    codes = np.flatnonzero(seen)
    return _mean_bits(_witten_bell(_counts(train, 3, vocab), codes, lower, vocab), seen[codes])


def _counts(ids: Ids, order: int, vocab: int) -> np.ndarray:
    """The counts of all n-grams of `order` ids, int64 [V**order]. The first id is the most significant digit."""
    # Cheap for a short text: pages of `np.zeros` that no n-gram touches are never written.
    counts = np.zeros(vocab**order, np.int64)
    for start in range(0, ids.size - order + 1, _CHUNK):
        part = ids[start : start + _CHUNK + order - 1].astype(np.int64)
        assert part.max() < vocab, "an id is outside the vocabulary"
        number = part.size - order + 1
        codes = part[:number].copy()
        for shift in range(1, order):
            codes *= vocab
            codes += part[shift : shift + number]
        np.add.at(counts, codes, 1)
    return counts


def _witten_bell(counts: np.ndarray, codes: np.ndarray, lower: np.ndarray, vocab: int) -> np.ndarray:
    """p(last id | the others) of each n-gram in `codes`. lower: the same without the first id, for all codes."""
    contexts, context = np.unique(codes // vocab, return_inverse=True)
    table = counts.reshape(-1, vocab)[contexts]  # a row per context
    total, kinds = table.sum(axis=1), np.count_nonzero(table, axis=1)
    # The code of an n-gram without its first id is the remainder by V**(n-1). For n = 1 `lower` is the same everywhere.
    below = lower[codes % lower.size]
    return np.where(
        total[context] > 0,
        (counts[codes] + kinds[context] * below) / np.maximum(total[context] + kinds[context], 1),
        below,
    )


def _mean_bits(p: np.ndarray, times: np.ndarray) -> float:
    return float(-(times * np.log2(p)).sum() / times.sum())
