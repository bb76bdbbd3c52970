"""The commands `elastic`, servers and workers on Ray, and `replay`, such a run again in one process."""

import os
import shlex
import signal
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdist.config.arguments import COUNT, numeric
from jaxdist.config.load import load_config, to_yaml
from jaxdist.config.schema import Config
from jaxdist.config.shipped import add_config, take_config, with_examples
from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.runtime.exit_status import DONE, FAILED, STOPPED

if TYPE_CHECKING:
    from jaxdist.elastic.run_directory import Settings
    from jaxdist.runtime.run_claim import RunClaim

_EXAMPLES = (
    "jaxdist elastic quickstart mesh.data=1 mesh.fsdp=1 mesh.tensor=1 devices.simulated=1 --run-dir runs/elastic",
    "jaxdist elastic --config my.yaml --workers 4 --servers 2 --bound 4 --patience 60 --period 50 --outer nesterov"
    " --outer-momentum 0.3",
)
_REPLAYS = ("jaxdist replay runs/elastic/elastic.jsonl", "jaxdist replay runs/elastic")
# option: (default, allowed from, to, help)
_COUNTS = {
    "workers": (2, 1, 1024, "jobs that train, each on a mesh of its own"),
    "servers": (1, 1, 1024, "parts of the parameters"),
    "bound": (4, 0, 10_000, "the largest staleness of a push, in versions; 0: all workers push together"),
    "period": (10, 1, 1_000_000, "steps between a pull and a push"),
}
_KEPT = ("servers", "bound", "period")  # of these, and of the outer rule, a run that goes on keeps what it has


@reports_mistakes
def main(argv: Sequence[str], prog: str = "jaxdist elastic") -> int:
    """Exit status: 0 done, 2 something is wrong with the configuration, 75 stopped, and the same command resumes."""
    about = (
        "Train with workers that do not wait for each other, around servers that hold the parameters. Starts Ray on"
        " this machine, or joins the cluster of RAY_ADDRESS. A run that goes on keeps the servers, bound, period and"
        " outer rule that it was started with."
    )
    parser = CommandParser(prog=prog, description=about, **with_examples(_EXAMPLES))
    add_config(parser)
    add = parser.add_argument
    for name, (default, least, most, text) in _COUNTS.items():
        kind = numeric(int, at_least=least, at_most=most)
        add(f"--{name}", type=kind, metavar="N", help=f"{text} (default: {default})")
    text = "seconds of silence after which a worker is lost (default: 60)"
    add("--patience", type=numeric(float, at_least=1, at_most=86_400), default=60.0, metavar="S", help=text)
    text = "rounds of all workers together (default: as many as give each worker train.steps, rounded up)"
    add("--rounds", type=COUNT, metavar="N", help=text)
    add("--outer", metavar="NAME", help="rule of the servers: sgd, momentum, nesterov (default: sgd)")
    text = "its learning rate (default: 1 / workers; with bound 0, where the mean of pushes counts, 1)"
    add("--outer-lr", type=numeric(float, above=0, at_most=100), metavar="X", help=text)
    text = "its momentum; sgd has none, the others need it"
    add("--outer-momentum", type=numeric(float, at_least=0, below=1), metavar="X", help=text)
    text = "workers that are ready before anybody works (default: all)"
    add("--least", type=COUNT, metavar="N", help=text)
    add("--gpus", type=numeric(int, at_least=0, at_most=64), default=0, metavar="N", help="of each worker (default: 0)")
    add("--run-dir", metavar="DIR", help="where the run is kept; one that exists is resumed")
    arguments = parser.parse_intermixed_args(argv)
    path, overrides = take_config(parser, arguments)
    _check(arguments)
    config = load_config(path, overrides)
    from jaxdist.files.regular import remove_empty
    from jaxdist.files.user_path import user_path
    from jaxdist.runtime.run_folder import new_run_directory

    given = arguments.run_dir
    folder = user_path(given, key="--run-dir") if given else new_run_directory(path, make=True)
    try:
        return _run(config, arguments, folder)
    finally:
        remove_empty(*(folder, folder.parent) * (not given))  # made in vain where the run could not begin


def _check(arguments: Namespace) -> None:
    """Fill in the workers. Raises `UserError` where more of them must be ready than there are."""
    if arguments.workers is None:
        arguments.workers = _COUNTS["workers"][0]
    if arguments.least is None:
        arguments.least = arguments.workers
    if arguments.least > arguments.workers:
        raise UserError(f"--least: {arguments.least}; allowed: 1 to {arguments.workers}, the number of workers")


def _settings(arguments: Namespace, steps: int, start: dict[str, Any]) -> "Settings":
    """What is given, or else what the run was started with, or else the default. steps: of train.steps. start: the
    first line of the run's log, {} for a new run. Raises `UserError`."""
    from jaxdist.elastic.outer import RULES, make_outer
    from jaxdist.elastic.run_directory import Settings

    given = vars(arguments)
    kept = {name: start.get(name, _COUNTS[name][0]) if given[name] is None else given[name] for name in _KEPT}
    # Where each push counts in full, staleness does harm: docs/elastic.md.
    lr = start.get("lr", 1.0 if kept["bound"] == 0 else 1.0 / arguments.workers)
    name, momentum = arguments.outer or start.get("outer", "sgd"), arguments.outer_momentum
    outer = make_outer(
        name,
        lr if arguments.outer_lr is None else arguments.outer_lr,
        start.get("momentum", 0.0) if momentum is None else momentum,
    )
    remembers = bool(RULES[name][1])
    if momentum and not remembers:
        others = " or ".join(rule for rule, (_, slots) in RULES.items() if slots)
        raise UserError(
            f"--outer-momentum: {momentum:g} has no effect with --outer {name}; leave it out, or give --outer {others}"
        )
    if remembers and momentum is None and not start:
        raise UserError(
            f"--outer: {name} without --outer-momentum is sgd; give it, above 0 and below 1, as 0.3, or --outer sgd"
        )
    return Settings(
        workers=arguments.workers,
        patience=arguments.patience,
        rounds=arguments.rounds or arguments.workers * -(-steps // kept["period"]),
        outer=outer,
        gpus=arguments.gpus,
        least=arguments.least,
        **kept,
    )


def _run(config: Config, arguments: Namespace, folder: Path) -> int:
    from jaxdist.elastic.run_directory import check_directory, log_so_far, pushes_in
    from jaxdist.elastic.worker import check_job
    from jaxdist.errors import RunStopped
    from jaxdist.runtime.run_claim import RunClaim
    from jaxdist.runtime.run_folder import ELASTIC_LOG

    check_job(config)
    text, shown = to_yaml(config), shlex.quote(str(folder))
    try:
        with _sigterm_as_sigint(), RunClaim(folder) as claim:
            before = log_so_far(folder / ELASTIC_LOG)
            settings = _settings(arguments, config.train.steps, before[0] if before else {})
            check_directory(settings, text, folder, before)
            _say(f"run        {folder}")
            done = sum(pushes_in(before).values())
            if done >= settings.rounds and before[-1]["event"] == "end":
                _say(f"done       nothing is left to do: {done} rounds are done, and {settings.rounds} are asked for")
                _say(f"           to go on, give a larger number, as --rounds {2 * done}")
            else:
                _say_steps(arguments.rounds is None, settings, config.train.steps)
                _train(settings, text, claim, before)
    except KeyboardInterrupt:
        _say(f"stopped    the same command with --run-dir {shown} goes on")
        return STOPPED
    except RunStopped as error:
        _say(f"error: {error}")
        return STOPPED
    _say(f"log        {folder / ELASTIC_LOG}; to check it: jaxdist replay {shown}")
    return DONE


def _say_steps(counted: bool, settings: "Settings", steps: int) -> None:
    """Say where rounds that were counted from train.steps come to another number of steps."""
    each = settings.rounds * settings.period // settings.workers
    if counted and each != steps:
        what = f"{each} for each worker, not {steps} (train.steps): a round has {settings.period}"
        _say(f"steps      {what}; --period or --rounds change that")


def _train(settings: "Settings", text: str, claim: "RunClaim", before: list[dict[str, Any]]) -> None:
    from jaxdist.elastic.cluster import cluster
    from jaxdist.elastic.run import run_elastic

    parts = f"{_count(settings.servers, 'server')}, {_count(settings.workers, 'worker')}, bound {settings.bound}"
    _say(f"elastic    {parts}, {_count(settings.rounds, 'round')} of {_count(settings.period, 'step')}; Ray starts")
    with cluster(cpus=settings.servers + settings.least, gpus=settings.least * settings.gpus) as found:
        _say(f"ray        {'of its own' if found.own else f'at {found.address}'}; workers start and compile")
        cores = len(os.sched_getaffinity(0))
        if found.own and settings.least > cores:
            _say(f"warning: {settings.least} workers are more processes than the {cores} cores of this machine")
        result = run_elastic(settings, text, claim, before, _say)
    _say(f"held-out   loss {result.loss:.4f}" if result.loss is not None else "held-out   not evaluated")
    _say(f"done       version {result.version}, staleness {_shares(result.staleness)}")


@contextmanager
def _sigterm_as_sigint() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(line: str) -> None:
    print(line, flush=True)


def _count(number: int, what: str) -> str:
    from jaxdist.trainer.header import plural

    return f"{number} {plural(what, number)}"


def _shares(staleness: dict[int, int]) -> str:
    return ", ".join(f"{value}: {count}" for value, count in sorted(staleness.items()))


@reports_mistakes
def replay_main(argv: Sequence[str], prog: str = "jaxdist replay") -> int:
    """Exit status: 0 the same bits, 1 other bits, 2 the log or the configuration beside it is wrong."""
    about = "Recompute an elastic run from its log, in one process, and compare the bits of its parameters."
    parser = CommandParser(prog=prog, description=about, **with_examples(_REPLAYS))
    parser.add_argument("log", metavar="LOG", help="elastic.jsonl, or its folder, with config.yaml beside it")
    arguments = parser.parse_args(argv)
    from jaxdist.elastic.log import read_log
    from jaxdist.runtime.run_folder import ELASTIC_LOG

    path = Path(arguments.log)
    path = path / ELASTIC_LOG if path.is_dir() else path
    return _replay(read_log(path), path)


def _replay(events: list[dict[str, Any]], path: Path) -> int:
    from jaxdist.elastic.replay import made_with, replay, sha256_of
    from jaxdist.elastic.run_directory import staleness_in
    from jaxdist.elastic.worker import Worker, config_text

    fresh = Worker("w0", config_text(path.with_name("config.yaml")), events[0]["period"])
    fresh.first()
    again = replay(events, fresh.numbers(), fresh.twin)
    ends = [event for event in events if event["event"] == "end" and event["version"] == again.version]
    found = sha256_of(again.flat)
    print(f"replayed   version {again.version}, staleness {_shares(staleness_in(events))}, bound {events[0]['bound']}")
    print(f"replayed   {found}")
    print(f"logged     {ends[-1]['sha256'] if ends else 'no end: the run was stopped; its losses are compared'}")
    made = [f"{name} {version}" for name, version in made_with().items() if events[0].get(name) not in (None, version)]
    if made:
        print(f"warning: the log was made with other versions than {', '.join(made)}, which give other bits")
    if again.wrong:
        print(f"OTHER LOSSES: {len(again.wrong)} of {again.losses}, first {again.wrong[0]}")
    if ends and ends[-1]["sha256"] != found:
        print("OTHER BITS of the parameters")
        return FAILED
    if again.wrong:
        return FAILED
    print(f"the same bits: {'parameters and ' if ends else ''}{_count(again.losses, 'loss')}")
    return DONE
