"""The seconds of a run: how long steps take, and a full account of the time between two lines of metrics.jsonl."""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

_Batch = TypeVar("_Batch")
SPENT = ("device", "data", "eval", "save")  # what is measured; "host" is the rest
LEFT_OUT = ("eval", "save")  # of a step's time


def process_start() -> float:
    """When this process was started, by `time.monotonic`. Its resolution is that of Linux, 10 ms."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


class Clock:
    """The time between finished steps, without evaluations and saves; and where all of it went."""

    def __init__(self, per_step: int, unit: str = "tokens", *, started: float | None = None) -> None:
        """A step has `per_step` tokens, or samples, as `unit` says. started: of the session, by `time.monotonic`; None:
        now."""
        self._rate, self._per_step = f"{unit}_per_s", per_step
        began = time.perf_counter()
        self._wall = time.time() - began  # times of lines differ by exactly the seconds between them
        self._began = began - (0.0 if started is None else time.monotonic() - started)
        self._line: float | None = None  # when the last line was written; None: none of this session is there
        self._spent, self._of_step = dict.fromkeys(SPENT, 0.0), dict.fromkeys(SPENT, 0.0)
        self._lost = 0.0
        self.restart()

    def restart(self) -> None:
        """Do not count the time since the last step as that of a step."""
        self._finished, self._of_step = time.perf_counter(), dict.fromkeys(SPENT, 0.0)

    def add(self, name: str, seconds: float) -> None:
        """Count seconds as spent on one of `SPENT`."""
        self._spent[name] += seconds
        self._of_step[name] += seconds

    @contextmanager
    def spending(self, name: str) -> Iterator[None]:
        """A context whose seconds count as spent on one of `SPENT`."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - before)

    def awaited(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """The same batches; the time that the loop waits for each is counted."""
        rest = iter(batches)
        while True:
            with self.spending("data"):
                try:
                    batch = next(rest)
                except StopIteration:
                    return
            yield batch

    def finished(self) -> dict[str, float]:
        """The metrics of the step that has just finished:

        - step_s: seconds since the one before it, without evaluations and saves.
        - tokens_per_s or samples_per_s.
        - data_wait: the fraction of its time that the loop waited for the next batch.
        """
        now, spent = time.perf_counter(), self._of_step
        seconds = max(now - self._finished - sum(spent[name] for name in LEFT_OUT), 1e-9)
        self.restart()
        self._finished = now
        return {self._rate: self._per_step / seconds, "data_wait": spent["data"] / seconds, "step_s": seconds}

    def line(self) -> dict[str, float]:
        """The account of a line that is written now:

        - time: in Unix seconds.
        - time/start: seconds since the session was started, in its first line only.
        - time/device, time/data, time/host, time/eval, time/save: seconds since the line before, which they sum to.
        - time/lost: seconds of steps that a rollback dropped since that line, where there was one.
        """
        now, spent = time.perf_counter(), self._spent
        self._spent = dict.fromkeys(SPENT, 0.0)
        lost, self._lost = self._lost, 0.0
        before, self._line = self._line, now
        if before is None:
            return {"time": self._wall + now, "time/start": now - self._began}
        account = {**spent, "host": now - before - sum(spent.values())} | ({"lost": lost} if lost else {})
        return {"time": self._wall + now} | {f"time/{name}": seconds for name, seconds in account.items()}

    def rewind(self, kept: float | None) -> None:
        """Take back the lines after the one written at the Unix time `kept`; None: all of them."""
        if kept is None or kept - self._wall <= self._began:
            self._line, self._lost = None, 0.0
        elif self._line is not None:
            self._lost += self._line - (kept - self._wall)
