"""Signals that would end a process are noted in place of that, so that it can end its children in order."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from jaxdist.runtime.exit_status import STOP_SIGNALS


@contextlib.contextmanager
def noted_signals(signals: list[int], same_s: float = 0.0) -> Iterator[None]:
    """A context in which `STOP_SIGNALS` are only added to `signals`. In a thread other than the main one nothing
    changes. All but SIGTERM stay ignored where they are, as under nohup and in the background of a script.

    Args:
        signals: Where to add them.
        same_s: Signals within so many seconds of the first are the same one.
    """
    before: dict[signal.Signals, Any] = {}
    first: list[float] = []

    def note(received: int, frame: Any) -> None:
        now = time.monotonic()
        if not first or now > first[0] + same_s:
            signals.append(received)
        first.append(now)

    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
