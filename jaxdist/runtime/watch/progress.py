"""The progress of a process: the phase of its main thread, for the watching thread to read, and the time of each
phase."""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

StepBatch = TypeVar("StepBatch")

WINDOW = 10  # steps whose times are compared between ranks
WARM = 3  # steps without a limit: the first is compiled and connects its devices, which is seen two steps later
OWN_WORK = ("data", "host", "record")  # phases in which a process waits for no other
# The phases of a step. Evaluation and saving are no step's time. jax 0.10 waits for the devices in dispatch on CPUs.
PHASES = (*OWN_WORK, "dispatch", "wait", "agree")
# Phases that last as long as model, data and disks make them. settle: waiting for the save before.
LONG = ("evaluation", "check", "settle", "save")
FAILURE = "clean-up after a failure"  # the phase of an exception
SAVING = ("settle", "save", FAILURE)  # phases that may wait for a save
# How long a phase may last, in units of the limit. Others (start, compile, restore, "first save" ...) have no limit.
LIMITS = {**dict.fromkeys(PHASES, 1.0), **dict.fromkeys(LONG, 10.0)}


class Crumb(NamedTuple):
    """The phase of a main thread."""

    order: int  # how many phases were entered before: the rank's progress, for every rank enters the same ones
    step: int  # the last step begun, from 1
    phase: str
    since: float  # when the phase was entered, by `time.monotonic`
    longest: float = 0.0  # seconds that a phase of `LONG` has taken before, else 0


class SavePhase(NamedTuple):
    """The phase of a save, which runs beside the steps, in threads of its own."""

    order: int  # the save's progress; every rank makes the same saves
    phase: str
    since: float  # when the phase was entered, by `time.monotonic`


class Pace(NamedTuple):
    """The time of the last `WINDOW` steps. step: the last of them. seconds: by phase of `PHASES`."""

    step: int
    seconds: dict[str, float]


class Breadcrumbs:
    """A record of phases: the main thread writes it, the watching thread reads it. paced: receives a `Pace` every
    `WINDOW` steps."""

    def __init__(self, paced: Callable[[Pace], None] | None = None) -> None:
        self.last = Crumb(0, 0, "start", time.monotonic())
        self.saving = SavePhase(0, "", self.last.since)
        self._paced = paced
        self._spent, self._longest = dict.fromkeys(PHASES, 0.0), dict[str, float]()
        self._steps, self._durations, self._begun, self._warm = 0, deque[float](maxlen=50), 0.0, 0

    def enter(self, phase: str, step: int | None = None) -> None:
        """Enter a phase, of the same step or of `step`. The first of each of `LONG` is called "first ..."."""
        order, before, past, since, _ = self.last
        now = time.monotonic()
        if past in self._spent:
            self._spent[past] += now - since
        if (kind := past.removeprefix("first ")) in LONG:
            self._longest[kind] = max(self._longest.get(kind, 0.0), now - since)
        name = f"first {phase}" if phase in LONG and phase not in self._longest else phase
        self.last = Crumb(order + 1, before if step is None else step, name, now, self._longest.get(phase, 0.0))

    def save_enters(self, order: int, phase: str) -> None:
        """Enter a phase of a save. For any thread."""
        self.saving = SavePhase(order, phase, time.monotonic())

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """A context in which an exception is phase `FAILURE`, and no progress, until the other ranks are told.

        They are told late: what is closed first, such as a save under way, still needs them.
        """
        try:
            yield
        except BaseException:
            self.last = self.last._replace(phase=FAILURE, since=time.monotonic())
            raise

    def at_step(self, phase: str) -> None:
        """Enter a phase of a step. It is called compile in the first steps."""
        self.enter(phase if self._warm >= WARM else "compile")

    def steps(self, batches: Iterable[StepBatch], first: int) -> Iterator[StepBatch]:
        """The batches, as steps from first + 1 on. Waiting for a batch is phase data, its use begins as phase host. The
        first batch is a phase of its own: a source may have to be read up to its place."""
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
        """Add up a step's time. Steps that may have compiled do not count."""
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
        """The median seconds of the last 50 steps; 0 before there are any."""
        durations = list(self._durations)
        return statistics.median(durations) if durations else 0.0
