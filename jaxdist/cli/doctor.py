"""The command `doctor`: what is wrong with this machine or job?"""

from collections.abc import Sequence

from jaxdist.config.arguments import numeric, picture_file
from jaxdist.config.shipped import with_examples
from jaxdist.errors import CommandParser, reports_mistakes

_DESCRIPTION = """A check of a machine or a job before it trains: versions, devices, ports, network, environment,
clocks, and the bandwidth between all pairs. To be started like a run, on every host of the job."""
_EXAMPLES = ("jaxdist doctor", "jaxdist launch -n 2 -- jaxdist doctor --json")


@reports_mistakes
def main(argv: Sequence[str], prog: str = "jaxdist doctor") -> int:
    """Exit status: 0 nothing is wrong, 1 there are findings, 2 wrong arguments or no job can be joined."""
    parser = CommandParser(prog=prog, description=_DESCRIPTION, **with_examples(_EXAMPLES))
    text = "simulated CPU devices a process"
    parser.add_argument("--simulated", type=numeric(int, at_least=1, at_most=512), default=1, metavar="N", help=text)
    parser.add_argument(
        "--platform", default="auto", choices=("auto", "cpu", "gpu"), help="of the devices; default: auto"
    )
    text = "of a message (default: 4 on CPUs, 256 on GPUs)"
    parser.add_argument("--mib", type=numeric(float, above=0, at_most=65_536), help=text)
    text = "see whether a coordinator could listen on it here"
    parser.add_argument("--port", type=numeric(int, at_least=1, at_most=65_535), help=text)
    parser.add_argument("--plot", metavar="OUT.png", type=picture_file, help="the bandwidths as a picture")
    parser.add_argument("--json", action="store_true", help="all that was found, in place of the text")
    options = parser.parse_args(argv)
    from jaxdist.cli.work.doctor import run_doctor  # imports jax

    return run_doctor(options)
