"""A save of several processes fails on all of them when it fails on one.

Orbax makes the processes wait for each other while they save. A process that fails does not come, and the others would
wait for 20 minutes. Here they wait in the job's key-value store, and look now and then whether one has failed. Whoever
watches the job is told which phase of a save each of them is in.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax

from jaxdist.errors import first_of
from jaxdist.processes import JobStore, Place, anywhere, place

MEET_S = 1200.0  # until every process must have come, by a clock that nobody sets
TELL_S = 30.0  # until the processes that have not called save are named
LOOK_S = 0.5  # between two looks whether another process has failed
# What a process has done more, or less, than others that have met as often. Process 0 makes the folder alone.
LEADS = {"making its folder": -1, "writing": 1}
MOST_MET = 1000  # above the number of meetings in a save
Entered = Callable[[int, str], None]


def not_watched(order: int, phase: str) -> None:
    """Nobody wants to know the phases of saves."""


class FailedElsewhere(Exception):
    """This process could save, another one could not."""


class SaveBarrier:
    """A barrier for the saves of one `Checkpoints`: all processes of the job make the same ones, in the same order.

    entered: is called with each phase that this process enters, from any thread, and a number that says how far its
    saves have come.
    """

    def __init__(self, entered: Entered = not_watched) -> None:
        self._save, self._failed, self._uses, self._entered = 0, False, Counter[str](), entered
        self._met, self._phase = 0, ""
        self._lock = threading.Lock()  # orbax meets in the main thread and in one of its own
        self._store: JobStore | None = None

    def _find_store(self, here: Place) -> JobStore | None:
        """The store of these saves, None outside of a job. Looks each time: the job may be joined after `__init__`."""
        if here.processes == 1:
            return None
        if self._store is None:  # `begin` is the first to look, on every process
            self._store = JobStore("saves", here.rank)
        return self._store

    def begin(self) -> None:
        """Begin the next save, on this process, and let the others know it."""
        here = place()
        store = self._find_store(here)
        if store is not None and here.rank == 0:
            store.delete(str(self._save))  # all have ended that save
        self._save, self._failed, self._uses = self._save + 1, False, Counter()
        self._met = MOST_MET * self._save
        if store is not None:
            store.set(f"{self._save}/called/{here.rank}")
        self.enter("copying")

    def fails_anywhere(self, fails: bool) -> bool:
        """Whether this save fails on any process before it begins to write. Waits for all of them, and says on standard
        error which have not called save, where that takes `TELL_S`."""
        here = place()
        store = self._find_store(here)
        if store is None:
            return anywhere(fails)
        late = threading.Timer(TELL_S, _name_missing, (store, f"{self._save}/called", here))  # this thread waits in JAX
        late.daemon = True
        late.start()
        try:
            return anywhere(fails)
        finally:
            late.cancel()

    def enter(self, phase: str, *, meeting: int = 0) -> None:
        """Enter a phase of a save, on this process. meeting: 1 where all processes do at the same point."""
        self._met, self._phase = self._met + meeting, phase
        self._entered(2 * self._met + LEADS.get(phase, 0), phase)

    @contextmanager
    def failing_everywhere(self) -> Iterator[None]:
        """A context in which an exception fails the save on every process."""
        try:
            yield
        except BaseException:
            self._failed = True
            store = self._find_store(place())
            if store is not None:
                store.set(f"{self._save}/failed")
            raise

    def meet(self, *, key: str, timeout_ms: int) -> None:
        """Wait until every process is here: a barrier for orbax. Raises `FailedElsewhere`, once a save. Does not wait
        where this process knows that the save has failed."""
        here = place()
        store = self._find_store(here)
        if store is None or self._failed:
            return
        with self._lock:
            self._uses[key] += 1
            key = f"{self._save}/{key}/{self._uses[key]}"
        # Orbax meets before it copies, when all have written, when process 0 has completed that, and at its end.
        after = {"async_write_complete": "completing", "async_commit_complete": "finishing"}
        phase = next((name for end, name in after.items() if end in key), self._phase)
        self.enter("waiting for " + ("rank 0" if phase == "finishing" else "the other ranks"), meeting=1)
        store.set(f"{key}/{here.rank}")
        until = time.monotonic() + min(timeout_ms / 1000, MEET_S)
        if here.rank == 0:
            for rank in range(here.processes):
                self._wait(store, f"{key}/{rank}", until)
            store.set(f"{key}/all")
        else:
            self._wait(store, f"{key}/all", until)
        self.enter(phase, meeting=1)

    def _wait(self, store: JobStore, key: str, until: float) -> None:
        while store.get(key, LOOK_S) is None:
            if store.get(f"{self._save}/failed") is not None:
                self._failed = True
                raise FailedElsewhere
            if time.monotonic() > until:
                raise TimeoutError(f"no answer to {key}")


def _name_missing(store: JobStore, key: str, here: Place) -> None:
    """Say which processes have not set their key in the store. The lowest rank that has set its own says it."""
    missing = []
    with suppress(jax.errors.JaxRuntimeError):  # the coordinator is gone, which others tell
        for rank in range(here.processes):
            if store.get(f"{key}/{rank}") is None:
                missing.append(rank)
            elif rank < here.rank:
                return  # that one says it
    if missing and here.rank not in missing:  # else the save has ended, and rank 0 has removed the keys
        names = first_of(list(map(str, missing)), 8)
        line = f"save: not called in {TELL_S:g} s by rank {names}; every process must call it, at the same steps"
        print(line, file=sys.stderr, flush=True)


class _SharedFuture:
    """A future of a handler whose failures are those of every process."""

    def __init__(self, future: Any, saves: SaveBarrier) -> None:
        self._future, self._saves = future, saves

    def result(self, timeout: float | None = None) -> Any:
        self._saves.enter("writing")  # orbax waits for futures when all is copied
        with self._saves.failing_everywhere():
            return self._future.result(timeout)

    def cancel(self) -> bool | None:
        return self._future.cancel()


def share_failures(handler: Any, saves: SaveBarrier) -> Any:
    """An orbax handler, changed in place: its failures are those of every process."""
    save, finish = handler.async_save, handler.finalize

    async def async_save(*arguments: Any, **keywords: Any) -> list[Any]:
        with saves.failing_everywhere():
            futures = await save(*arguments, **keywords)
        return [_SharedFuture(future, saves) for future in futures or []]

    def finalize(*arguments: Any, **keywords: Any) -> Any:
        with saves.failing_everywhere():
            return finish(*arguments, **keywords)

    # Not a class around the handler: orbax looks handlers up by class.
    handler.async_save, handler.finalize = async_save, finalize
    return handler
