"""What leaves the processor to the training that goes on beside a save."""

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

_WRITERS = b"ts_pool_worker"  # tensorstore's name for its threads
_TASKS = Path("/proc/self/task")


def step_back(thread: int | None = None, by: int = 10) -> None:
    """Where all cores are busy, this thread, or the one of that id, gets a tenth of one (by 15: a 28th): on Linux,
    where threads have priorities of their own beside the one of the process. The least priority would make a save last
    for minutes there. Not for threads that run much Python: others wait for the interpreter's lock while they hold it.
    Where a system does not allow it, nothing happens."""
    if sys.platform == "linux":
        nice = os.getpriority(os.PRIO_PROCESS, os.getpid()) + by
        with suppress(PermissionError):  # of a sandbox: a save is slower to leave the processor, and lands
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id() if thread is None else thread, min(19, nice))


def _writers_step_back() -> None:
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            if (task / "comm").read_bytes().strip() == _WRITERS:
                step_back(int(task.name), by=15)


def writers_step_back() -> threading.Thread:
    """Let the threads that write arrays step back, now and, in a thread, for a second: tensorstore starts them as it
    needs them. Those that they start inherit it."""

    def watch() -> None:
        for _ in range(10):  # each look reads the name of every thread of the process
            time.sleep(0.1)
            _writers_step_back()

    _writers_step_back()
    thread = threading.Thread(target=watch, name="jaxdist-writers", daemon=True)
    thread.start()
    return thread


def own_copy(tree: Any) -> Any:
    """The arrays in buffers that nothing else uses, if they are a CPU's. On other devices a save makes a copy itself;
    on CPUs it reads the arrays' own buffers, and the next train step would have to copy them all instead of working in
    them."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or next(iter(leaf.devices())).platform != "cpu":
            return leaf
        return jax.device_put(leaf, leaf.sharding, may_alias=False)

    return jax.tree.map(one, tree)
