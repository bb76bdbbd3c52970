"""Masked language modelling over a text (Devlin et al. 2019, 3.1): some positions are hidden, and are the targets.

Legend: n samples, S seq_len.
"""

from collections.abc import Iterator

import jax
import numpy as np

from jaxdist.config.entries import SourceFacts
from jaxdist.config.schema import DataConfig
from jaxdist.data.file_array import FileArray, Ids
from jaxdist.data.loader import ROUNDS, permute
from jaxdist.data.samples import Samples
from jaxdist.data.source import Source, Yardstick, fingerprint
from jaxdist.data.sources.text import text
from jaxdist.data.sources.tokens import tokens
from jaxdist.errors import UserError

FACTS = SourceFacts(
    reads_files=True,
    words=("stdlib",),
    path="what data.masked_source takes: a file or folder of text, stdlib, or a file of token ids",
    val_path="an existing file of token ids, or null",
    next_token=False,
)
_PIECES, _PIECE = 64, 1 << 18  # of a text: at most so many, of so many ids, are counted


def masked(config: DataConfig) -> Source:
    """Samples: inputs and targets int32 [S], weights float32 [S], which are 1 for chosen positions and else 0.

    The text is that of the source `data.masked_source`, cut into windows of `data.seq_len` ids. In each window
    `data.mask_rate` of the positions (rounded, one at least) are chosen at random. A chosen id becomes the mask token
    with the probability `data.mask_token_rate`, a random id of the text's with `data.random_token_rate`, and stays
    otherwise. Targets are the ids of the text.

    A window comes in `data.maskings` versions, each of which is a sample and cuts the text at other places, as in the
    authors' code (`dupe_factor`). What is masked depends on the number of the sample and on nothing else. Held-out
    windows have one version.

    Raises `UserError`: as that source; a mask token that is an id of the text read as bytes.
    """
    inner = {"text": text, "tokens": tokens}[config.masked_source](config)
    mask = inner.vocab if config.mask_token is None else config.mask_token
    if inner.info["unit"] == "bytes" and mask < inner.vocab:
        raise UserError(
            f"data.mask_token: {mask} is a byte; allowed: {inner.vocab} or more, or null for the first of these"
        )
    ids, held_ids = inner.train, inner.held_out
    assert isinstance(ids, Ids) and isinstance(held_ids, Ids)
    train = _samples(config, ids, inner.vocab, mask, side=0, maskings=config.maskings)
    held_out = _samples(config, held_ids, inner.vocab, mask, side=1, maskings=1)
    rates = f"{config.mask_rate} {config.mask_token_rate} {config.random_token_rate} {mask} {config.maskings}".encode()
    sizes = {"train": train.size // config.maskings, "held_out": held_out.size}
    digest = fingerprint([("ids", 64, [inner.info["sha256"].encode()]), ("masking", len(rates), [rates])])
    info = inner.info | {"name": "masked", "unit": "windows", "sha256": digest} | sizes
    yardstick = Yardstick("of masked tokens right", lambda: _unigram(ids, held_ids, inner.vocab))
    return Source(train, held_out, max(inner.vocab, mask + 1), info, yardstick=yardstick)


def _samples(config: DataConfig, ids: Ids, vocab: int, mask: int, *, side: int, maskings: int) -> Samples:
    """side: 0 for what is trained on, 1 for what is held out, so that both are masked differently."""
    length = config.seq_len
    count = max(1, round(config.mask_rate * length))  # positions that are chosen
    windows = max(1, (ids.size - length) // length if maskings > 1 else ids.size // length)
    slack = min(length - 1, ids.size - windows * length)  # the largest offset of a version
    like = {"inputs": np.int32, "targets": np.int32, "weights": np.float32}

    def read(numbers: np.ndarray) -> dict[str, np.ndarray]:
        version, window = np.divmod(numbers, windows)
        starts = window * length + version * (slack + 1) // maskings
        if isinstance(ids, FileArray):
            targets = ids.windows(starts, length).astype(np.int32)
        else:
            targets = np.lib.stride_tricks.sliding_window_view(ids, length)[starts].astype(np.int32)
        inputs, weights = targets.copy(), np.zeros(targets.shape, np.float32)
        for row, number in enumerate(numbers):
            # Not a Generator: NumPy changes what it draws between versions, and never what a SeedSequence gives.
            state = np.random.SeedSequence((side, int(number))).generate_state(ROUNDS + 2 * count, np.uint64)
            chosen = permute(np.arange(count), length, state[:ROUNDS])
            chance, drawn = state[ROUNDS : ROUNDS + count] / 2.0**64, (state[ROUNDS + count :] % vocab).astype(np.int32)
            shown = np.where(chance < config.mask_token_rate + config.random_token_rate, drawn, targets[row, chosen])
            inputs[row, chosen] = np.where(chance < config.mask_token_rate, mask, shown)
            weights[row, chosen] = 1
        return {"inputs": inputs, "targets": targets, "weights": weights}

    leaves = {name: jax.ShapeDtypeStruct((length,), dtype) for name, dtype in like.items()}
    return Samples(windows * maskings, leaves, read)


def _unigram(train: Ids, held_out: Ids, vocab: int) -> dict[str, float]:
    """The accuracy of always saying the most frequent id."""
    counts = [np.zeros(vocab, np.int64), np.zeros(vocab, np.int64)]
    for own, ids in zip(counts, (train, held_out), strict=True):
        for piece in _spread(ids):
            own += np.bincount(piece, minlength=vocab)
    return {"unigram": float(counts[1][counts[0].argmax()] / counts[1].sum())}


def _spread(ids: Ids) -> Iterator[np.ndarray]:
    """All ids, or of a long text pieces at even distances."""
    if ids.size <= _PIECES * _PIECE:
        yield ids[:]
        return
    for i in range(_PIECES):
        start = i * (ids.size - _PIECE) // (_PIECES - 1)
        yield ids[start : start + _PIECE]
