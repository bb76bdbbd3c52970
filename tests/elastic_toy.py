"""A worker without jax for elastic runs: what it does depends on its name and on all that it has done before."""

import os
import time
from typing import Any

import numpy as np

from jaxdist.elastic.server import bounds
from jaxdist.elastic.worker import Done

SIZE = 7


class Toy:
    """As `jaxdist.elastic.worker.Worker`, by a worker's name alone."""

    def __init__(self, name: str, text: str = "", period: int = 1) -> None:
        self.name, self.clock, self.inner = name, 0, np.zeros(SIZE, np.float32)

    def first(self) -> None:
        pass

    def numbers(self) -> np.ndarray:
        return np.arange(SIZE, dtype=np.float32)

    def work(self, flat: np.ndarray) -> Done:
        noise = np.random.default_rng([int(self.name[1:]), self.clock]).normal(size=SIZE).astype(np.float32)
        self.inner = np.float32(0.5) * self.inner + noise
        self.clock += 1
        moved = np.float32(0.1) * flat + self.inner
        return Done(self.clock - 1, float(moved.sum()), moved)

    def work_in_parts(self, *parts: np.ndarray) -> tuple[Any, ...]:
        done = self.work(np.concatenate(parts))
        time.sleep(0.2 if self.name == "w0" else 0.05)
        return (done.clock, done.loss), *(done.moved[begin:end] for begin, end in bounds(SIZE, len(parts)))

    def evaluate(self, *parts: np.ndarray) -> float:
        return float(np.concatenate(parts).mean())

    def beat(self) -> None:
        pass

    def pid(self) -> int:
        return os.getpid()
