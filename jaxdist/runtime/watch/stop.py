"""Stopping on Ctrl-C, another signal or a time limit: after the same step on every process, with a checkpoint."""

import contextlib
import functools
import math
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxdist.files.launcher_notes import latest_step
from jaxdist.processes import JobStore, Place, place
from jaxdist.runtime.exit_status import SAME_S, STOP_SIGNALS, STOPPED
from jaxdist.runtime.run_folder import leave_stop_note

_POLL_S = 0.2  # between two looks into the job's store
_LEAVE_S = 2.0  # until the other processes must have heard that this one leaves, and the disk must have answered
_ANSWER_S = 3.0  # until the other processes must have said whether they have begun a step
_CLOSE, _WAKE = 0, 255  # bytes in the pipe that are no signal's number
_NO_STEP = -1  # in place of a step: none was begun
_active = list["weakref.ref[StopSignal]"]()  # the contexts that have the signals, the innermost last


class TimeLimit:
    """A limit on the time of a run (`train.max_hours`): when to stop, so that the last steps and a save still fit.

    Args:
        seconds: The limit, None for none.
        started: When the run began, by `time.monotonic`.
        save: Returns the seconds that a save takes, as far as is known.
    """

    def __init__(self, seconds: float | None, started: float, save: Callable[[], float]) -> None:
        self._end = None if seconds is None else started + seconds
        self._save, self._mark, self._longest = save, 0.0, 0.0

    def is_near(self) -> bool:
        """Whether to stop now. To be called once a step. The other processes hear of a stop `_POLL_S` later, and finish
        the step after."""
        if self._end is None:
            return False
        now = time.monotonic()
        if self._mark:  # not the first, which was compiled
            self._longest = max(self._longest, now - self._mark)
        self._mark = now
        return now + 2 * self._longest + 2 * _POLL_S + self._save() >= self._end


class StopSignal:
    """A context in which a first signal of `STOP_SIGNALS` asks a training run to stop and a second one ends it at once.

    - SIGHUP and SIGUSR1 stay as they are where they are ignored, as under nohup, or the program has its own handler.
    - At once is by `os._exit`, with status `STOPPED`.
    - As long as no process has given a step to its devices there is nothing to save. Then the first signal ends the
      processes, too, as soon as all have said so, or after `_ANSWER_S`.
    - Signals within a second of the first are the same one, sent on by a launcher or a scheduler.
    - A standard output that nobody reads any more (`reader_gone`) asks to stop, too; after it, a signal is the first.
    - A thread sees the signals, whatever the main thread is doing: Python alone would wait for the end of a
      compilation.
    - In a job of several processes that thread carries them to the others by the job's key-value store. JAX's own
      handler of SIGTERM, which swallows a second one, is left out.

    To be entered on the main thread before the job is joined; on another thread no signal is heeded, nor without
    `signals`.
    """

    def __init__(self, *, signals: bool = True) -> None:
        self.why = ""  # the first request to stop: a signal's name, or a configuration key
        self.started = time.monotonic()
        self.limit = TimeLimit(None, self.started, lambda: 0.0)
        self._lock = threading.Lock()
        self._begun: int | None = None  # the last step for which `requested` was asked
        self._last: int | None = None  # the step to stop after
        self._store: JobStore | None = None
        self._here = Place(0, 1)
        self.folder: Callable[[], Path | None] = lambda: None  # the run directory, once it is known
        self._asked: float | None = None  # when this process was first asked to stop
        self._first_signal: float | None = None
        self._closed = False
        self._previous: dict[int, Any] = {}
        self._on_main = signals and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "StopSignal":
        if not jax.distributed.is_initialized():
            jax.config.update("jax_enable_preemption_service", False)
        self._out, self._in = os.pipe()
        os.set_blocking(self._in, False)  # as `set_wakeup_fd` wants it
        self._thread = threading.Thread(target=self._watch, name="jaxdist-stop", daemon=True)
        self._thread.start()
        if self._on_main:
            self._wakeup = signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
            _hook_forks()
            _active.append(weakref.ref(self))
            for number in STOP_SIGNALS:
                if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) is signal.SIG_DFL:
                    self._previous[number] = signal.signal(number, _nothing)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._on_main:
            signal.set_wakeup_fd(self._wakeup)
            _active.pop()
        if self._store is not None and error is None:
            self._store.set(f"at/{self._here.rank}", str(self._begun or 0))  # or the others would wait for it
        os.write(self._in, bytes([_CLOSE]))
        self._thread.join()
        os.close(self._in)
        os.close(self._out)

    def join(self) -> None:
        """Connect the processes of a job, once JAX has started: from now on they hear of each other's signals."""
        if jax.process_count() == 1:
            return
        if self._on_main:
            for number in (signal.SIGINT, signal.SIGTERM):  # a job that was joined before has JAX's handler
                signal.signal(number, _nothing)
        self._here = place()
        self._store = JobStore("stop", self._here.rank)
        os.write(self._in, bytes([_WAKE]))

    def reader_gone(self) -> None:
        """Ask to stop because nobody reads standard output any more, as a shell would by SIGPIPE. For any thread."""
        os.write(self._in, bytes([signal.SIGPIPE]))

    def requested(self, step: int) -> bool:
        """Whether to stop after `step` steps. Every process must call it once a step, with the same steps."""
        with self._lock:
            self._begun = step
        if jax.process_index() == 0 and self.limit.is_near():
            self.ask("train.max_hours")
        with self._lock:
            return self._last is not None and step >= self._last

    def _watch(self) -> None:
        """Run the thread that sees signals, until the context ends."""
        while not self._closed:
            try:
                self._hear(None if self._store is None else _POLL_S)
                if self._store is not None and not self._closed:
                    self._look(self._store)
            except jax.errors.JaxRuntimeError:
                self._store = None  # process 0 is gone: JAX ends this one, too

    def _hear(self, seconds: float | None) -> None:
        """Read the signals that come within these seconds; None: wait for one."""
        ready, _, _ = select.select([self._out], [], [], seconds)
        for number in os.read(self._out, 64) if ready else b"":
            self._closed = self._closed or number == _CLOSE
            if number in self._previous:
                self._receive(signal.Signals(number).name)
            if number == signal.SIGPIPE and not self.why:
                self._request("a closed standard output")
                print("nobody reads standard output any more: the run stops, with a checkpoint", file=sys.stderr)

    def _receive(self, name: str) -> None:
        now = time.monotonic()
        if self._first_signal is None:
            self._first_signal = now
            self._request(name)
        elif now > self._first_signal + SAME_S:
            self._leave(f"ended at once by a second signal, {name}")

    def _request(self, why: str) -> None:
        """Stop: now where nothing was begun, else after a step."""
        self._asked = self._asked or time.monotonic()
        if self._begun is None and self._store is None:
            self._leave(f"ended by {why} before the first step")
        self.ask(why)

    def ask(self, why: str) -> None:
        """Ask all processes to stop after a step."""
        self.why = self.why or why
        if self._store is not None:
            self._store.set("why", why)
        else:
            self._last = 0

    def _said(self, store: JobStore) -> dict[str, str]:
        """The keys of the store. Does not return where another process has ended the job."""
        said = store.get_all()
        if "now" in said:
            self._leave(said["now"])
        return said

    def _look(self, store: JobStore) -> None:
        """Agree on the last step, if a stop is asked for: the one after the newest that any process has begun."""
        said = self._said(store)
        if "why" not in said or self._last is not None:
            return
        self.why = self.why or said["why"]
        with self._lock:  # no step is begun before it is known which one is the last
            store.set(f"at/{self._here.rank}", str(_NO_STEP if self._begun is None else self._begun))
            while True:
                at = [int(value) for key, value in said.items() if key.startswith("at/")]
                begun = max(at, default=_NO_STEP)
                late = time.monotonic() > (self._asked or math.inf) + _ANSWER_S
                if len(at) == self._here.processes or (late and self._begun is None and begun == _NO_STEP):
                    break
                self._hear(_POLL_S / 10)  # one may never answer: a second signal ends this process all the same
                if self._closed:
                    return
                said = self._said(store)
            if begun == _NO_STEP:
                self._leave(f"ended by {self.why} before the first step")
            self._last = begun + 1

    def _leave(self, text: str) -> None:
        """End this process at once, and those of its job. text: why; printed by those that were asked themselves."""
        newest, store, folder = list[int](), self._store, self.folder()
        tasks = [] if store is None else [lambda: _tell_all(store, self._here, text)]
        if folder is not None and self._asked is not None:
            tasks.append(lambda: newest.append(latest_step(folder)))
        threads = [threading.Thread(target=task, daemon=True) for task in tasks]  # store and disk may not answer
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_LEAVE_S)
        leave_stop_note(os.environ)
        saying = threading.Thread(target=self._say_bye, args=(f"{text}; {_way_on(folder, newest)}",), daemon=True)
        saying.start()
        saying.join(_LEAVE_S)  # nobody may read what is printed
        os._exit(STOPPED)

    def _say_bye(self, text: str) -> None:
        if self._asked is not None:
            print(text, file=sys.stderr, flush=True)
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h")  # a progress bar hides the cursor


def _way_on(folder: Path | None, newest: list[int]) -> str:
    """What to do after a run that has ended at once. newest: of the checkpoints, -1: none, or [] where the disk has not
    answered."""
    if folder is None:
        return "the same command begins again"
    if newest == [-1]:
        return "there is no checkpoint yet: the same command begins again"
    found = f"the checkpoint of step {newest[0]}" if newest else "its newest checkpoint, if there is one"
    return f"the same command with --run-dir {folder} goes on from {found}"


@functools.cache
def _hook_forks() -> None:
    """Have `_leave_to_parent` called in every forked process. A hook can not be taken away again."""
    os.register_at_fork(after_in_child=_leave_to_parent)


def _leave_to_parent() -> None:
    """In a forked process, as a worker of a DataLoader is, during a run: its signals are not the run's.

    Ctrl-C is sent to it too, and it works on until the run, which stops after a step, ends it. A program that it
    becomes heeds them, as a handler ends with `exec`; a signal that is ignored would stay so.
    """
    if _active and _active[-1]() is not None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, _nothing)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _nothing(number: int, frame: Any) -> None:
    """A handler must be there for Python to write the signal's number to the pipe."""


def _tell_all(store: JobStore, here: Place, text: str) -> None:
    """Tell the other processes that this one leaves. Process 0 waits until all know, because the store ends with it."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 has left
        store.set("now", text)
        store.set(f"left/{here.rank}")
        while here.rank == 0 and sum(key.startswith("left/") for key in store.get_all()) < here.processes:
            time.sleep(_POLL_S / 10)
