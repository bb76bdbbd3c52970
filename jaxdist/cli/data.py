"""The command `data`: text to token ids; and examples for fine-tuning, shown as a model sees them."""

from collections.abc import Sequence

from jaxdist.config.arguments import COUNT, numeric, output_folder
from jaxdist.config.shipped import with_examples
from jaxdist.errors import CommandParser, UserError, reports_mistakes

_EXAMPLES = (
    "jaxdist data talks.jsonl --show 3 --tokenizer models/qwen",
    "jaxdist data pages.jsonl --tokenizer tokenizer.json --end '<|endoftext|>' --out data/tokens",
)


@reports_mistakes
def main(argv: Sequence[str], prog: str = "jaxdist data") -> int:
    """Exit status: 0 done, 2 something is wrong with the input."""
    parser = CommandParser(
        prog=prog,
        description="Write text as token ids, for data.source=tokens; or show examples for fine-tuning.",
        **with_examples(_EXAMPLES),
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="text files, .jsonl files, folders of them")
    parser.add_argument("--out", metavar="DIR", type=output_folder, help="a new folder")
    parser.add_argument(
        "--tokenizer", default="bytes", metavar="FILE", help="bytes, or a tokenizer.json, or its folder"
    )
    parser.add_argument("--field", default="text", help="the key of the text in .jsonl files")
    parser.add_argument("--end", default="", help="added to the end of each document, such as '<|endoftext|>'")
    share, text = numeric(float, above=0, at_most=0.5), "fraction of the documents for val.bin; default: 0.05"
    parser.add_argument("--held-out", type=share, default=0.05, metavar="X", help=text)
    shown = parser.add_argument_group("to look at the examples of .jsonl files for data.source=jsonl")
    text = "print the first N, and which of their tokens are learned"
    shown.add_argument("--show", type=COUNT, metavar="N", help=text)
    shown.add_argument("--chat-template", metavar="FILE", help="otherwise that of the tokenizer's folder")
    arguments = vars(parser.parse_args(argv))
    show, template = arguments.pop("show"), arguments.pop("chat_template")
    if (show is None) == (arguments["out"] is None):
        raise UserError("--out: give the name of a new folder; or, to look at examples, --show N without --out")
    if show is not None:
        from jaxdist.data.text.show import show_examples  # slow to import: not for --help

        show_examples(arguments["inputs"], show, tokenizer=arguments["tokenizer"], chat_template=template)
        return 0
    from jaxdist.data.prepare import prepare, summary  # slow to import: not for --help

    manifest = prepare(**arguments)
    print("\n".join(summary(manifest, arguments["out"])))
    return 0
