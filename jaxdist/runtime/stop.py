"""Stopping on Ctrl-C or SIGTERM: at the end of a step, the same step on every process, with a checkpoint."""

import os
import signal
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils

STOPPED = 75  # exit status: stopped, and the same command resumes


class StopSignal:
    """A context in which SIGINT and SIGTERM set a flag; a second SIGINT raises KeyboardInterrupt as usual.

    In a job of several processes JAX's coordination service agrees on the step: there a SIGINT is turned into the
    SIGTERM that this service listens to.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._previous: dict[int, Any] = {}
        self._several = jax.process_count() > 1

    def __enter__(self) -> "StopSignal":
        # With several processes JAX's own SIGTERM handler must stay in place.
        for number in (signal.SIGINT,) if self._several else (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = number
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)

    def requested(self, step: int) -> bool:
        """Whether to stop after `step` steps. Every process must call it once a step, with the same steps."""
        if self._several:
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return self._received is not None
