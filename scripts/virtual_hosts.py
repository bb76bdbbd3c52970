"""A laboratory for slow networks: python scripts/virtual_hosts.py -n 4 --rate 200mbit -- COMMAND ..."""

import argparse
import sys

from jaxdist.errors import UserError
from jaxdist.lab.network import clean, exit_status, missing, run

DESCRIPTION = """Run COMMAND on N virtual hosts of this machine, as the N processes of one job, each behind a link of
the given rate. The links add no delay: they limit bandwidth only. The hosts see one another and nothing else. Needs
Linux and root; COMMAND runs as root too. It finds the job in JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
JAX_PROCESS_ID, and HOST_INDEX, HOST_COUNT, VIRTUAL_HOSTS_INTERFACE and VIRTUAL_HOSTS_RATE."""
USAGE = "virtual_hosts.py -n N --rate RATE[,RATE...] [options] -- COMMAND ...\n       virtual_hosts.py --clean"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message}; usage: {USAGE}")


def main(arguments: list[str]) -> int:
    """Exit status: 0 done, that of the host that failed first, 128 + n after signal n, 2 when it cannot run."""
    parser = _Parser(description=DESCRIPTION, usage=USAGE)
    parser.add_argument("-n", "--hosts", type=int, metavar="N", help="number of hosts, 1 to 64")
    parser.add_argument("--rate", help="of every link, both ways, as 200mbit; or one a host, with commas; or none")
    parser.add_argument("--burst", default="256kb", help="bytes that may leave at once (default: 256kb)")
    parser.add_argument("--congestion", default="cubic", metavar="NAME", help="of TCP (default: cubic)")
    parser.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="left to the other hosts when one "
        "has failed, and to all after a signal (default: 10); a second one kills at once",
    )
    parser.add_argument("--quiet", action="store_true", help="show what host 0 prints, and nothing of the others")
    parser.add_argument("--clean", action="store_true", help="only remove what killed runs left behind")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    signals: list[int] = []
    try:
        options = parser.parse_args(arguments[:split])
        if options.clean:
            if reason := missing():
                raise UserError(reason)
            print(f"removed {clean()} namespaces")
            return 0
        if options.hosts is None or options.rate is None:
            parser.error("-n and --rate are required")
        results = run(
            arguments[split + 1 :],
            hosts=options.hosts,
            rate=options.rate,
            burst=options.burst,
            grace=options.grace,
            congestion=options.congestion,
            output="first" if options.quiet else "prefixed",
            signals=signals,
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for result in results:
        if options.quiet and result.host and result.status and not result.killed:
            print(result.stderr, end="", file=sys.stderr)
        ended = f"exit {result.status}" + (" (killed)" if result.killed else "")
        moved = f"tx {result.tx_bytes / 1e6:.2f} MB, rx {result.rx_bytes / 1e6:.2f} MB"
        print(f"[host{result.host}] {ended}, {result.seconds:.2f} s, {moved}", file=sys.stderr)
    return exit_status(results) or (128 + signals[0] if signals else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
