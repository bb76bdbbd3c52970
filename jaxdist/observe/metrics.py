"""The record of a run: metrics.jsonl, one JSON object a line, readable while the run writes it.

A line is `{"step": 10, "loss": 3.2, "grad_norm": 1.2, "tokens_per_s": 12345.6}`; evaluations carry `"eval/loss"`. Data
that are samples, not tokens, have "samples_per_s". Floats are written in the shortest form that reads back as the same
float64. JSON has no NaN and no infinity: `{"loss": null, "loss/nonfinite": "nan"}` ("nan", "inf" or "-inf") keeps every
line valid, and `read_metrics` puts the float back. Some lines have arrays, `"arrays": {"experts/load": [[1.1, 0.9]]}`:
nested lists of numbers of 4 digits, where null is one that is not finite.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

import numpy as np

from jaxdist.config.json_reader import log_record
from jaxdist.errors import UserError
from jaxdist.files.regular import name_aside, open_regular, open_to_append, read_regular, replace_file

ARRAYS = "arrays"
_MARK = "/nonfinite"
_NONFINITE = "nan", "inf", "-inf"  # the values of such keys


MetricValue = SupportsFloat | np.ndarray | list[str]  # of a metric


def _encode(step: int, metrics: Mapping[str, MetricValue]) -> bytes:
    record: dict[str, Any] = {"step": int(step)}
    arrays: dict[str, Any] = {}
    for key, value in metrics.items():
        if key in ("step", ARRAYS) or key.endswith(_MARK):
            raise ValueError(f"metric {key!r}: the name is taken by the file format; choose another")
        if isinstance(value, list):
            record[key] = value
        elif isinstance(value, np.ndarray) and value.ndim:
            arrays[key] = _nested(value)
        elif isinstance(value, Integral):
            record[key] = int(value)
        elif math.isfinite(number := float(value)):
            record[key] = number
        else:
            record |= {key: None, key + _MARK: str(number)}
    record |= {ARRAYS: arrays} if arrays else {}
    return (json.dumps(record, allow_nan=False) + "\n").encode()


def _nested(values: Any) -> Any:
    """An array as nested lists."""
    if values.ndim:
        return [_nested(each) for each in values]
    number = float(f"{float(values):.4g}")
    return number if math.isfinite(number) else None


def _decode(line: bytes) -> dict[str, Any]:
    """One line as a record. ValueError when it is not a JSON object with a whole number "step"."""
    record = log_record(line, mark=_MARK, lists="samples", arrays=ARRAYS)
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not -(2**63) <= step < 2**63:
        raise ValueError('"step" is missing or not a whole number of 64 bits')
    for mark in [key for key in record if key.endswith(_MARK)]:
        if (text := record.pop(mark)) not in _NONFINITE:
            raise ValueError(f"{mark[:80]!r} is {text[:40]!r}; allowed: {', '.join(_NONFINITE)}")
        record[mark.removesuffix(_MARK)] = float(text)
    if ARRAYS in record:
        record[ARRAYS] = {key: np.array(value, np.float64).tolist() for key, value in record[ARRAYS].items()}
    return record


class _Parsed(NamedTuple):
    """The content of a metrics.jsonl. A line is written in one piece with its newline last, so only a line without
    newline can be torn.

    - lines: the good ones, with their records.
    - torn: whether a torn last line was left out.
    - problem: what is wrong with the first of the other lines, "" without any.
    """

    lines: list[tuple[bytes, dict[str, Any]]]
    torn: bool
    problem: str


def _parse(content: bytes) -> _Parsed:
    lines = content.splitlines(keepends=True)
    good, torn, problem = [], False, ""
    for number, line in enumerate(lines, start=1):
        try:
            good.append((line, _decode(line)))
        except ValueError as error:
            if number == len(lines) and not line.endswith(b"\n"):
                torn = True
            else:
                problem = problem or f"line {number}: not a line of metrics ({error})"
    return _Parsed(good, torn, problem)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All records of a metrics.jsonl, in the order of the file; NaN and infinities are floats again. "arrays" is
    {name: nested lists}, where what was not finite is NaN.

    A last line torn by a killed writer is left out; any other bad line is a UserError naming its number.
    FileNotFoundError when there is no such file.
    """
    found = _parse(read_regular(path))
    if found.problem:
        raise UserError(f"{path}, {found.problem}; mend or remove it")
    return [record for _, record in found.lines]


def good_records(path: str | Path) -> tuple[list[dict[str, Any]], str]:
    """(the records of the good lines, what is wrong with the first of the others; "" without any)."""
    found = _parse(read_regular(path))
    return [record for _, record in found.lines], found.problem


class MetricsWriter:
    """The writer of metrics.jsonl, on process 0.

    A line reaches the operating system before `write` returns. If it cannot be written, as on a full disk, `write`
    raises OSError, and the line is written before the next one. A file with bad lines is kept under another name (see
    `name_aside`), and the good ones go on.

    resume_step: the step after which the run goes on. The lines of later steps and a torn last line are dropped in one
        atomic replacement; all others stay byte for byte. None: a new run; a file that is there becomes `<name>.old`
    say: is called with one line about a file that was damaged
    """

    def __init__(self, path: str | Path, *, resume_step: int | None, say: Callable[[str], None] = print) -> None:
        self.path, self._say = Path(path), say
        if resume_step is not None:
            self._truncate(resume_step)
        elif self.path.exists() and self.path.stat().st_size > 0:
            self.path.replace(self.path.with_name(self.path.name + ".old"))
        self._unwritten = b""
        self._open()

    def _open(self) -> None:
        self._file = os.fdopen(open_to_append(self.path), "ab", buffering=0)

    def _truncate(self, step: int) -> None:
        content = read_regular(self.path) if self.path.exists() else b""
        found = _parse(content)
        kept = [line for line, record in found.lines if record["step"] <= step]
        if found.problem:
            aside = name_aside(self.path)
            replace_file(aside, content)
            self._say(f"{self.path.name} is damaged, {found.problem}; moved to {aside.name}, its good lines are kept")
        unfinished = bool(kept) and not kept[-1].endswith(b"\n")  # whole, but killed before its newline
        if unfinished:
            kept[-1] += b"\n"
        whole = b"".join(kept)
        if whole == content:
            return
        if content.startswith(whole):  # needs no room, and is atomic, too
            with os.fdopen(open_regular(self.path, os.O_WRONLY), "wb") as file:
                if os.fstat(file.fileno()).st_nlink == 1:
                    file.truncate(len(whole))
                    return
        replace_file(self.path, whole)

    def rewind(self, step: int) -> None:
        """Drop the lines of all steps after this one, to go on from it."""
        with contextlib.suppress(OSError):  # what cannot be written is looked at below
            self.close()
        kept = b""
        for line in self._unwritten.splitlines(keepends=True):
            with contextlib.suppress(ValueError):  # the end of a line that was begun
                kept += line if json.loads(line)["step"] <= step else b""
        self._truncate(step)
        self._unwritten = kept
        self._open()

    def write(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """One line. Values are numbers (Python, NumPy, or anything with `__float__`); integers stay integers. A value
        may also be an array of NumPy's or a list of texts."""
        self._unwritten += _encode(step, metrics)
        self._flush()

    def _flush(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        """Flush to the disk itself and close; closing twice does nothing. OSError, and closed, where that fails."""
        if not self._file.closed:
            with self._file:
                self._flush()
                os.fsync(self._file.fileno())

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Curve(NamedTuple):
    """One metric over the run: whole-number steps and float64 values, NaN and infinities included."""

    steps: np.ndarray
    values: np.ndarray


def curve(metrics: Sequence[Mapping[str, Any]], key: str, factor: float = 1.0) -> Curve:
    """The records that carry `key`, values times `factor`."""
    found = [record for record in metrics if record.get(key) is not None]
    steps = np.array([record["step"] for record in found], np.int64)
    return Curve(steps, np.array([record[key] for record in found], np.float64) * factor)


def work_unit(metrics: Iterable[Mapping[str, Any]]) -> str:
    """The unit of work in the records: "samples" if they have "samples_per_s", else "tokens"."""
    return "samples" if any("samples_per_s" in record for record in metrics) else "tokens"


def smooth(values: np.ndarray) -> np.ndarray:
    """The mean over about 5 % of the run around each value; values that are not finite are passed over.

    The window is centred, so that the curve does not lag; it narrows at the steep start and is one-sided at the end.
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    half = np.minimum(max(1, round(0.025 * len(values))), index)
    start, stop = index - half, np.minimum(index + half + 1, len(values))
    count = counts[stop] - counts[start]
    mean = (sums[stop] - sums[start]) / np.maximum(count, 1)
    return np.where(finite, mean, np.nan)
