"""The command `explain`: what a configuration will communicate and hold, without running a step."""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxdist.config.arguments import COUNT, numeric, output_file, picture_file
from jaxdist.config.load import load_config
from jaxdist.config.shipped import add_config, find_budget, take_config, with_examples
from jaxdist.errors import CommandParser, reports_mistakes

_EXAMPLES = (
    "jaxdist explain quickstart",
    "jaxdist explain quickstart parallel.strategy=zero2 --json out.json --remedies",
)


@reports_mistakes
def main(argv: Sequence[str], prog: str = "jaxdist explain") -> int:
    """Exit status: 0; 1 over budget; 2 the configuration is wrong."""
    parser = CommandParser(
        prog=prog, description="The collectives, memory and layout of one train step.", **with_examples(_EXAMPLES)
    )
    add_config(parser)
    parser.add_argument("--json", metavar="FILE", type=output_file, help="everything, for programs")
    parser.add_argument("--plot", metavar="FILE", type=picture_file, help="a picture: bytes by purpose, memory")
    text = "a picture: the stages of a pipeline in time"
    parser.add_argument("--timeline", metavar="FILE", type=picture_file, help=text)
    text = "collectives, and activations, that are printed; 0: all; default: 24"
    parser.add_argument("--rows", type=numeric(int, at_least=0), default=24, metavar="N", help=text)
    parser.add_argument("--parameters", action="store_true", help="also print how every parameter is sharded")
    parser.add_argument("--activations", action="store_true", help="also print what is kept for the backward pass")
    parser.add_argument("--compile", action="store_true", help="also compile, for simulated devices, and compare")
    parser.add_argument("--remedies", action="store_true", help="also compile what would save memory, and rank it")
    parser.add_argument(
        "--gpu", default="h200", help="with --remedies: the GPU whose seconds are predicted; default: h200"
    )
    text = "what is sent within a host is told apart from what leaves it; default: 8"
    parser.add_argument("--devices-per-host", type=COUNT, default=8, metavar="N", help=text)
    parser.add_argument(
        "--budget", metavar="BUDGET", help="fail when a collective or a byte is not in it: a file, or a shipped name"
    )
    parser.add_argument(
        "--write-budget", metavar="FILE", type=output_file, help="write this step's budget, for --budget"
    )
    arguments = parser.parse_intermixed_args(argv)
    arguments.budget = Path(find_budget(arguments.budget)) if arguments.budget else None
    config = load_config(*take_config(parser, arguments), planned=True)
    import jax  # not before the configuration holds

    jax.config.update("jax_platforms", "cpu")
    if arguments.compile or arguments.remedies:
        jax.config.update("jax_num_cpu_devices", config.mesh.devices)
    from jaxdist.cli.work.explain import run_explain

    over = run_explain(config, arguments)
    for line in over:
        print(f"over budget: {line}", file=sys.stderr)
    return 1 if over else 0
