"""The console of a run: a live bar on a terminal, plain lines in a log file."""

import datetime
import math
import os
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

_RECENT = 50  # step times the estimate of the remaining time looks at
_REFRESH_S = 0.1  # the live bar takes new numbers at most this often
_UNKNOWN = "-:--:--"
_RATES = ("tokens_per_s", "samples_per_s", "mfu")  # shown as means of the steps since the last that was shown
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with control characters (but newline and tab) replaced: samples of a model may hold terminal escapes."""
    return _CONTROL.sub("\ufffd", text)


def error_text(error: Exception) -> str:
    """The type and the beginning of the text of an error, in one line: for what is said and does not end a run."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds as `1:02:03`; days in front when there are any."""
    if not math.isfinite(seconds):
        return _UNKNOWN
    text = str(datetime.timedelta(seconds=max(0, round(seconds))))  # such as "1 day, 1:02:03"
    return re.sub(r" days?,", "d", text)


def _number(value: float) -> str:
    return f"{value:.4f}" if not math.isfinite(value) or 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.4g}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.3g}"


class Console:
    """The progress of a run on a text stream.

    mode: "rich" draws a live bar; "plain" writes a line for the first step, the last and every `log_every` steps;
        "auto" is rich on a terminal that can move its cursor, and plain elsewhere
    enabled: False writes nothing, as on all processes but the first
    stream: standard output unless given
    clock: returns seconds; tests have their own
    """

    def __init__(
        self,
        total_steps: int,
        *,
        mode: str = "auto",
        log_every: int = 10,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if mode not in ("auto", "plain", "rich"):
            raise ValueError(f"mode is {mode!r}; allowed: auto, plain, rich")
        if log_every < 1:
            raise ValueError(f"log_every is {log_every}; it must be at least 1")
        self._total, self._log_every, self._enabled, self._clock = total_steps, log_every, enabled, clock
        self._stream = sys.stdout if stream is None else stream
        terminal = self._stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        self._rich = enabled and (mode == "rich" or (mode == "auto" and terminal))
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._last: tuple[int, float] | None = None  # step and time of the last call of step()
        self._drawn = -math.inf
        self._unshown: dict[str, list[float]] = {}  # what a step took, to a factor: 1 / each rate of a step
        if self._rich:
            self._bar = _progress_bar(self._stream)
            self._task = self._bar.add_task("", total=total_steps, fields="", eta=_UNKNOWN)

    def line(self, text: str) -> None:
        """Write one line (or several), above the bar if there is one."""
        if not self._enabled:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        text = printable(text).encode(encoding, "backslashreplace").decode(encoding)
        if self._rich:
            self._bar.console.print(text, markup=False, emoji=False)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def header(self, rows: Mapping[str, str]) -> None:
        """Write what runs (model, mesh, devices, data ...): a name and a value a line, values aligned."""
        width = max(map(len, rows), default=0)
        for name, value in rows.items():
            self.line(f"{name:<{width}}  " + str(value).replace("\n", "\n" + " " * (width + 2)))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step, from 1 to the total: loss, grad_norm, and tokens_per_s or samples_per_s, which is the
        mean of all steps since the last one that was shown."""
        if not self._enabled:
            return
        for name in _RATES:
            if name in metrics:
                self._unshown.setdefault(name, []).append(1 / metrics[name] if metrics[name] else math.inf)
        now = self._clock()
        first = self._last is None
        if self._last is not None and step > self._last[0]:
            self._durations.append((now - self._last[1]) / (step - self._last[0]))
        self._last = (step, now)
        if self._rich:
            if now - self._drawn >= _REFRESH_S or step >= self._total:
                self._drawn = now
                fields = "  ".join(self._fields(self._with_means(metrics)))
                self._bar.update(self._task, completed=step, fields=fields, eta=self._eta(step))
                self._bar.start()  # at the first step: what is written before has no bar under it
        elif first or step % self._log_every == 0 or step == self._total:
            place = f"step  {step:>{len(str(self._total))}}/{self._total}"
            self.line("  ".join([place, *self._fields(self._with_means(metrics)), f"eta {self._eta(step)}"]))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line for an evaluation after `step`: every metric, without the prefix `eval/`."""
        fields = [f"{key.removeprefix('eval/')} {_number(value)}" for key, value in metrics.items()]
        self.line("  ".join([f"eval  {step:>{len(str(self._total))}}/{self._total}", *fields]))

    def close(self) -> None:
        """Take the bar's last state to the screen and give the terminal back; closing twice does nothing."""
        if self._rich:
            self._bar.stop()
            self._rich = False  # a line after close is a plain one

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _with_means(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics of a step with the mean rates since the last call: work by time, as all steps do the same."""
        sums = {name: (len(each), math.fsum(each)) for name, each in self._unshown.items()}
        self._unshown = {}
        return {**metrics, **{name: count / total if total else math.inf for name, (count, total) in sums.items()}}

    def _fields(self, metrics: Mapping[str, float]) -> list[str]:
        shown: dict[str, tuple[str, Callable[[float], str]]] = {
            "loss": ("loss", _number),
            "grad_norm": ("grad", lambda norm: f"{norm:.3g}"),
            "tokens_per_s": ("tokens/s", _rate),
            "samples_per_s": ("samples/s", _rate),
            "mfu": ("MFU", lambda share: f"{share:.1%}"),
        }
        return [f"{name} {text(metrics[key])}" for key, (name, text) in shown.items() if key in metrics]

    def _eta(self, step: int) -> str:
        """The remaining time, by the median of recent steps: compilation and evaluations are not in every step."""
        left = max(0, self._total - step)
        if left and not self._durations:
            return _UNKNOWN
        return format_duration(left * statistics.median(self._durations) if left else 0)


def _progress_bar(stream: TextIO) -> "Progress":
    """The live bar: steps, the fields of a step, the remaining time. It is drawn once it is started."""
    from rich.console import Console as RichConsole  # slow to import, and only needed on terminals
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    return Progress(
        TextColumn("step", style="bold"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=8)),
        TextColumn("{task.fields[fields]}", markup=False, table_column=Column(no_wrap=True)),
        TextColumn("eta {task.fields[eta]}", markup=False, style="cyan", table_column=Column(no_wrap=True)),
        console=RichConsole(file=stream, force_terminal=True, highlight=False, soft_wrap=True),
        expand=True,
        refresh_per_second=8,
    )
