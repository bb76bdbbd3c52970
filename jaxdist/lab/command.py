"""The command line of the laboratory for slow networks, `jaxdist lab`."""

import sys

from jaxdist.config.arguments import numeric
from jaxdist.config.shipped import with_examples
from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.lab.network import MAX_HOSTS, clean, unavailable
from jaxdist.lab.virtual_hosts import HostResult, Output, exit_status, run_on_hosts
from jaxdist.launcher.options import check_separator, split_command

LAB_DESCRIPTION = """Run COMMAND on N virtual hosts of this machine, as the N processes of one job, each behind a link
of the given rate. The links add no delay: they limit bandwidth only. The hosts see one another and nothing else. Needs
Linux and root; COMMAND runs as root too. It finds the job in JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
JAX_PROCESS_ID, and HOST_INDEX, HOST_COUNT, VIRTUAL_HOSTS_INTERFACE and VIRTUAL_HOSTS_RATE. data-parallel is another
laboratory, and needs neither: it shows PyTorch's DataParallel beside ddp (data-parallel --help)."""
LAB_USAGE = "{0} -n N --rate RATE[,RATE...] [options] -- COMMAND ...\n       {0} --clean\n       {0} data-parallel ..."
_DATA_PARALLEL = "data-parallel"
_EXAMPLES = (
    "sudo jaxdist lab -n 3 --rate 200mbit -- jaxdist train quickstart mesh.data=-1 devices.simulated=4",
    "sudo jaxdist lab --clean",
)


def make_lab_parser(prog: str = "jaxdist lab") -> CommandParser:
    """The options before `--`."""
    parser = CommandParser(
        prog=prog, description=LAB_DESCRIPTION, usage=LAB_USAGE.format(prog), **with_examples(_EXAMPLES)
    )
    add = parser.add_argument
    add("-n", "--hosts", type=numeric(int, at_least=1, at_most=MAX_HOSTS), metavar="N", help="number of hosts, 1 to 64")
    add("--rate", help="of every link, both ways, as 200mbit; or one a host, with commas; or none")
    add("--burst", default="256kb", help="bytes that may leave at once (default: 256kb)")
    add("--congestion", default="cubic", metavar="NAME", help="of TCP (default: cubic)")
    text = "left to the other hosts when one has failed, and to all after a signal (default: 10)"
    add(
        "--grace",
        type=numeric(float, at_least=0),
        default=10.0,
        metavar="SECONDS",
        help=f"{text}; a second one kills at once",
    )
    add("--quiet", action="store_true", help="show what host 0 prints, and nothing of the others")
    add("--clean", action="store_true", help="only remove what killed runs left behind")
    return parser


@reports_mistakes
def run_lab(arguments: list[str], prog: str = "jaxdist lab") -> int:
    """Exit status: 0 done, that of the host that failed first, 128 + n after signal n, 2 when it cannot run."""
    if arguments[:1] == [_DATA_PARALLEL]:
        from jaxdist.lab.data_parallel.command import run_data_parallel

        return run_data_parallel(arguments[1:], f"{prog} {_DATA_PARALLEL}")
    before, command = split_command(arguments)
    parser, signals = make_lab_parser(prog), list[int]()
    check_separator(parser, arguments)
    options = parser.parse_args(before)
    if options.clean:
        if reason := unavailable():
            raise UserError(reason)
        print(f"removed {clean()} namespaces")
        return 0
    if options.hosts is None or options.rate is None:
        parser.error("-n and --rate are required")
    links = {name: getattr(options, name) for name in ("hosts", "rate", "burst", "congestion", "grace")}
    output: Output = "first" if options.quiet else "prefixed"
    results = run_on_hosts(command, **links, output=output, signals=signals)
    for result in results:
        _print_result(result, quiet=options.quiet)
    return exit_status(results) or (128 + signals[0] if signals else 0)


def _print_result(result: HostResult, *, quiet: bool) -> None:
    if quiet and result.host and result.status and not result.killed:
        print(result.stderr, end="", file=sys.stderr)
    ended = f"exit {result.status}" + (" (killed)" if result.killed else "")
    moved = f"tx {result.tx_bytes / 1e6:.2f} MB, rx {result.rx_bytes / 1e6:.2f} MB"
    print(f"[host{result.host}] {ended}, {result.seconds:.2f} s, {moved}", file=sys.stderr)
