"""The processes of a job: which one this is, what all of them know, and the key-value store that they share."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdist.errors import UserError


class Place(NamedTuple):
    """The number of this process, and how many there are."""

    rank: int
    processes: int


def job_state() -> Any:
    """JAX's record of the job: `client` (of the coordinator's key-value store), `coordinator_address`, `process_id` and
    `num_processes`. It has no public name, so it is imported only where there is a job."""
    from jax._src.distributed import global_state

    return global_state


def place() -> Place:
    """The place of this process, without starting JAX's devices. (0, 1) outside of a job."""
    if not jax.distributed.is_initialized():
        return Place(0, 1)
    state = job_state()
    return Place(state.process_id, state.num_processes)


class JobStore:
    """Keys and values that all processes of a job share. JAX's coordinator keeps them, on process 0.

    A job may train more than once, so every store has a folder of its own. The n-th store of a name is the same one on
    all processes: each process must make its stores in the same order.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._client = job_state().client
        made = self._client.key_value_increment(f"jaxdist/{name}/made/{rank}", 1)
        self._folder = f"jaxdist/{name}/{made}/"

    def set(self, key: str, value: str = "1") -> None:
        """Set a key, again if it has a value."""
        self._client.key_value_set(self._folder + key, value, allow_overwrite=True)

    def get(self, key: str, seconds: float = 0.0) -> str | None:
        """The value of a key. None if it has none after these seconds."""
        name = self._folder + key
        try:
            if seconds:
                return str(self._client.blocking_key_value_get(name, int(seconds * 1000)))
            return str(self._client.key_value_try_get(name))
        except jax.errors.JaxRuntimeError as error:
            if not any(status in str(error) for status in ("DEADLINE_EXCEEDED", "NOT_FOUND")):
                raise
            return None

    def get_all(self) -> dict[str, str]:
        """All keys with their values."""
        found = self._client.key_value_dir_get(self._folder)
        return {key.removeprefix(self._folder): value for key, value in found}

    def delete(self, folder: str) -> None:
        """Remove all keys that begin with "folder/"."""
        self._client.key_value_delete(f"{self._folder}{folder}/")


def from_first(value: Any) -> Any:
    """Process 0's value, on every process. A value is what JSON can hold; what the other processes pass does not
    matter. Every process must call it."""
    if jax.process_count() == 1:
        return value
    own = np.frombuffer(json.dumps(value).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(own.size)))
    padded = np.zeros(length, np.uint8)
    padded[: own.size] = own[:length]
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))))


def done_by_first(work: Callable[[], Any]) -> Any:
    """What `work` returns on process 0, on every process: a value that JSON can hold. A `UserError` or OSError in it is
    raised on all of them, as a `UserError`. Every process must call it."""
    value, error = None, ""
    if jax.process_index() == 0:
        try:
            value = work()
        except (UserError, OSError) as raised:
            error = str(raised)
    value, error = from_first((value, error))
    if error:
        raise UserError(error)
    return value


def from_all(value: Any) -> list[Any]:
    """The values of all processes, in the order of ranks. A value is what JSON can hold. Every process must call it."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text.size)).ravel()
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]


def anywhere(happened: bool) -> bool:
    """Whether `happened` is true on any process. Every process must call it."""
    if jax.process_count() == 1:
        return happened
    return bool(np.asarray(multihost_utils.process_allgather(np.array(happened))).any())
