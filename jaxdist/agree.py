"""What one process knows, on every process of a job."""

import jax
import numpy as np
from jax.experimental import multihost_utils


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
