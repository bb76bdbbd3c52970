"""What one process knows, on every process of a job; and which of how many it is."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils


class Place(NamedTuple):
    """Which process of how many this is."""

    rank: int
    processes: int


def job_state() -> Any:
    """What JAX keeps of the job: `client` (the coordinator's store), `coordinator_address`, `process_id`,
    `num_processes`. It has no public name, so it is looked up where there is a job only."""
    from jax._src.distributed import global_state

    return global_state


def place() -> Place:
    """Of this process, without starting JAX's devices. (0, 1) outside of a job."""
    if not jax.distributed.is_initialized():
        return Place(0, 1)
    state = job_state()
    return Place(state.process_id, state.num_processes)


def from_first(text: str) -> str:
    """Process 0's text on every process. Every process must call it; what the others pass does not matter."""
    if jax.process_count() == 1:
        return text
    own = np.frombuffer(text.encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(own.size)))
    padded = np.zeros(length, np.uint8)
    padded[: own.size] = own[:length]
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).decode()


def anywhere(happened: bool) -> bool:
    """Whether it is so on any process. Every process must call it."""
    if jax.process_count() == 1:
        return happened
    return bool(np.asarray(multihost_utils.process_allgather(np.array(happened))).any())
