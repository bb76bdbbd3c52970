"""A save of several processes fails on all of them when it fails on one.

Orbax makes the processes wait for each other while they save. One that fails does not come, and the others would wait
for 20 minutes. Here they wait in the store of the job's coordinator, and look now and then whether one has failed.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxdist.processes import job_state, place

KEY = "jaxdist/saves"
LOOK_S = 0.5  # between two looks


class FailedElsewhere(Exception):
    """This process could save, another one could not."""


class Together:
    """The saves of one `Checkpoints`: all processes of the job make the same ones, in the same order."""

    def __init__(self) -> None:
        self._save, self._over, self._uses = 0, False, Counter[str]()
        self._lock = threading.Lock()  # orbax meets in the main thread and in one of its own
        self._folder = KEY
        if place().processes > 1:  # the same number on all processes, which make their `Checkpoints` in the same order
            self._folder += f"/{job_state().client.key_value_increment(f'{KEY}/made/{place().rank}', 1)}"

    def begin(self) -> None:
        """The next save begins on this process."""
        if place().processes > 1 and place().rank == 0:
            job_state().client.key_value_delete(f"{self._folder}/{self._save}/")  # a folder; all have ended that save
        self._save, self._over, self._uses = self._save + 1, False, Counter()

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
        with self._lock:
            self._uses[key] += 1
            key = f"{key}/{self._uses[key]}"
        self._set(f"{key}/{here.rank}")
        until = time.monotonic() + timeout_ms / 1000
        if here.rank == 0:
            for rank in range(here.processes):
                self._wait(f"{key}/{rank}", until)
            self._set(f"{key}/all")
        else:
            self._wait(f"{key}/all", until)

    def _set(self, key: str) -> None:
        job_state().client.key_value_set(f"{self._folder}/{self._save}/{key}", "1", allow_overwrite=True)

    def _wait(self, key: str, until: float) -> None:
        client, folder = job_state().client, f"{self._folder}/{self._save}"
        while not found(client.blocking_key_value_get, f"{folder}/{key}", int(LOOK_S * 1000)):
            if found(client.key_value_try_get, f"{folder}/failed"):
                self._over = True
                raise FailedElsewhere
            if time.monotonic() > until:
                raise TimeoutError(f"no answer to {key}")


def found(get: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a key is there, by a way of looking for it."""
    try:
        get(*arguments)
    except jax.errors.JaxRuntimeError as error:
        if not any(status in str(error) for status in ("DEADLINE_EXCEEDED", "NOT_FOUND")):
            raise
        return False
    return True


class _Told:
    """A future of a handler that tells."""

    def __init__(self, future: Any, saves: Together) -> None:
        self._future, self._saves = future, saves

    def result(self, timeout: float | None = None) -> Any:
        with self._saves.telling():
            return self._future.result(timeout)

    def cancel(self) -> bool | None:
        """As the handler's own."""
        return self._future.cancel()


def telling(handler: Any, saves: Together) -> Any:
    """An orbax handler whose failures are those of every process. (Orbax looks handlers up by their very class.)"""
    save, end = handler.async_save, handler.finalize

    async def async_save(*arguments: Any, **keywords: Any) -> list[Any]:
        with saves.telling():
            futures = await save(*arguments, **keywords)
        return [_Told(future, saves) for future in futures or []]

    def finalize(*arguments: Any, **keywords: Any) -> Any:
        with saves.telling():
            return end(*arguments, **keywords)

    handler.async_save, handler.finalize = async_save, finalize
    return handler
