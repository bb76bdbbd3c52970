"""The run directory of an elastic run: begun, or taken up again where an earlier program has left it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.elastic.log import read_log
from jaxdist.elastic.outer import Outer
from jaxdist.errors import UserError
from jaxdist.files.regular import read_regular, replace_file

CONFIG_NAME, SERVERS_NAME = "config.yaml", "servers"
_FOREIGN = ("metrics.jsonl", "checkpoints")  # of `jaxdist train`
_MAY_CHANGE = ("workers", "gpus", "rounds", "patience", "least")  # in a run that goes on


class Settings(NamedTuple):
    """What `jaxdist elastic` is told, beside the configuration.

    - workers, servers: how many.
    - bound, patience: see `rule.BoundedStaleness`.
    - period: steps of a round.
    - rounds: rounds of all workers together, after which the run ends.
    - outer: the servers' rule.
    - gpus: of a worker.
    - least: workers that are ready before anybody works.
    """

    workers: int
    servers: int
    bound: int
    patience: float
    period: int
    rounds: int
    outer: Outer
    gpus: int = 0
    least: int = 1


def first_line(settings: Settings) -> dict[str, Any]:
    """The first line of a log, without what only a worker knows: all on which the parameters depend, and more."""
    outer = settings.outer._asdict()
    return {"event": "start", **settings._asdict(), "outer": outer.pop("name"), **outer}


def pushes_in(events: Sequence[dict[str, Any]]) -> dict[int, int]:
    """The number of pushes in each version of a log, without what was undone."""
    counts: dict[int, int] = {}
    for event in events:
        if event["event"] == "commit":
            counts[event["version"]] = len(event["pushes"])
        elif event["event"] == "restored":
            counts = {version: count for version, count in counts.items() if version <= event["version"]}
    return counts


def begin_or_resume(settings: Settings, text: str, folder: Path, log: Path) -> list[dict[str, Any]]:
    """The lines of the log so far; [] for a new run, whose configuration is written. text: the configuration as YAML.

    Raises `UserError` where the folder is that of another run, or of another program, and changes nothing then.
    """
    config = folder / CONFIG_NAME
    before = read_log(log, may_be_new=True) if log.exists() else []
    if not before:
        foreign = [name for name in _FOREIGN if (folder / name).exists()]
        foreign += [CONFIG_NAME] if config.exists() and read_regular(config) != text.encode() else []
        if foreign:
            raise UserError(
                f"--run-dir: {folder} has a {foreign[0]} of another run, and no {log.name}; allowed: a new folder, or"
                " that of a run of jaxdist elastic"
            )
        for part in (folder / SERVERS_NAME).glob("[0-9]*/*.part"):  # of a run that was stopped before it began
            part.unlink()
        replace_file(config, text.encode())
        return before
    for key, value in first_line(settings).items():
        if key not in _MAY_CHANGE and before[0].get(key) != value:
            option = f"--outer-{key}" if key in ("lr", "momentum") else f"--{key}"
            what = f"{option}: {value}, but the run in {folder} was started with {before[0].get(key)}"
            raise UserError(f"{what}; set it back, or give another --run-dir")
    if not config.exists():
        raise UserError(f"--run-dir: {folder} has a log without its {CONFIG_NAME}; put it back, or give another folder")
    if read_regular(config) != text.encode():
        raise UserError(f"config: other settings than those of {folder}; use these, or give another --run-dir")
    return before
