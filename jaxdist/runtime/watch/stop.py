"""Stopping on Ctrl-C, SIGTERM or a time limit: after the same step on every process, with a checkpoint."""

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

from jaxdist.processes import job_state
from jaxdist.runtime.exit_status import SAME_S, STOPPED
from jaxdist.runtime.run_folder import leave_stop_note

_POLL_S = 0.2  # between two looks into the store of a job
_LEAVE_S = 2.0  # for the other processes of a job to hear that one leaves
_ANSWER_S = 3.0  # for them to say whether they have begun a step
_CLOSE, _WAKE = 0, 255  # in the pipe, beside numbers of signals
_NONE = -1  # in place of a step: none was begun


class TimeLimit:
    """The end of a run that a scheduler ends: when to stop, so that the last steps and a save still fit.

    seconds: since `started` (time.monotonic()); None: no limit. save: how long a save takes, as far as is known.
    """

    def __init__(self, seconds: float | None, started: float, save: Callable[[], float]) -> None:
        self._end = None if seconds is None else started + seconds
        self._save, self._mark, self._longest = save, 0.0, 0.0

    def is_near(self) -> bool:
        """Called once a step. The others of a job hear of it a look later, and go to the end of the step after."""
        if self._end is None:
            return False
        now = time.monotonic()
        if self._mark:  # not the first, which was compiled
            self._longest = max(self._longest, now - self._mark)
        self._mark = now
        return now + 2 * self._longest + 2 * _POLL_S + self._save() >= self._end


class StopSignal:
    """A context in which a first SIGINT or SIGTERM asks a training run to stop and a second one ends it at once.

    As long as no process has given a step to its devices there is nothing to save: the first signal ends them, too, as
    soon as all have said so, or after `_ANSWER_S`. At once is by `os._exit`, with status `STOPPED`. Signals within a
    second of the first are the same one, sent on by a launcher or a scheduler. A thread sees them, whatever the main
    thread is doing: Python alone would wait for the end of a compilation. In a job of several processes it carries them
    to the others by the store of JAX's coordination service, whose own handler of SIGTERM, which swallows a second one,
    is left out. To be entered on the main thread before the job is joined; on another thread no signal is heeded.
    """

    def __init__(self) -> None:
        self.why = ""  # the first request to stop: a signal's name, or a configuration key
        self.started = time.monotonic()
        self.limit = TimeLimit(None, self.started, lambda: 0.0)
        self._lock = threading.Lock()
        self._taken: int | None = None  # the last step for which `requested` was asked
        self._last: int | None = None  # the step to stop after
        self._store: _Store | None = None
        self._first_signal: float | None = None
        self._closed = False
        self._previous: dict[int, Any] = {}
        self._on_main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "StopSignal":
        if not jax.distributed.is_initialized():
            jax.config.update("jax_enable_preemption_service", False)
        self._out, self._in = os.pipe()
        os.set_blocking(self._in, False)  # as `set_wakeup_fd` wants it
        self._thread = threading.Thread(target=self._watch, name="jaxdist-stop", daemon=True)
        self._thread.start()
        if self._on_main:
            self._wakeup = signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, _nothing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._on_main:
            signal.set_wakeup_fd(self._wakeup)
        if self._store is not None and error is None:
            self._store.set(f"at/{self._store.rank}", str(self._taken or 0))  # or the others would wait for it
        os.write(self._in, bytes([_CLOSE]))
        self._thread.join()
        os.close(self._in)
        os.close(self._out)

    def join(self) -> None:
        """To be called when JAX has started: from now on the processes of a job hear of each other's signals."""
        if jax.process_count() == 1:
            return
        if self._on_main:
            for number in (signal.SIGINT, signal.SIGTERM):  # a job that was joined before has JAX's handler
                signal.signal(number, _nothing)
        self._store = _Store()
        os.write(self._in, bytes([_WAKE]))

    def requested(self, step: int) -> bool:
        """Whether to stop after `step` steps. Every process must call it once a step, with the same steps."""
        with self._lock:
            self._taken = step
        if jax.process_index() == 0 and self.limit.is_near():
            self._ask("train.max_hours")
        with self._lock:
            return self._last is not None and step >= self._last

    def _watch(self) -> None:
        """The thread."""
        while not self._closed:
            try:
                self._hear(None if self._store is None else _POLL_S)
                if self._store is not None and not self._closed:
                    self._look(self._store)
            except jax.errors.JaxRuntimeError:
                self._store = None  # process 0 is gone: JAX ends this one, too

    def _hear(self, seconds: float | None) -> None:
        """Take in the signals that come within these seconds; None: wait for one."""
        ready, _, _ = select.select([self._out], [], [], seconds)
        for number in os.read(self._out, 64) if ready else b"":
            self._closed = self._closed or number == _CLOSE
            if number in (signal.SIGINT, signal.SIGTERM):
                self._receive(signal.Signals(number).name)

    def _receive(self, name: str) -> None:
        now = time.monotonic()
        if self._first_signal is None:
            self._first_signal = now
            if self._taken is None and self._store is None:
                self._leave(f"ended by {name} before the first step")
            self._ask(name)
        elif now > self._first_signal + SAME_S:
            self._leave(f"ended at once by a second signal, {name}")

    def _ask(self, why: str) -> None:
        """Ask for a stop after a step."""
        self.why = self.why or why
        if self._store is not None:
            self._store.set("why", why)
        else:
            self._last = 0

    def _said(self, store: "_Store") -> dict[str, str]:
        """What the others say. Does not return where one of them has left."""
        said = store.get()
        if "now" in said:
            self._leave(said["now"])
        return said

    def _look(self, store: "_Store") -> None:
        """Is a stop asked for? Where one has begun a step, maybe ahead of this one, there is something to save."""
        said = self._said(store)
        if "why" not in said or self._last is not None:
            return
        self.why = self.why or said["why"]
        with self._lock:  # no step is begun before it is known which one is the last
            store.set(f"at/{store.rank}", str(_NONE if self._taken is None else self._taken))
            while True:
                at = [int(value) for key, value in said.items() if key.startswith("at/")]
                begun = max(at, default=_NONE)
                late = time.monotonic() > (self._first_signal or math.inf) + _ANSWER_S
                if len(at) == store.count or (late and self._taken is None and begun == _NONE):
                    break
                self._hear(_POLL_S / 10)  # one may never answer: a second signal ends this process all the same
                if self._closed:
                    return
                said = self._said(store)
            if begun == _NONE:
                self._leave(f"ended by {self.why} before the first step")
            self._last = begun + 1

    def _leave(self, text: str) -> None:
        """End this process at once, and those of its job. text: why; said by those that were sent a signal."""
        if self._store is not None:  # in a thread: the store may not answer any more
            tell = threading.Thread(target=self._store.leave, args=(text,), daemon=True)
            tell.start()
            tell.join(_LEAVE_S)
        if self._first_signal is not None:
            print(f"{text}; the same command goes on from the newest checkpoint", file=sys.stderr, flush=True)
        leave_stop_note(os.environ)
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h")  # a progress bar hides the cursor
        os._exit(STOPPED)


def _nothing(number: int, frame: Any) -> None:
    """A handler must be there for Python to write the signal's number to the pipe."""


class _Store:
    """The key-value store of a job, for one training run. Lives on process 0."""

    def __init__(self) -> None:
        client: Any = job_state().client
        self._client, self.rank, self.count = client, jax.process_index(), jax.process_count()
        run = client.key_value_increment(f"jaxdist/stop/runs/{self.rank}", 1)  # the same number on all processes
        self._folder = f"jaxdist/stop/{run}/"

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(self._folder + key, value, allow_overwrite=True)

    def get(self) -> dict[str, str]:
        """All keys."""
        found = self._client.key_value_dir_get(self._folder)
        return {key.removeprefix(self._folder): value for key, value in found}

    def leave(self, text: str) -> None:
        """Tell the others; process 0 waits until they know, because the store ends with it."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 has left
            self.set("now", text)
            self.set(f"left/{self.rank}", "")
            while self.rank == 0 and sum(key.startswith("left/") for key in self.get()) < self.count:
                time.sleep(_POLL_S / 10)
