"""Command lines of the form OPTIONS -- COMMAND, and the options of `scripts/launch.py`."""

import argparse
import itertools
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxdist.config.arguments import numeric
from jaxdist.config.shipped import with_examples
from jaxdist.errors import CommandParser, UserError
from jaxdist.runtime.network.addresses import split_address
from jaxdist.runtime.network.job_token import TOKEN, TOKEN_FILE, new_token, read_token
from jaxdist.runtime.run_folder import given_run_directory, run_directory_of

_DESCRIPTION = """Start COMMAND N times on this host, as the processes of one job; with --nnodes, on every host. Each
process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment. A job that
fails is started again and resumes from its last checkpoint. Ctrl-C, or SIGTERM, stops the ranks together, with a
checkpoint; a second one kills them. Exit status: 0 done, 2 the configuration is wrong, 75 stopped but resumable, 1
anything else."""
_EXAMPLES = (
    "jaxdist launch -n 2 -- jaxdist train quickstart devices.simulated=4",
    "jaxdist launch -n 8 --nnodes 2 --node-rank 0 --coordinator host0:9876 -- jaxdist train my.yaml --run-dir my",
)
MAX_COUNT = 100_000  # of processes or hosts
FRUITLESS = 3  # without a newer checkpoint
AMOUNT = numeric(float, at_least=0, below=1e6)  # of CPUs or GPUs of a host


def split_command(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The arguments before `--`, and the command after it."""
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:split]), tuple(arguments[split + 1 :])


def check_separator(parser: CommandParser, arguments: Sequence[str]) -> None:
    """Raise `UserError` where the command stands without `--` before it. parser: of the arguments before `--`."""
    rest = [] if "--" in arguments else parser.parse_known_args(arguments)[1]
    if rest and not rest[0].startswith("-"):
        at = len(arguments) - len(rest)  # what is not known is its end, but where options follow the command
        at = at if list(arguments[at:]) == rest else list(arguments).index(rest[0])
        meant = f"{parser.prog} {shlex.join([*arguments[:at], '--', *arguments[at:]])}"
        raise UserError(f"command: {rest[0]!r} has no -- before it; allowed: OPTIONS -- COMMAND; write {meant}")


def check_command(command: Sequence[str]) -> None:
    """Raise `UserError` where there is nothing to run."""
    if not command:
        raise UserError("command: none given; allowed: a program and its arguments, after --")
    if any("\0" in argument for argument in command):
        raise UserError("command: an argument holds a NUL character; leave it out")


class Plan(NamedTuple):
    """The job to start, as the command line describes it."""

    command: tuple[str, ...]
    procs: int  # on this host
    min_procs: int  # the fewest with which to go on
    nnodes: int  # hosts
    min_nodes: int  # the fewest with which to go on
    node_rank: int
    coordinator: str | None  # "host:port", or None for a free port of this host
    token: str  # that the processes of the job share; "" where there is none, on several hosts of one machine
    max_restarts: int
    run_dir: Path
    log_dir: Path
    log_option: str  # the option that errors about the logs' folder name
    bind: bool  # whether each process has CPUs of its own
    grace: float  # seconds
    backoff: float  # seconds


def make_parser(prog: str = "jaxdist launch") -> CommandParser:
    """The options before `--`."""
    parser = CommandParser(
        prog=prog, description=_DESCRIPTION, usage=f"{prog} -n N [options] -- COMMAND ...", **with_examples(_EXAMPLES)
    )
    add = parser.add_argument
    count, ordinal = numeric(int, at_least=1, at_most=MAX_COUNT), numeric(int, at_least=0)
    seconds = numeric(float, at_least=0)
    add("-n", "--procs", type=count, required=True, metavar="N", help="processes on this host")
    add("--nnodes", type=count, default=1, metavar="N", help="hosts in the job (default: 1)")
    add("--node-rank", type=ordinal, default=0, metavar="R", help="of this host, from 0")
    text = "address of host 0 that all can reach; the launchers of several hosts meet at this port, the job at the next"
    add("--coordinator", metavar="HOST:PORT", help=text)
    text = f"with --nnodes: holds a secret, the same on every host, by which they know each other; or set {TOKEN}"
    add("--token-file", metavar="FILE", help=text)
    text = (
        f"give up after so many restarts without a newer checkpoint (default: {FRUITLESS}; 0 for jaxdist doctor, eval"
    )
    text += " and others that do not train)"
    add("--max-restarts", type=ordinal, metavar="N", help=text)
    add("--ray", action="store_true", help="start on hosts of a Ray cluster: that of RAY_ADDRESS, or this machine")
    add("--host-cpus", type=AMOUNT, metavar="C", help="with --ray: CPUs that Ray reserves on each host (default: 1)")
    add("--host-gpus", type=AMOUNT, metavar="G", help="with --ray: GPUs that it reserves on each host (default: none)")
    text = "instead of giving up, go on with one process fewer on this host, down to this number"
    add("--min-procs", type=count, metavar="N", help=text)
    text = "restart with the hosts that come, if they are so many at least (host 0 among them)"
    add("--min-nodes", type=count, metavar="N", help=text)
    add("--log-dir", metavar="DIR", help="of the ranks' logs (default: logs/ in the run directory)")
    add("--no-bind", dest="bind", action="store_false", help="let every process use all CPUs")
    text = "left to the other ranks when one has failed; so long after SIGTERM a line names who still runs (default: 5)"
    add("--grace", type=seconds, default=5.0, metavar="SECONDS", help=text)
    text = "before a restart; doubled for each further one without progress (default: 1)"
    add("--backoff", type=seconds, default=1.0, metavar="SECONDS", help=text)
    return parser


def make_plan(
    arguments: Sequence[str], environ: Mapping[str, str], prog: str = "jaxdist launch", *, make: bool = False
) -> Plan:
    """Read a command line. Raises `UserError`. make: a run directory that is not given is made: it is nobody else's."""
    before, command = split_command(arguments)
    options = make_parser(prog).parse_args(before)
    check_command(command)
    _check_numbers(options)
    if options.nnodes > 1 and options.coordinator is None:
        raise UserError("--coordinator: not given; with --nnodes give HOST:PORT of host 0, the same on every host")
    if options.nnodes > 1 and options.min_procs is not None:
        raise UserError("--min-procs: is for one host; with --nnodes use --min-nodes")
    if options.coordinator is not None and split_address(options.coordinator, "--coordinator")[1] == 65535:
        raise UserError(f"--coordinator: {options.coordinator!r} leaves no next port; allowed: ports below 65535")
    if options.nnodes > 1 and options.log_dir is None and given_run_directory(command, environ) is None:
        raise UserError("--run-dir: not given in the command; with --nnodes give one, the same on every host")
    token = read_token({**environ, TOKEN_FILE: options.token_file} if options.token_file else environ)
    for name in ("--ray", "--host-cpus", "--host-gpus"):  # a plan is of one host; jaxdist.elastic.launch reads these
        if vars(options).pop(name[2:].replace("-", "_")):
            raise UserError(f"{name}: only with --ray, by the command jaxdist launch")
    del options.token_file
    run_dir = run_directory_of(command, environ, make=make)
    made = {
        "command": command,
        "token": token or (new_token() if options.nnodes == 1 else ""),
        "max_restarts": _restarts(command) if options.max_restarts is None else options.max_restarts,
        "min_procs": options.min_procs or options.procs,
        "min_nodes": options.min_nodes or options.nnodes,
        "run_dir": run_dir,
        "log_dir": run_dir / "logs" if options.log_dir is None else Path(options.log_dir),
        "log_option": "--run-dir" if options.log_dir is None else "--log-dir",
    }
    return Plan(**vars(options) | made)


def _restarts(command: Sequence[str]) -> int:
    """The restarts of a command that are allowed by default. What does not train has no checkpoints, and its status 1
    says what it has found."""
    words = itertools.pairwise(command)
    own = next((after for word, after in words if Path(word).name == "jaxdist"), "train")
    return FRUITLESS if own == "train" else 0


def _check_numbers(options: argparse.Namespace) -> None:
    least = {"--min-procs": (options.min_procs, options.procs), "--min-nodes": (options.min_nodes, options.nnodes)}
    for name, (value, most) in least.items():
        if value is not None and value > most:
            raise UserError(f"{name}: {value}; allowed: 1 to {most}")
    if options.node_rank >= options.nnodes:
        raise UserError(f"--node-rank: {options.node_rank} of {options.nnodes} hosts; allowed: 0 to --nnodes - 1")
