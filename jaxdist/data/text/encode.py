"""Examples as token ids, and which of these count in the loss."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxdist.data.text.examples import Example
from jaxdist.data.text.template import Renderer
from jaxdist.data.text.tokenizer import Encoded, Tokenizer

_BATCH, _BATCH_CHARACTERS = 64, 1 << 20  # at most, rendered and encoded together


class EncodedExample(NamedTuple):
    """An example as ids (uint32 [n]); counts: bool [n], whether a token is one to learn."""

    example: Example
    ids: np.ndarray
    counts: np.ndarray


class _Marked(NamedTuple):
    """A text, and where the parts that count begin and end in it, in characters."""

    text: str
    spans: list[tuple[int, int]]


def encoded(
    examples: Iterable[Example], tokenizer: Tokenizer, renderer: Callable[[], Renderer], *, completion_only: bool
) -> Iterator[EncodedExample]:
    """Examples as ids, a batch in memory at a time.

    - Conversations are what the chat template makes of them: it writes all special tokens.
    - Prompts and texts begin with what the tokenizer puts before a text, and end with its end token, which counts.
    - renderer: gives it; called where there are conversations.
    - completion_only: prompts do not count. (Of conversations the renderer says what counts.)

    Raises `UserError` at the first example whose end is a token that the tokenizer names and does not have.
    """
    for batch in _batches(examples):
        talks = [each.conversation for each in batch if each.conversation is not None]
        rendered = iter(renderer().render(talks) if talks else ())
        marked = [
            _Marked(*next(rendered)) if each.conversation else _plain(each.pieces, completion_only) for each in batch
        ]
        for example, text in zip(batch, marked, strict=True):
            tokenizer.check_end(None if example.conversation is None else text.text)
        found = tokenizer.encode_batch([each.text for each in marked])
        for example, text, ids in zip(batch, marked, found, strict=True):
            yield _document(example, text, ids, tokenizer)


def _batches(examples: Iterable[Example]) -> Iterator[list[Example]]:
    batch, size = list[Example](), 0
    for each in examples:
        batch.append(each)
        size += len(each.content) if each.conversation else sum(map(len, each.pieces))
        if len(batch) == _BATCH or size > _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _plain(pieces: Sequence[str], completion_only: bool) -> _Marked:
    text = "".join(pieces)
    return _Marked(text, [(len(text) - len(pieces[-1]) if completion_only else 0, len(text))])


def _document(example: Example, marked: _Marked, whole: Encoded, tokenizer: Tokenizer) -> EncodedExample:
    """A token counts if it begins in a part that counts. Where one lies across the edge of such a part, the text before
    the edge and the text after it are encoded apart, as they are when a model continues a prompt."""
    begins, ends = np.array(whole.begins, np.int64), np.array(whole.ends, np.int64)
    edges = sorted({edge for span in marked.spans for edge in span})
    cut = [edge for edge in edges if ((begins < edge) & (ends > edge)).any()]
    ids = np.array(whole.ids, np.uint32)
    if cut:
        places = [0, *cut, len(marked.text)]
        pieces = [marked.text[start:stop] for start, stop in pairwise(places)]
        apart = tokenizer.encode_batch(pieces)
        ids = np.array([each for piece in apart for each in piece.ids], np.uint32)
        begins = np.array([start + at for start, piece in zip(places, apart, strict=False) for at in piece.begins])
    counts = np.zeros(ids.shape, bool)
    for begin, end in marked.spans:
        counts |= (begins >= begin) & (begins < end)
    if example.conversation is not None:
        return EncodedExample(example, ids, counts)
    before = np.array(tokenizer.before, np.uint32)
    after = np.array([] if tokenizer.eos is None else [tokenizer.eos], np.uint32)
    counts = np.concatenate([np.zeros(before.shape, bool), counts, np.ones(after.shape, bool)])
    return EncodedExample(example, np.concatenate([before, ids, after]), counts)
