"""The command `generate`: text by a trained model (docs/generation.md)."""

from collections.abc import Sequence
from pathlib import Path

from jaxdist.config.arguments import COUNT, numeric
from jaxdist.config.shipped import with_examples
from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.runtime.output import lasting_output

_EXAMPLES = (
    'jaxdist generate runs/mine --prompt "def main(" --max-tokens 200 --temperature 0.8',
    "jaxdist generate runs/mine --prompts prompts.jsonl --mesh tensor=2,fsdp=2 --temperature 0 > completions.jsonl",
)
_FROM = "a run directory, the folder of one of its steps, or a Hugging Face folder"


def sizes_of_mesh(text: str) -> dict[str, int]:
    """The sizes in "tensor=2,fsdp=2". Raises `UserError`."""
    found = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if (
            axis not in ("data", "fsdp", "tensor")
            or not size.isascii()
            or not size.isdigit()
            or not 1 <= int(size) <= 512
        ):
            raise UserError(f"--mesh: {text!r}; allowed: sizes of data, fsdp and tensor, such as tensor=2,fsdp=2")
        found[axis] = int(size)
    return found


@reports_mistakes
def _generate(argv: Sequence[str], prog: str) -> int:
    parser = CommandParser(
        prog=prog,
        description="Generate text with the model of a run, a checkpoint or a Hugging Face folder.",
        **with_examples(_EXAMPLES),
    )
    parser.add_argument("source", metavar="FROM", type=Path, help=_FROM)
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given more than once")
    text = 'lines {"prompt": TEXT}; the output has a line of JSON for each'
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help=text)
    parser.add_argument("--max-tokens", type=COUNT, default=128, metavar="N", help="of each completion; default 128")
    text = "0: the likeliest token; default 0.8, as of samples in training"
    parser.add_argument("--temperature", type=numeric(float, at_least=0), default=0.8, metavar="T", help=text)
    parser.add_argument("--top-k", type=COUNT, metavar="K", help="draw from the K likeliest tokens")
    share, text = numeric(float, above=0, at_most=1), "draw from the likeliest that have probability P"
    parser.add_argument("--top-p", type=share, metavar="P", help=text)
    parser.add_argument("--stop", action="append", default=[], metavar="STRING", help="ends a text; more than once")
    seed = numeric(int, at_least=0, at_most=2**32 - 1)
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="default 0: the same text each time")
    text = "sizes of data, fsdp and tensor: tensor=2,fsdp=2; one device, if left out"
    parser.add_argument("--mesh", type=str, default="", metavar="SIZES", help=text)
    parser.add_argument("--batch", type=COUNT, default=16, metavar="N", help="prompts at a time; default 16")
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="with tokenizer.json; or bytes; that of FROM, if left out"
    )
    parser.add_argument("--ema", action="store_true", help="the moving average of a run with train.ema")
    parser.add_argument("--no-cache", action="store_true", help="compute the whole text again for each token")
    arguments = parser.parse_args(argv)
    if bool(arguments.prompt) == (arguments.prompts is not None):
        parser.error("one of --prompt and --prompts is required")
    arguments.mesh = sizes_of_mesh(arguments.mesh) if arguments.mesh else {}
    from jaxdist.cli.work.generate import run_generate

    return run_generate(arguments)


def main(argv: Sequence[str], prog: str = "jaxdist generate") -> int:
    """Exit status: 0; 2 the arguments, or what is in FROM, are wrong."""
    with lasting_output():
        return _generate(argv, prog)
