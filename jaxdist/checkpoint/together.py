"""A save of several processes fails on all of them when it fails on one.

Orbax makes the processes wait for each other while they save. One that fails does not come, and the others would wait
for 20 minutes. Here they wait in the store of the job's coordinator, and look now and then whether one has failed.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxdist.agree import job_state, place

KEY = "jaxdist/saves"
LOOK_S = 0.5  # between two looks


class FailedElsewhere(Exception):
    """This process could save, another one could not."""


class Together:
    """The saves of this process, by number: the same on all processes of the job, which save the same steps."""

    def __init__(self) -> None:
        self._number, self._over = 0, False

    def begin(self) -> None:
        """The next save begins on this process."""
        self._number, self._over = self._number + 1, False
        if place().processes > 1 and place().rank == 0:
            job_state().client.key_value_delete(f"{KEY}/{self._number - 1}/")  # a folder; all have ended that save

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What fails in it, fails the save on every process."""
        try:
            yield
        except BaseException:
            self._over = True
            if place().processes > 1:
                self._set("failed")
            raise

    def meet(self, *, key: str, timeout_ms: int) -> None:
        """Wait until every process is here: a barrier for orbax. Raises `FailedElsewhere`, once a save. Does not wait
        where this process knows that the save has failed."""
        here = place()
        if here.processes == 1 or self._over:
            return
        self._set(f"{key}/{here.rank}")
        until = time.monotonic() + timeout_ms / 1000
        if here.rank == 0:
            for rank in range(here.processes):
                self._wait(f"{key}/{rank}", until)
            self._set(f"{key}/all")
        else:
            self._wait(f"{key}/all", until)

    def _set(self, key: str) -> None:
        job_state().client.key_value_set(f"{KEY}/{self._number}/{key}", "1", allow_overwrite=True)

    def _get(self, key: str, seconds: float) -> bool:
        """Whether the key is there within so many seconds."""
        try:
            job_state().client.blocking_key_value_get(f"{KEY}/{self._number}/{key}", max(1, int(seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return False
        return True

    def _wait(self, key: str, until: float) -> None:
        while not self._get(key, LOOK_S):
            if self._get("failed", 0):
                self._over = True
                raise FailedElsewhere
            if time.monotonic() > until:
                raise TimeoutError(f"no answer to {key}")


saves = Together()  # one a process, as the coordinator's store is


class _Told:
    """A future of a handler that tells."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> Any:
        with saves.telling():
            return self._future.result(timeout)

    def cancel(self) -> bool | None:
        """As the handler's own."""
        return self._future.cancel()


def telling(handler: Any) -> Any:
    """An orbax handler whose failures are those of every process. (Orbax looks handlers up by their very class.)"""
    save, end = handler.async_save, handler.finalize

    async def async_save(*arguments: Any, **keywords: Any) -> list[Any]:
        with saves.telling():
            futures = await save(*arguments, **keywords)
        return [_Told(future) for future in futures or []]

    def finalize(*arguments: Any, **keywords: Any) -> Any:
        with saves.telling():
            return end(*arguments, **keywords)

    handler.async_save, handler.finalize = async_save, finalize
    return handler
