"""The commands `elastic`, servers and workers on Ray, and `replay`, such a run again in one process."""

import signal
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdist.config.load import load_config, to_yaml
from jaxdist.config.schema import Config
from jaxdist.config.shipped import add_config, take_config, with_examples
from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.runtime.exit_status import DONE, FAILED, STOPPED

_EXAMPLES = (
    "jaxdist elastic quickstart mesh.data=1 mesh.fsdp=1 mesh.tensor=1 devices.simulated=1 --run-dir runs/elastic",
    "jaxdist elastic --config my.yaml --workers 4 --servers 2 --bound 4 --patience 60 --period 50 --outer nesterov",
)
_REPLAYS = ("jaxdist replay runs/elastic/elastic.jsonl", "jaxdist replay runs/elastic")
# option: (default, allowed from, to, help)
_COUNTS = {
    "workers": (2, 1, 1024, "jobs that train, each on a mesh of its own"),
    "servers": (1, 1, 1024, "parts of the parameters"),
    "bound": (4, 0, 10_000, "the largest staleness of a push, in versions; 0: all workers push together"),
    "period": (10, 1, 1_000_000, "steps between a pull and a push"),
}


@reports_mistakes
def main(argv: Sequence[str], prog: str = "jaxdist elastic") -> int:
    """Exit status: 0 done, 2 something is wrong with the configuration, 75 stopped, and the same command resumes."""
    about = (
        "Train with workers that do not wait for each other, around servers that hold the parameters. Starts Ray on"
        " this machine, or joins the cluster of RAY_ADDRESS."
    )
    parser = CommandParser(prog=prog, description=about, **with_examples(_EXAMPLES))
    add_config(parser)
    add = parser.add_argument
    for name, (default, _, _, text) in _COUNTS.items():
        add(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    add("--patience", type=float, default=60.0, metavar="S", help="seconds of silence after which a worker is lost")
    add("--rounds", type=int, metavar="N", help="of all workers together (default: train.steps on each of them)")
    add("--outer", default="sgd", metavar="NAME", help="rule of the servers: sgd, momentum, nesterov (default: sgd)")
    text = "its learning rate (default: 1 / workers; with bound 0, where the mean of pushes counts, 1)"
    add("--outer-lr", type=float, metavar="X", help=text)
    add("--outer-momentum", type=float, default=0.0, metavar="X", help="its momentum (default: 0)")
    add("--least", type=int, metavar="N", help="workers that are ready before anybody works (default: all)")
    add("--gpus", type=int, default=0, metavar="N", help="of each worker (default: 0)")
    add("--run-dir", metavar="DIR", help="where the run is kept; one that exists is resumed")
    arguments = parser.parse_intermixed_args(argv)
    path, overrides = take_config(parser, arguments)
    _check(arguments)
    config = load_config(path, overrides)
    from jaxdist.runtime.run_folder import new_run_directory

    folder = Path(arguments.run_dir) if arguments.run_dir else new_run_directory(path)
    return _run(config, arguments, folder)


def _check(arguments: Namespace) -> None:
    """Raise `UserError` for numbers that cannot be meant."""
    for name, (_, least, most, _) in _COUNTS.items():
        value = getattr(arguments, name)
        if not least <= value <= most:
            raise UserError(f"--{name}: {value}; allowed: {least} to {most}")
    if not 1 <= arguments.patience <= 86_400:
        raise UserError(f"--patience: {arguments.patience:g}; allowed: 1 to 86400 seconds")
    if arguments.rounds is not None and arguments.rounds < 1:
        raise UserError(f"--rounds: {arguments.rounds}; allowed: 1 or more")
    if not 1 <= (arguments.least or arguments.workers) <= arguments.workers:
        raise UserError(f"--least: {arguments.least}; allowed: 1 to {arguments.workers}, the number of workers")
    if not 0 <= arguments.gpus <= 64:
        raise UserError(f"--gpus: {arguments.gpus}; allowed: 0 to 64")


def _run(config: Config, arguments: Namespace, folder: Path) -> int:
    from jaxdist.elastic.cluster import cluster
    from jaxdist.elastic.outer import make_outer
    from jaxdist.elastic.run import run_elastic
    from jaxdist.elastic.run_directory import Settings
    from jaxdist.elastic.worker import check_job
    from jaxdist.errors import RunStopped

    check_job(config)
    lr = arguments.outer_lr
    if lr is None:  # where each push counts in full, staleness does harm: docs/elastic.md
        lr = 1.0 if arguments.bound == 0 else 1.0 / arguments.workers
    settings = Settings(
        workers=arguments.workers,
        servers=arguments.servers,
        bound=arguments.bound,
        patience=arguments.patience,
        period=arguments.period,
        rounds=arguments.rounds or arguments.workers * -(-config.train.steps // arguments.period),
        outer=make_outer(arguments.outer, lr, arguments.outer_momentum),
        gpus=arguments.gpus,
        least=arguments.least or arguments.workers,
    )
    say = lambda line: print(line, flush=True)  # noqa: E731
    try:
        with cluster(cpus=settings.servers + settings.least, gpus=settings.least * settings.gpus) as found:
            kind = "of its own" if found.own else f"at {found.address}"
            parts = f"{settings.servers} servers, {settings.workers} workers, bound {settings.bound}"
            say(f"elastic    {parts}, rounds of {settings.period} steps; Ray {kind}")
            say(f"run        {folder}")
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's would end the program here
            result = run_elastic(settings, to_yaml(config), folder, say)
    except KeyboardInterrupt:
        say("stopped    the same command with --run-dir goes on")
        return STOPPED
    except RunStopped as error:
        say(f"error: {error}")
        return STOPPED
    say(f"held-out   loss {result.loss:.4f}" if result.loss is not None else "held-out   not evaluated")
    say(f"done       version {result.version}, staleness {_shares(result.staleness)}")
    return DONE


def _shares(staleness: dict[int, int]) -> str:
    return ", ".join(f"{value}: {count}" for value, count in sorted(staleness.items()))


@reports_mistakes
def replay_main(argv: Sequence[str], prog: str = "jaxdist replay") -> int:
    """Exit status: 0 the same bits, 1 other bits, 2 the log or the configuration beside it is wrong."""
    about = "Recompute an elastic run from its log, in one process, and compare the bits of its parameters."
    parser = CommandParser(prog=prog, description=about, **with_examples(_REPLAYS))
    parser.add_argument("log", metavar="LOG", help="elastic.jsonl, or its folder, with config.yaml beside it")
    arguments = parser.parse_args(argv)
    from jaxdist.elastic.log import LOG_NAME, read_log

    path = Path(arguments.log)
    path = path / LOG_NAME if path.is_dir() else path
    return _replay(read_log(path), path)


def _replay(events: list[dict[str, Any]], path: Path) -> int:
    from jaxdist.elastic.replay import made_with, replay, sha256_of
    from jaxdist.elastic.worker import Worker, config_text

    fresh = Worker("w0", config_text(path.with_name("config.yaml")), events[0]["period"])
    fresh.first()
    again = replay(events, fresh.numbers(), fresh.twin)
    said = [event for event in events if event["event"] == "end"]
    stale = Counter(p["staleness"] for event in events if event["event"] == "commit" for p in event["pushes"])
    print(f"replayed   version {again.version}, staleness {_shares(stale)}, bound {events[0]['bound']}")
    print(f"replayed   {sha256_of(again.flat)}")
    if not said or said[-1]["version"] != again.version:
        print("logged     no end: the run was stopped")
        return DONE
    made = [f"{name} {version}" for name, version in made_with().items() if events[0].get(name) not in (None, version)]
    same = said[-1]["sha256"] == sha256_of(again.flat)
    print(f"logged     {said[-1]['sha256']}")
    if made:
        print(f"warning: the log was made with other versions than {', '.join(made)}, which give other bits")
    print("the same bits" if same else f"OTHER BITS; losses differ by up to {again.loss_off:.3g}")
    return DONE if same else FAILED
