"""The first examples of a file as a model sees them: their tokens as text, and which of these are learned."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby, islice
from pathlib import Path

from jaxdist.config.schema import DataConfig
from jaxdist.data.records import record_files
from jaxdist.data.text.encode import EncodedExample, encoded
from jaxdist.data.text.examples import jsonl_examples
from jaxdist.data.text.source import missing_end, renderer_of, tokenizer_of
from jaxdist.data.text.tokenizer import Tokenizer

LEARNED, SEEN = "bold green", "dim"
_MARKS = "⟦", "⟧"  # around what is learned, where there are no colours


def parts_of(example: EncodedExample, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """The text of an example in parts, and whether each is learned. The first token is never learned."""
    learned = example.counts.copy()
    learned[:1] = False
    for each, group in groupby(zip(learned.tolist(), example.ids.tolist(), strict=True), key=lambda pair: pair[0]):
        yield _printable(tokenizer.decode([token for _, token in group])), each


def _printable(text: str) -> str:
    """What a file holds must not move the cursor."""
    return "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text)


def show_examples(
    inputs: Sequence[str | Path], count: int, *, tokenizer: str = "bytes", chat_template: str | None = None
) -> None:
    """Print the first examples of .jsonl files, or of folders of such. Learned text is green, or stands in ⟦ ⟧ where
    there are no colours.

    - tokenizer: `bytes`, a folder with tokenizer.json, or that file.
    - chat_template: a file; None: that of the tokenizer's folder.

    Raises `UserError` as the source `jsonl` does.
    """
    from rich.console import Console  # slow to import
    from rich.text import Text

    given = None if tokenizer == "bytes" else tokenizer
    config = DataConfig(source="jsonl", tokenizer=given, chat_template=chat_template)
    files = [file for path in inputs for file in record_files(Path(path).expanduser(), (".jsonl",), key="INPUT")]
    found, console = tokenizer_of(config), Console()
    kinds = set[str]()
    before, after = _MARKS if console.color_system is None else ("", "")
    with ExitStack() as stack:
        renderer = functools.cache(lambda: renderer_of(config, found, stack))
        examples = islice(jsonl_examples(files, key="INPUT"), count)
        for example in encoded(examples, found, renderer, completion_only=True):
            text = Text()
            kinds.add(example.example.kind)
            for part, learned in parts_of(example, found):
                text.append(f"{before}{part}{after}" if learned else part, style=LEARNED if learned else SEEN)
            number = int(example.counts[1:].sum())
            header = f"{example.example.where}: {example.ids.size} tokens, {number} learned"
            console.print(header, markup=False, highlight=False, soft_wrap=True)
            console.print(text, soft_wrap=True)
            console.print()
    if endless := missing_end(found, kinds):
        console.print(endless, markup=False, highlight=False, soft_wrap=True)
