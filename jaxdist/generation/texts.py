"""Texts of generation: prompts to ids, and ids to texts, which end at a token, a stop string or a limit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdist.data.text.tokenizer import Tokenizer
from jaxdist.errors import UserError, first_of
from jaxdist.generation.loop import Generator
from jaxdist.specs import PyTree

UNFINISHED = "�"  # what the first bytes of a character are decoded to


@dataclass
class Completion:
    """What a model writes after a prompt.

    - prompt: the ids of the prompt.
    - ids: the new ids, without the one that ends the text.
    - text: that of `ids`, without the stop string; "" without a tokenizer.
    - ended: "eos", "stop", "max_tokens" or "positions"; "" while it goes on.
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...] = ()
    text: str = ""
    ended: str = ""

    def shown(self, stop: Sequence[str]) -> str:
        """The part of the text that no later token changes: for streaming."""
        if self.ended:
            return self.text
        sure = self.text.rstrip(UNFINISHED)
        begun = [each[:size] for each in stop for size in range(1, len(each)) if sure.endswith(each[:size])]
        return sure[: len(sure) - max(map(len, begun), default=0)]


@dataclass(frozen=True)
class Ends:
    """Where texts end, besides at a number of tokens.

    - eos: ids that end a text.
    - stop: strings that end a text. They need a tokenizer.

    Raises `UserError` for an empty string, and for strings without a tokenizer.
    """

    eos: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise UserError(f"stop: {self.stop!r} is one text; give a list of texts, [{self.stop!r}]")
        if not all(self.stop):
            raise UserError("stop: '' is in every text; allowed: strings of at least one character")
        if self.stop and self.tokenizer is None:
            raise UserError("stop: strings need a tokenizer, and none is known; give one, or leave stop out")

    def text(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """The text of ids after a prompt.

        Some tokenizers drop a space that would begin a text, so the prompt is decoded with them.
        """
        if self.tokenizer is None:
            return ""
        before, whole = self.tokenizer.decode(prompt), self.tokenizer.decode([*prompt, *ids])
        return whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(ids)

    def extend(self, one: Completion, new: Sequence[int], room: int, *, last: str) -> None:
        """Add new ids, up to where the text ends. room: how many ids it may have in all; last: why not more."""
        ids = (*one.ids, *new)
        at = next((i for i, token in enumerate(ids) if token in self.eos), len(ids))
        one.ids = ids[: min(at, room)]
        one.ended = "eos" if at < min(len(ids), room) else last if len(one.ids) == room else ""
        one.text = self.text(one.prompt, one.ids)
        found = [place for each in self.stop if (place := one.text.find(each)) >= 0]
        if found:
            while any(each in self.text(one.prompt, one.ids[:-1]) for each in self.stop):
                one.ids = one.ids[:-1]
            one.ended, one.text = "stop", one.text[: min(found)]


def ids_of(prompt: str | Sequence[int], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids of a prompt: of a text with those that the tokenizer puts before one. Raises `UserError` for a text
    without a tokenizer."""
    if not isinstance(prompt, str):
        return tuple(int(each) for each in prompt)
    if tokenizer is None:
        raise UserError(f"prompts: {prompt[:40]!r} is a text, and no tokenizer is known; give one, or token ids")
    return (*tokenizer.before, *tokenizer.encode(prompt))


def complete(
    generator: Generator,
    params: PyTree,
    prompts: Sequence[Sequence[int]],
    keys: np.ndarray,
    max_tokens: int,
    ends: Ends,
) -> Iterator[list[Completion]]:
    """The completions so far, chunk after chunk, until all have ended. keys: see `row_keys`. Raises `UserError` where a
    model gives NaN."""
    found = [Completion(tuple(prompt)) for prompt in prompts]
    rooms = [generator.room(len(prompt), max_tokens) for prompt in prompts]
    for chunk in generator(params, prompts, keys, max_tokens):
        for one, new, room in zip(found, chunk.tolist(), rooms, strict=True):
            if not one.ended:
                if -1 in new[: room - len(one.ids)]:
                    before = len(one.prompt) + len(one.ids) + new.index(-1)
                    raise UserError(
                        f"prompts: the model gives NaN for the token after the first {before} of the text that begins"
                        f" with the ids {first_of([*map(str, one.prompt)], 8)}; look whether the parameters are finite"
                    )
                ends.extend(one, new, room, last="max_tokens" if room == max_tokens else "positions")
        yield found
        if all(one.ended for one in found):
            return


def eos_of(eos: Any, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids that end a text: one, several, or None for that of the tokenizer."""
    if eos is None:
        return () if tokenizer is None or tokenizer.eos is None else (tokenizer.eos,)
    return (eos,) if isinstance(eos, int) else tuple(eos)
