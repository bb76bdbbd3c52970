"""The command `cost`: what communication costs a training run on several hosts, by formulas and a table of hardware."""

import json
import re
from collections.abc import Sequence
from typing import Any

from jaxdist.config.arguments import numeric, output_file
from jaxdist.config.shipped import with_examples
from jaxdist.errors import CommandParser, UserError, nearest, reports_mistakes

_EXAMPLES = ("jaxdist cost", "jaxdist cost --model vit-huge --hosts 8 --link p4d.24xlarge --compute 0.9")
_UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_MOST = 1e15  # bytes, and hosts times GPUs: more is a slip of the pen


def make_parser(prog: str) -> CommandParser:
    """The options. Without any, they are the textbook's case."""
    parser = CommandParser(
        prog=prog,
        description="The cost of data parallelism over a network: seconds of an all-reduce, of a step, and the speed-up"
        " over one host, each with its formula; links and machines with the sources of their figures. Without options"
        " it is the textbook's case: ViT-Base in float16, three hosts of 8 GPUs, 10 Gbit/s. Nothing is measured.",
        **with_examples(_EXAMPLES),
    )
    add = parser.add_argument
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--model", metavar="NAME", help="gradients of vit-base, vit-huge, resnet101, bert-base or gpt2")
    size.add_argument("--size", metavar="BYTES", help="of the gradients, as 172MB")
    count, several = (numeric(int, at_least=least, at_most=1_000_000) for least in (1, 2))
    add("--bytes", type=count, default=2, metavar="B", help="of a gradient of --model; default: 2, as in float16")
    add("--hosts", type=several, default=3, metavar="N", help="default: 3")
    add("--gpus", type=count, default=8, metavar="G", help="of a host; default: 8")
    add("--link", default="10gbit", help="of a host: a rate, as 10gbit, or a name of the tables; default: 10gbit")
    text = "seconds of a step of one host alone; default: 0.42"
    add("--compute", type=numeric(float, above=0, below=_MOST), metavar="S", help=text)
    add("--every", type=count, default=10, metavar="H", help="steps between two exchanges of local SGD; default: 10")
    add("--json", type=output_file, metavar="FILE", help="all figures, for programs")
    return parser


@reports_mistakes
def main(argv: Sequence[str], prog: str = "jaxdist cost") -> int:
    """Exit status: 0, or 2 for wrong arguments.

    >>> from jaxdist.cli.cost import main
    >>> main(["--hosts", "1"])
    2
    """
    options = make_parser(prog).parse_args(argv)
    given = None if options.size is None else _size_of(options.size)

    from jaxdist.cli.work.cost import cost_lines, figures_of

    case, size = _case(options, given)
    lines = cost_lines(case, size, options.link)
    if options.json is not None:
        options.json.write_text(json.dumps(figures_of(case), indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return 0


def _case(options: Any, given: float | None) -> tuple[Any, str]:
    """What is computed, a `jaxdist.plan.costs.Case`, and the words for its size."""
    from jaxdist.plan.costs import COUNTED_MODELS, TEXTBOOK, parameters
    from jaxdist.plan.machines import rate_of_link

    case = TEXTBOOK._replace(
        hosts=options.hosts, gpus=options.gpus, every=options.every, rate=rate_of_link(options.link, key="--link")
    )
    if options.compute is not None:
        case = case._replace(one=options.compute, all=options.compute)
    words = "86 M parameters (ViT-Base, rounded as in the textbook) x 2 bytes"
    if given is not None:
        case, words = case._replace(size=given), "as given"
    elif options.model is not None:
        if options.model not in COUNTED_MODELS:
            near = nearest(options.model, COUNTED_MODELS)
            hint = f"; did you mean {near}?" if near else ""
            raise UserError(f"--model: {options.model!r} is not known; allowed: {', '.join(COUNTED_MODELS)}{hint}")
        count = parameters(options.model)
        case = case._replace(size=float(count * options.bytes))
        words = f"{count:,} parameters of {options.model}, counted from the model, x {options.bytes} bytes"
    return case, words


def _size_of(text: str) -> float:
    """Bytes of "172MB", "1.5GB" or "4096"."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kMGT]?)B?", text)
    size = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 1000 <= size <= _MOST:
        raise UserError(f"--size: {text!r}; allowed: bytes, as 172MB, 1.5GB or 4096, 1000 or more")
    return size
