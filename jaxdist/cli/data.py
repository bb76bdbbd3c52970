"""The command `data`: text to token ids."""

from collections.abc import Sequence
from pathlib import Path

from jaxdist.config.shipped import with_examples
from jaxdist.errors import CommandParser, reports_mistakes

_EXAMPLES = (
    "jaxdist data books/ --out data/bytes",
    "jaxdist data pages.jsonl --tokenizer tokenizer.json --end '<|endoftext|>' --out data/tokens",
)


@reports_mistakes
def main(argv: Sequence[str], prog: str = "jaxdist data") -> int:
    """Exit status: 0 done, 2 something is wrong with the input."""
    parser = CommandParser(
        prog=prog, description="Write text as token ids, for data.source=tokens.", **with_examples(_EXAMPLES)
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="text files, .jsonl files, folders of them")
    parser.add_argument("--out", required=True, metavar="DIR", type=Path, help="a new folder")
    parser.add_argument("--tokenizer", default="bytes", metavar="FILE", help="bytes, or a tokenizer.json")
    parser.add_argument("--field", default="text", help="the key of the text in .jsonl files")
    parser.add_argument("--end", default="", help="added to the end of each document, such as '<|endoftext|>'")
    parser.add_argument("--held-out", type=float, default=0.05, help="fraction of the documents for val.bin")
    arguments = parser.parse_args(argv)
    from jaxdist.data.prepare import prepare, summary  # slow to import: not for --help

    manifest = prepare(**vars(arguments))
    print("\n".join(summary(manifest, arguments.out)))
    return 0
