"""The account of a run's time: what each second went to, from the keys `time` and `time/...` of metrics.jsonl."""

import math
from typing import NamedTuple

from jaxdist.observe.report.record import MetricLines

# The purposes, as in metrics.jsonl, and what the page calls them. "stopped" and "rest" are what is left between lines.
PURPOSES = {
    "device": "computing",
    "data": "waiting for data",
    "host": "the host's own work",
    "eval": "evaluating",
    "save": "saving",
    "start": "starting",
    "lost": "steps of rollbacks",
    "stopped": "stopped",
    "rest": "not recorded",
}


class Span(NamedTuple):
    """The time from one line of metrics.jsonl to the next, or of a stop. Times are Unix seconds."""

    begin: float
    end: float
    seconds: dict[str, float]
    step: int


class Session(NamedTuple):
    """A process, from its start to its last line."""

    begin: float
    end: float
    first_step: int
    last_step: int


class Account(NamedTuple):
    """The time of a run, from the start of its first process to its last line."""

    spans: list[Span]
    sessions: list[Session]

    @property
    def begin(self) -> float:
        """When the first process started."""
        return self.spans[0].begin

    @property
    def total(self) -> float:
        """Seconds of the whole run, stops included."""
        return self.spans[-1].end - self.begin

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by purpose, in the order of `PURPOSES`. They add up to `total`."""
        sums = {name: math.fsum(span.seconds.get(name, 0.0) for span in self.spans) for name in PURPOSES}
        return {name: seconds for name, seconds in sums.items() if seconds > 0}

    def at(self, step: int) -> float:
        """About when a step was recorded."""
        times = [span.end for span in self.spans if span.step <= step]
        return times[-1] if times else self.begin


def account_of(metrics: MetricLines) -> Account | None:
    """The account of a run; None where its lines have no times, as those of older versions."""
    spans: list[Span] = []
    sessions: list[Session] = []
    for record in metrics:
        end = record.get("time")
        if end is None or not math.isfinite(end):
            continue
        seconds = {name: record.get(f"time/{name}") or 0.0 for name in PURPOSES}
        seconds = {name: value for name, value in seconds.items() if 0 < value < math.inf}
        before = spans[-1].end if spans else end - math.fsum(seconds.values())
        end = max(end, before)
        step = record["step"]
        if "time/start" in record:
            begin = max(before, end - math.fsum(seconds.values()))
            if begin > before:
                spans.append(Span(before, begin, {"stopped": begin - before}, step))
            sessions.append(Session(begin, end, step, step))
        else:
            begin = before
            if sessions:
                sessions[-1] = sessions[-1]._replace(end=end, last_step=step)
        # Lines that a rollback cut are missing, and clocks are set: what they leave has no purpose.
        scale = min(1.0, (end - begin) / math.fsum(seconds.values())) if seconds else 1.0
        seconds = {name: value * scale for name, value in seconds.items()}
        rest = (end - begin) - math.fsum(seconds.values())
        spans.append(Span(begin, end, seconds | ({"rest": rest} if rest > 1e-6 else {}), step))
    if not spans or not 0 < spans[-1].end - spans[0].begin < math.inf:
        return None
    return Account(spans, sessions)


def over_time(account: Account, columns: int = 120) -> list[dict[str, float]]:
    """The shares of the purposes in equal pieces of the run's time, one dict a piece."""
    width = account.total / columns
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in account.spans:
        length = span.end - span.begin
        first = min(columns - 1, int((span.begin - account.begin) / width))
        last = min(columns - 1, int((span.end - account.begin) / width))
        for column in range(first, last + 1):
            left = account.begin + column * width
            inside = min(span.end, left + width) - max(span.begin, left)
            if inside <= 0 or length <= 0:
                continue
            for name, seconds in span.seconds.items():
                shares[column][name] = shares[column].get(name, 0.0) + seconds / length * inside / width
    return shares
