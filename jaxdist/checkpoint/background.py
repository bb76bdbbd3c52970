"""Threads of a save that leave the processor to the training that goes on meanwhile."""

import functools
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

_WRITERS = b"ts_pool_worker"  # tensorstore's name for its threads
_TASKS = Path("/proc/self/task")


def step_back(thread: int | None = None, by: int = 10) -> None:
    """Lower the priority of a thread. Where all cores are busy, it gets a tenth of one (by 15: a 28th).

    Only on Linux, where threads have priorities of their own. Not for threads that run much Python: others wait for the
    interpreter's lock while they hold it.

    Args:
        thread: The id of the thread, None for this one.
        by: Steps of priority. At the least priority a save would last for minutes.
    """
    if sys.platform == "linux":
        nice = os.getpriority(os.PRIO_PROCESS, os.getpid()) + by
        with suppress(PermissionError):  # a sandbox may forbid it; training is then slower during a save
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id() if thread is None else thread, min(19, nice))


def _writers_step_back() -> None:
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            if (task / "comm").read_bytes().strip() == _WRITERS:
                step_back(int(task.name), by=15)


def writers_step_back() -> threading.Thread:
    """Lower the priority of the threads that write arrays, now and for a second, in a thread: tensorstore starts them
    as it needs them. Threads that they start inherit it."""

    def watch() -> None:
        for _ in range(11):  # each look reads the name of every thread of the process
            _writers_step_back()
            time.sleep(0.1)

    thread = threading.Thread(target=watch, name="jaxdist-writers", daemon=True)
    thread.start()
    return thread


@functools.lru_cache(maxsize=8)
def _copier(shardings: tuple[Sharding, ...]) -> Any:
    """One program for all arrays: it copies them on all cores at once."""
    return jax.jit(lambda leaves: [jnp.copy(leaf) for leaf in leaves], out_shardings=[*shardings])


def _devices_in_order(sharding: Sharding) -> tuple[jax.Device, ...]:
    """The devices of a sharding in its own order; () where JAX does not tell it."""
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sharding.device_set) if len(sharding.device_set) == 1 else ()


def own_copy(tree: Any) -> Any:
    """A copy of the arrays that are on CPUs. On other devices a save makes a copy itself. On CPUs it reads the arrays'
    own buffers, and the next train step would have to copy them all instead of working in place."""
    leaves, treedef = jax.tree.flatten(tree)
    # By devices: a program takes arrays of the same devices in the same order.
    groups: dict[tuple[jax.Device, ...], list[int]] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array) and next(iter(leaf.devices())).platform == "cpu":
            if devices := _devices_in_order(leaf.sharding):
                groups.setdefault(devices, []).append(i)
            else:
                leaves[i] = jax.device_put(leaf, leaf.sharding, may_alias=False)
    for places in groups.values():
        found = [leaves[i] for i in places]
        with jax.set_mesh(None):  # inside the caller's `jax.set_mesh`, JAX would refuse arrays of other devices
            copies = _copier(tuple(leaf.sharding for leaf in found))(found)
        for i, copy in zip(places, copies, strict=True):
            leaves[i] = copy
    return jax.tree.unflatten(treedef, leaves)
