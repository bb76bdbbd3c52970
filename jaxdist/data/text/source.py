"""A data source of examples: they are encoded once, at the start, and stay in memory, five bytes a token."""

import functools
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config.schema import DataConfig
from jaxdist.data.samples import Samples
from jaxdist.data.source import Source, fingerprint, hash_fraction, source_info
from jaxdist.data.text.encode import EncodedExample, encoded
from jaxdist.data.text.examples import KINDS, Example
from jaxdist.data.text.packing import Collected, Documents, first_fit, in_rows
from jaxdist.data.text.template import Renderer
from jaxdist.data.text.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, template_file
from jaxdist.errors import UserError

_KEY = "data.tokenizer"


def tokenizer_of(config: Any) -> Tokenizer:
    """The tokenizer that a section `data` names."""
    return byte_tokenizer() if config.tokenizer in (None, "bytes") else load_tokenizer(Path(config.tokenizer), key=_KEY)


def missing_end(tokenizer: Tokenizer, kinds: Collection[str]) -> str:
    """What to say where no token marks the end of the examples of these kinds; "" where one does, or bytes are the
    ids."""
    if tokenizer.folder is None or tokenizer.eos is not None:
        return ""
    plain = " and ".join(kind for kind in ("prompt", "text") if kind in kinds)
    told = f"warning: nothing marks the end of examples with {plain}: {tokenizer.name} has no end token"
    return f"{told}, which eos_token in tokenizer_config.json names" if plain else ""


def template_of(config: Any, tokenizer: Tokenizer) -> str | None:
    """The chat template that a section `data` names, or else the tokenizer's own."""
    if config.chat_template is None:
        return tokenizer.chat_template
    return template_file(Path(config.chat_template).expanduser(), key="data.chat_template")


def renderer_of(config: Any, tokenizer: Tokenizer, stack: ExitStack) -> Renderer:
    """The renderer of conversations, which ends with the stack. Raises `UserError` without a chat template."""
    template = template_of(config, tokenizer)
    if template is None:
        raise UserError(
            f"data.chat_template: null, but there are conversations, and the tokenizer ({tokenizer.name}) has no chat"
            " template; give a file with one"
        )
    made = Renderer(
        template,
        key="data.chat_template",
        special=dict(tokenizer.special),
        day=config.chat_date,
        spans=config.completion_only,
    )
    return stack.enter_context(made)


@dataclass
class _Counted:
    """What was read of examples by a tokenizer, cut and left out."""

    tokenizer: str
    kinds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    cut: int = 0  # examples
    cut_tokens: int = 0
    too_long: int = 0
    nothing_to_learn: int = 0

    def kept(self, document: EncodedExample, room: int, truncation: str) -> tuple[np.ndarray, np.ndarray] | None:
        """The ids of a document that fit into a row, and whether they count; None: it is left out."""
        self.kinds[document.example.kind] += 1
        ids, counts = document.ids, document.counts
        over = ids.size - room
        if over > 0 and truncation == "drop":
            self.too_long += 1
            return None
        if over > 0:
            side = slice(None, room) if truncation == "right" else slice(over, None)
            ids, counts = ids[side], counts[side]
        if not counts[1:].any():
            self.nothing_to_learn += 1
            return None
        if over > 0:
            self.cut, self.cut_tokens = self.cut + 1, self.cut_tokens + over
        return ids, counts


def source_of_files(
    config: Any, name: str, files_of: Callable[..., list[Path]], examples_of: Callable[..., Iterable[Example]]
) -> Source:
    """The source of the examples in the files of `data.path`, with those of `data.val_path` held out: `example_source`.

    files_of: (a file or folder, key) -> its files. examples_of: (files, key) -> the examples in them.
    """

    def read(path: str, key: str) -> tuple[list[Path], Iterable[Example]]:
        files = files_of(Path(path).expanduser(), key=key)
        return files, examples_of(files, key=key)

    files, train = read(config.path, "data.path")
    held_files, held_out = (files, None) if config.val_path is None else read(config.val_path, "data.val_path")
    return example_source(config, name, train, held_out, files=(len(files), len(held_files)))


def example_source(
    config: Any, name: str, train: Iterable[Example], held_out: Iterable[Example] | None, *, files: tuple[int, int]
) -> Source:
    """The source of these examples. Its samples are rows: see `jaxdist.data.text.packing.in_rows`.

    - config: the section `data`.
    - held_out: None: examples whose content hashes below `data.held_out` are, so that the same one is never on both
      sides.
    - files: numbers of files of both.

    Raises `UserError`: for what is no example; for a side without any.
    """
    tokenizer, collected = tokenizer_of(config), Collected()
    counted = _Counted(tokenizer.name)
    places, sides = list[float](), list[bool]()
    with ExitStack() as stack:
        renderer = functools.cache(lambda: renderer_of(config, tokenizer, stack))
        for side, examples in enumerate((train, held_out or ())):
            for each in encoded(examples, tokenizer, renderer, completion_only=config.completion_only):
                kept = counted.kept(each, config.seq_len + 1, config.truncation)
                if kept is not None:
                    collected.add(*kept)
                    sides.append(bool(side))
                    places.append(hash_fraction(each.example.content))
    documents = collected.documents()
    out = np.array(sides, bool) if held_out is not None else _by_hash(np.array(places), config.held_out)
    both = [documents.of(out == side) for side in (False, True)]
    for part, what in zip(both, ("to train on", "held out"), strict=True):
        if part.starts.size == 1:
            raise UserError(
                f"data.path: {config.path!r} gives no examples {what} ({_left_out(counted) or 'none was left out'});"
                " give two different ones at least, or data.val_path"
            )
    digest = fingerprint(
        [
            *((f"{i}", array.nbytes, [memoryview(array).cast("B")]) for part in both for i, array in enumerate(part)),
            ("tokenizer", len(tokenizer.sha256), [tokenizer.sha256.encode()]),
            _named("chat template", template_of(config, tokenizer) or ""),
        ]
    )
    packed = config.packing != "none"
    rows = [in_rows(part, seq_len=config.seq_len, packed=packed, apart=config.apart) for part in both]
    info = source_info(
        config,
        name,
        "rows",
        sizes=(rows[0].size, rows[1].size),
        files=files,
        sha256=digest,
        whole="examples; give more, or data.val_path",
    )
    described = _described(config, counted, documents, both[0], rows[0])
    endless = missing_end(tokenizer, [kind for kind, number in counted.kinds.items() if number])
    info |= described | {"lines": [*described["lines"], *info.get("lines", ()), *([endless] if endless else [])]}
    starts = (both[0].starts[:-1], both[1].starts[:-1])
    return Source(rows[0], rows[1], tokenizer.vocab, info, starts)


def _named(name: str, text: str) -> tuple[str, int, list[bytes]]:
    content = text.encode()
    return name, len(content), [content]


def _by_hash(places: np.ndarray, fraction: float) -> np.ndarray:
    """Which examples are held out. If a side would be empty, the one that is nearest to the limit changes sides."""
    out = places < fraction
    if places.size > 1 and not out.any():
        out = places == places.min()
    elif places.size > 1 and out.all():
        out = places != places.max()
    return out


def _left_out(counted: _Counted) -> str:
    parts = {"longer than data.seq_len + 1": counted.too_long, "without a token to learn": counted.nothing_to_learn}
    return ", ".join(f"{number:,} {why} left out" for why, number in parts.items() if number)


def _described(
    config: DataConfig, counted: _Counted, all_: Documents, train: Documents, rows: Samples
) -> dict[str, Any]:
    """What the header of a run and env.json say beside the sizes."""
    length, packed = config.seq_len, config.packing != "none"
    lengths = np.diff(train.starts)
    firsts = train.counts[train.starts[:-1]].sum()
    learned = int(train.counts.sum() - firsts)
    filled, counts = train.ids.size / (rows.size * (length + 1)), learned / (rows.size * length)
    kinds = ", ".join(f"{number:,} of {kind}" for kind, number in counted.kinds.items() if number)
    cut = f"{counted.cut:,} cut at the {config.truncation} by {counted.cut_tokens:,} tokens" if counted.cut else ""
    tokens = f"{all_.ids.size:,} tokens ({counted.tokenizer})"
    lines = ["; ".join(each for each in (f"{kinds}: {tokens}", cut, _left_out(counted)) if each)]
    share = f"{filled:.1%} of the places hold tokens, {counts:.1%} are learned"
    if packed:
        joined = "do not see each other" if config.apart else "see those before them"
        lines.append(f"packed: {lengths.size / rows.size:.2f} examples a row, which {joined}; {share}")
    else:
        needed = int(first_fit(lengths, length + 1).max()) + 1
        lines.append(f"one example a row: {share}; data.packing=documents would make {needed:,} rows of {rows.size:,}")
    numbers = {
        "examples": counted.kinds,
        "tokens": int(all_.ids.size),
        "cut": counted.cut,
        "cut_tokens": counted.cut_tokens,
        "too_long": counted.too_long,
        "nothing_to_learn": counted.nothing_to_learn,
        "train_examples": int(lengths.size),
        "train_tokens": int(train.ids.size),
        "train_learned": learned,
    }
    return {"lines": lines, "examples": numbers}
