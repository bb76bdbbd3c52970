"""The run directory of an elastic run: begun, or taken up again where an earlier program has left it."""

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config.json_reader import parse_json
from jaxdist.elastic.log import read_log
from jaxdist.elastic.outer import Outer
from jaxdist.errors import UserError
from jaxdist.files.regular import read_regular, replace_file
from jaxdist.runtime.run_folder import ELASTIC_LOG

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


def staleness_in(events: Sequence[dict[str, Any]]) -> Counter[int]:
    """How many pushes of a log had which staleness, with what was undone."""
    return Counter(push["staleness"] for event in events if event["event"] == "commit" for push in event["pushes"])


def log_so_far(path: Path) -> list[dict[str, Any]]:
    """The lines of the log that a run directory has; [] for a new run. Raises `UserError`."""
    return read_log(path, may_be_new=True) if path.exists() else []


def check_directory(settings: Settings, text: str, folder: Path, before: Sequence[dict[str, Any]]) -> None:
    """Raise `UserError` where a folder is that of another run, or of another program. text: the configuration as YAML.
    before: its log so far."""
    config = folder / CONFIG_NAME
    if not before:
        foreign = [name for name in _FOREIGN if (folder / name).exists()]
        foreign += [CONFIG_NAME] if config.exists() and read_regular(config) != text.encode() else []
        if foreign:
            raise UserError(
                f"--run-dir: {folder} has a {foreign[0]} of another run, and no {ELASTIC_LOG}; allowed: a new folder,"
                " or that of a run of jaxdist elastic"
            )
        return
    for key, value in first_line(settings).items():
        if key not in _MAY_CHANGE and before[0].get(key) != value:
            option = f"--outer-{key}" if key in ("lr", "momentum") else f"--{key}"
            what = f"{option}: {value}, but the run in {folder} was started with {before[0].get(key)}"
            raise UserError(f"{what}; leave it out, or give another --run-dir")
    if not config.exists():
        raise UserError(f"--run-dir: {folder} has a log without its {CONFIG_NAME}; put it back, or give another folder")
    if read_regular(config) != text.encode():
        _check_config(config, text, folder)


def _check_config(saved: Path, text: str, folder: Path) -> None:
    """Raise `UserError` for the first key that differs. A file that says the same in other words may stay."""
    from jaxdist.config.load import load_config, settings_by_key
    from jaxdist.observe import redact_settings
    from jaxdist.trainer.resume import changed_settings, show_changes

    with tempfile.TemporaryDirectory() as other:
        path = Path(other) / CONFIG_NAME
        path.write_text(text, encoding="utf-8")
        now = load_config(path)
    # Lists in place of tuples, as in a checkpoint's record.
    before = parse_json(json.dumps(settings_by_key(load_config(saved))), any_number=True)
    changed = {k: redact_settings(values, k) for k, values in changed_settings({"config": before}, now).items()}
    if not changed:
        return
    key = next(iter(changed))
    was, value = changed.pop(key)
    also = f"; besides, {show_changes(changed, 5)}" if changed else ""
    more = " (--rounds makes a run longer)" if key == "train.steps" else ""
    raise UserError(
        f"{key}: {json.dumps(value)} (was {json.dumps(was)} in {folder}){also}; put it back{more}, or use"
        " another --run-dir"
    )


def begin(text: str, folder: Path) -> None:
    """Write the configuration of a new run, and remove what one has left that was stopped before it began."""
    for part in (folder / SERVERS_NAME).glob("[0-9]*/*.part"):
        part.unlink()
    replace_file(folder / CONFIG_NAME, text.encode())
