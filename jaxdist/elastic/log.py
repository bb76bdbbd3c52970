"""The log of an elastic run: a JSON object a line, in the order in which things happened. `read_log` trusts no line."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxdist.config.json_reader import parse_json
from jaxdist.elastic.rule import Event
from jaxdist.errors import RunStopped, UserError
from jaxdist.files.regular import open_to_append, read_regular, replace_file
from jaxdist.runtime.run_folder import ELASTIC_LOG

LOG_BYTES, WORKERS = 1 << 30, 100_000
# The keys of each kind of line, and their types. A line may have others, which nobody reads.
EVENTS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "start": {
        "period": int,
        "bound": int,
        "servers": int,
        "outer": str,
        "lr": (int, float),
        "momentum": (int, float),
        "numbers": int,
        "dtype": str,
    },
    "join": {"worker": str, "version": int},
    "pull": {"worker": str, "version": int},
    "lost": {"worker": str, "version": int, "reason": str},
    "refused": {"worker": str, "clock": int, "reason": str},
    "commit": {"version": int, "pushes": list},
    "restored": {"version": int},
    "end": {"version": int, "sha256": str},
}
PUSH = {"worker": str, "clock": int, "base": int, "staleness": int}


class Log:
    """Appends lines to a file, each with the seconds since it was opened. Every line is there when `__call__` returns.

    Args:
        path: The file; lines of an earlier run of the same folder stay.
        clock: Gives seconds.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        data = read_regular(path) if path.exists() else b""
        if data and not data.endswith(b"\n"):  # cut off, by a kill or a full disk; the next line would join it
            replace_file(path, data[: data.rfind(b"\n") + 1])
        self._path = path
        self._file = os.fdopen(open_to_append(path), "a", encoding="utf-8")
        self._clock, self._start = clock, clock()

    def __call__(self, event: Event) -> None:
        line = json.dumps({"t": round(self._clock() - self._start, 3), **event}, allow_nan=False) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
            if event["event"] == "commit":  # before the servers save what it names
                os.fsync(self._file.fileno())
        except OSError as error:
            raise RunStopped(f"elastic: {self._path}: {error.strerror}") from error

    def __enter__(self) -> "Log":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def worker_index(name: str) -> int:
    """The number of a worker, which its data depends on: 3 of "w3". Raises `ValueError` for any other name."""
    if not (name[:1] == "w" and name[1:].isascii() and name[1:].isdigit() and len(name) < 9) or int(name[1:]) > WORKERS:
        raise ValueError(f"{name[:40]!r} is no worker; allowed: w0 to w{WORKERS}")
    return int(name[1:])


def progress_line(commit: Event, done: int, rounds: int) -> str:
    """What the console is told of a commit. done: the rounds that are done after it."""
    losses = [push["loss"] for push in commit["pushes"] if push["loss"] is not None]
    loss = f"{sum(losses) / len(losses):.4f}" if losses else "not finite"
    staleness = max(push["staleness"] for push in commit["pushes"])
    return f"round      {done}/{rounds}, loss {loss}, staleness {staleness}"


def read_log(path: Path, *, may_be_new: bool = False) -> list[Event]:
    """The lines of a log. The last one may be cut off: a killed run leaves that. Raises `UserError` for anything else
    that no run writes.

    may_be_new: whether the run may have been stopped before its first line was whole, which gives [].
    """
    try:
        if path.stat().st_size > LOG_BYTES:
            raise UserError(f"{path}: larger than {LOG_BYTES} bytes; a log of jaxdist elastic is not")
        *lines, _ = read_regular(path).split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the {ELASTIC_LOG} of a run of jaxdist elastic") from error
    if may_be_new and not lines:
        return []
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            events.append(_checked(parse_json(line)))
        except ValueError as error:
            raise UserError(
                f"{path}:{number}: {error}; give the {ELASTIC_LOG} of a run of jaxdist elastic, unchanged"
            ) from error
    if not events or events[0]["event"] != "start":
        raise UserError(
            f"{path}: does not begin with an event start; give the {ELASTIC_LOG} of a run of jaxdist elastic"
        )
    return events


def _checked(event: Any) -> Event:
    """The event, if it has what its kind has. Raises `ValueError`."""
    if not isinstance(event, dict) or event.get("event") not in EVENTS:
        raise ValueError(f"no event; allowed: {', '.join(EVENTS)}")
    _check_keys(event, EVENTS[event["event"]])
    if "worker" in event:
        worker_index(event["worker"])
    if event["event"] == "commit" and not event["pushes"]:
        raise ValueError("a commit without pushes")
    for push in event.get("pushes", []):
        if not isinstance(push, dict):
            raise ValueError("a push that is no object")
        _check_keys(push, PUSH)
        worker_index(push["worker"])
    return event


def _check_keys(found: Event, kinds: dict[str, Any]) -> None:
    for key, kind in kinds.items():
        value = found.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{key} is {str(value)[:40]!r}")
        if isinstance(value, int) and not 0 <= value < 1 << 62 and key not in ("lr", "momentum"):
            raise ValueError(f"{key} is {value}")
