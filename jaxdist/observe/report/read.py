"""Reading a run directory for its report: also while the run writes, and after it was killed."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from jaxdist.config.json_reader import parse_json, read_json_file
from jaxdist.config.reader import parse_yaml
from jaxdist.errors import UserError
from jaxdist.files.regular import read_regular
from jaxdist.observe.metrics import good_records
from jaxdist.observe.report.record import RunRecord, mapping

PLAN_FILE = "plan.json"
_MOST_BYTES = 1 << 20  # of samples.txt that are shown


def read_run(folder: Path) -> RunRecord:
    """The record of a run directory, without prediction. Raises `UserError` where it is none.

    A file that is missing or damaged leaves its part empty, with a sentence in `notes`.

    >>> import tempfile
    >>> from jaxdist.observe.report import read_run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}')
    ...     read_run(Path(folder)).last_step
    1
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(f"RUN: {str(folder)!r} holds no metrics.jsonl; give the directory of a run, such as runs/NAME")
    notes: list[str] = []
    records, problem = good_records(metrics)
    if problem:
        notes.append(f"metrics.jsonl is damaged, {problem}; its other lines are shown.")
    checkpoints = folder / "checkpoints"
    kept = [int(each.name) for each in checkpoints.iterdir() if each.name.isdecimal()] if checkpoints.is_dir() else []
    samples, without = folder / "samples.txt", "There is no env.json: devices, mesh and data are not known."
    return RunRecord(
        title=folder.resolve().name,
        settings=_mapping_in(folder / "config.yaml", _yaml, notes),
        environment=_mapping_in(folder / "env.json", read_json_file, notes, without),
        metrics=records,
        incidents=_incidents(folder / "incidents.jsonl", notes),
        checkpoints=sorted(kept),
        plan=_mapping_in(folder / PLAN_FILE, read_json_file, notes),
        samples=read_regular(samples)[:_MOST_BYTES].decode(errors="replace") if samples.is_file() else "",
        notes=notes,
    )


def _yaml(path: Path) -> Any:
    return parse_yaml(read_regular(path).decode(), path.name)


def _mapping_in(path: Path, read: Callable[[Path], Any], notes: list[str], without: str = "") -> dict[str, Any]:
    """The mapping in a file of the run; {} where none can be read. without: the note about no file."""
    if not path.is_file():
        notes += filter(None, [without])
        return {}
    try:
        return mapping(read(path))
    except ValueError as error:
        notes.append(f"{path.name} cannot be read: {error}.")
        return {}


def _incidents(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    lines = read_regular(path).splitlines() if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(mapping(parse_json(line, any_number=True)))
        except ValueError as error:
            notes.append(f"incidents.jsonl, line {number}, cannot be read: {error}.")
    return found


def defaults_of(section: Any) -> dict[str, Any]:
    """The defaults of the keys of a configuration, or of one of its sections."""
    found: dict[str, Any] = {}
    for each in fields(section):
        value = getattr(section, each.name)
        if is_dataclass(value):
            found[each.name] = defaults_of(value)
        elif each.default is not MISSING:
            found[each.name] = each.default
        elif each.default_factory is not MISSING:
            found[each.name] = each.default_factory()
    return found
