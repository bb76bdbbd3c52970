"""What the main thread of a process is at, for the watching thread to read; and where the time of its steps went."""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

T = TypeVar("T")

WINDOW = 10  # steps whose times are compared between ranks
WARM = 3  # steps without a limit: the first is compiled, connects its devices, and is seen two steps later
OWN = ("data", "host", "record")  # phases in which a process waits for no other
# Of a step; what else there is (evaluation, saving) is no step's time. dispatch: jax 0.10 waits in it on CPUs.
PHASES = (*OWN, "dispatch", "wait", "agree")
# What takes as long as model, data and disks make it. settle: waiting for the save before.
LONG = ("evaluation", "check", "settle", "save")
# In limits: how long a phase may last. What is not here (start, compile, restore, "first save" ...) may last for ever.
LIMITS = {**dict.fromkeys(PHASES, 1.0), **dict.fromkeys(LONG, 10.0)}


class Crumb(NamedTuple):
    """order: how many phases were entered before; every rank enters the same ones, so it is the rank's progress.
    step: the last one begun, from 1. since: by `time.monotonic`. longest: seconds that this phase has taken before, if
    it is one of `LONG`, else 0."""

    order: int
    step: int
    phase: str
    since: float
    longest: float = 0.0


class Pace(NamedTuple):
    """Where the time of the last `WINDOW` steps went. step: the last of them. seconds: by phase of `PHASES`."""

    step: int
    seconds: dict[str, float]


class Breadcrumbs:
    """Written by the main thread, read by another one. paced: gets a `Pace` every `WINDOW` steps."""

    def __init__(self, paced: Callable[[Pace], None] | None = None) -> None:
        self.last = Crumb(0, 0, "start", time.monotonic())
        self._paced = paced
        self._spent, self._longest = dict.fromkeys(PHASES, 0.0), dict[str, float]()
        self._steps, self._durations, self._begun, self._warm = 0, deque[float](maxlen=50), 0.0, 0

    def enter(self, phase: str, step: int | None = None) -> None:
        """From now on it is at `phase`, of the same step or of `step`. The first of each of `LONG` is "first ..."."""
        order, before, past, since, _ = self.last
        now = time.monotonic()
        if past in self._spent:
            self._spent[past] += now - since
        if (kind := past.removeprefix("first ")) in LONG:
            self._longest[kind] = max(self._longest.get(kind, 0.0), now - since)
        name = f"first {phase}" if phase in LONG and phase not in self._longest else phase
        self.last = Crumb(order + 1, before if step is None else step, name, now, self._longest.get(phase, 0.0))

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """An exception inside makes it phase failing, and no progress, until it is told to the other ranks. That waits
        for what is closed first, a save under way, say, which needs them: told, they end."""
        try:
            yield
        except BaseException:
            self.last = self.last._replace(phase="failing", since=time.monotonic())
            raise

    def at_step(self, phase: str) -> None:
        """Enter a phase of a step, called compile while it may be that."""
        self.enter(phase if self._warm >= WARM else "compile")

    def steps(self, batches: Iterable[T], first: int) -> Iterator[T]:
        """The same, as steps from first + 1 on. Waiting for a batch is phase data, what follows host. The first batch
        is a phase of its own: a source may have to be read up to its place."""
        rest, step, self._warm = iter(batches), first, 0
        while True:
            step += 1
            self.enter("data" if self._warm else "first batch", step)
            try:
                batch = next(rest)
            except StopIteration:
                return
            self.enter("host")
            yield batch
            self.enter("host")
            self._finished(step)

    def _finished(self, step: int) -> None:
        """Account for a step. Those that may have compiled count for nothing."""
        self._warm += 1
        total = sum(self._spent.values())
        if self._warm > WARM:
            self._durations.append(total - self._begun)
            self._steps += 1
        if self._warm <= WARM or self._steps == WINDOW:
            if self._steps == WINDOW and self._paced is not None:
                self._paced(Pace(step, self._spent))
            self._steps, self._spent, total = 0, dict.fromkeys(PHASES, 0.0), 0.0
        self._begun = total

    @property
    def median_step(self) -> float:
        """Seconds of a step, the middle one of the last 50; 0 before there are any."""
        durations = list(self._durations)
        return statistics.median(durations) if durations else 0.0
