"""The trace of a few steps (`observe.profile`), and its longest items."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxdist.errors import UserError
from jaxdist.observe.console import error_text
from jaxdist.trainer.measures.clock import Clock
from jaxdist.trainer.run import TrainingRun

TRACES = "profile"
_HINT = "set observe.profile.start, such as observe.profile.start=10"


class Item(NamedTuple):
    """An operation on a line of a trace: a stream of a device, or the threads of a name of the host.

    - seconds: its own time, without that of operations inside it.
    - share: of the own times of all operations on the line.
    """

    line: str
    name: str
    calls: int
    seconds: float
    share: float


class Profile:
    """The trace of the steps that `observe.profile` asks for, on process 0. A session that begins after `start` makes
    none. What fails, such as a full disk, is said and does not end the run."""

    def __init__(self, run: TrainingRun, clock: Clock) -> None:
        wanted = run.plan.config.observe.profile
        self._run, self._clock, self._tracing = run, clock, False
        self._first, self._last = wanted.start, (wanted.start or 0) + wanted.steps - 1
        self._begun = False  # on every process: all enter the same phases

    def before(self, step: int) -> None:
        """Begin, if this is the first step of the trace."""
        if step != self._first:
            return
        self._begun = True
        self._run.watch.crumbs.enter("profile")  # a phase without a limit: a trace may be large
        if jax.process_index() == 0:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of Python would be most of the file
            with self._apart():
                jax.profiler.start_trace(self._run.outputs.folder / TRACES, profiler_options=options)
                self._tracing = True

    def after(self, step: int) -> None:
        """End, if this was the last step of the trace, and print its longest items."""
        if not self._begun or step != self._last:
            return
        self._run.watch.crumbs.enter("profile")
        if self.close():
            with self._apart():
                self._run.outputs.console.line("\n".join(item_table(longest(trace_of(self._run.outputs.folder)))))

    def close(self) -> bool:
        """Write the trace, if one was begun. Returns whether there is a new one."""
        begun, self._tracing = self._tracing, False
        if begun:
            begun = False
            with self._apart():
                jax.profiler.stop_trace()
                begun = True
        return begun

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """A context that waits for the devices first. Its seconds are those of a save, and so in no step's time."""
        with self._clock.spending("device"), suppress(RuntimeError):  # of a step that failed, which is told elsewhere
            jax.block_until_ready(self._run.progress.state)
        with self._clock.spending("save"):
            try:
                yield
            except Exception as error:  # of the profiler, the disk: not the run's failure
                what = f"observe.profile: {error_text(error)}; the run goes on"
                self._run.outputs.warn({"what": what, "action": "went on"})


def trace_of(run_dir: Path) -> Path:
    """The newest trace in a run directory. Raises `UserError` without one."""
    found = sorted((run_dir / TRACES).glob("plugins/profile/*/*.xplane.pb"))
    if not found:
        raise UserError(f"{run_dir}: holds no trace of steps; {_HINT}")
    return found[-1]


def longest(path: Path, count: int = 10) -> list[Item]:
    """The operations of a trace that took the most time of their own, the longest first."""
    calls: dict[tuple[str, str], int] = defaultdict(int)
    own: dict[tuple[str, str], float] = defaultdict(float)
    whole: dict[str, float] = defaultdict(float)
    try:
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
    except Exception as error:  # of a C++ library: a RuntimeError, or one of its own
        raise UserError(f"{path}: is no trace that can be read; take another one ({_HINT})") from error
    for plane in planes:
        if not plane.name.startswith(("/device:", "/host:CPU")):
            continue
        for line in plane.lines:
            name = f"{plane.name.strip('/')} {line.name.rpartition('/')[0] or line.name}"
            for event, seconds in own_times(line.events):
                calls[name, event] += 1
                own[name, event] += seconds
                whole[name] += seconds
    items = [Item(*key, calls[key], seconds, seconds / whole[key[0]]) for key, seconds in own.items() if seconds]
    return sorted(items, key=lambda item: -item.seconds)[:count]


def own_times(events: Iterable[Any]) -> list[tuple[str, float]]:
    """(name, seconds without those of events inside it) of each event of one line."""
    spans = sorted((each.start_ns, -each.duration_ns, each.name) for each in events)
    own, around = [-negative for _, negative, _ in spans], list[int]()
    for i, (start, negative, _) in enumerate(spans):
        while around and spans[around[-1]][0] - spans[around[-1]][1] <= start:
            around.pop()
        if around:
            own[around[-1]] += negative
        around.append(i)
    return [(name, max(0.0, each) / 1e9) for (_, _, name), each in zip(spans, own, strict=True)]


def item_table(items: list[Item]) -> list[str]:
    """Items as lines of a table, with a headline."""
    rows = [f"{'own time':>11}  {'share':>6}  {'calls':>6}  item"]
    for each in items:
        rows.append(f"{each.seconds * 1e3:8.3f} ms  {each.share:6.1%}  {each.calls:6}  {each.name[:60]}  [{each.line}]")
    return [f"the {len(items)} longest items of the trace, each with its share of its line:", *rows]
