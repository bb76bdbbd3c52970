"""Examples for fine-tuning in lines of JSON: conversations, prompts with completions, texts."""

import functools

from jaxdist.config.entries import SourceFacts
from jaxdist.config.schema import DataConfig
from jaxdist.data.records import record_files
from jaxdist.data.source import Source
from jaxdist.data.text.examples import jsonl_examples
from jaxdist.data.text.source import source_of_files

FACTS = SourceFacts(
    reads_files=True, path="a .jsonl file, or a folder of such", val_path="a .jsonl file, a folder of such, or null"
)


def jsonl(config: DataConfig) -> Source:
    """Samples: inputs and targets int32 [S], weights float32 [S], which are 1 where a target is to be learned.

    A line of `data.path`, a .jsonl file or a folder of such, is an example: an object with `messages`, with `prompt`
    and `completion`, or with `text`. `data.tokenizer` makes ids of it. The lines of `data.val_path` are held out;
    without it, those whose content hashes below `data.held_out`.

    Raises `UserError`: a line that is no example; a tokenizer or chat template that cannot be used.
    """
    files_of = functools.partial(record_files, suffixes=(".jsonl",))
    return source_of_files(config, "jsonl", files_of, jsonl_examples)
