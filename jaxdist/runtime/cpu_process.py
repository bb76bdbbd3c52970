"""How Linux serves a process that computes on CPUs: its freed memory stays with it, and threads do not interrupt it."""

import contextlib
import ctypes
import os
from collections.abc import Mapping

# Parameters of glibc's `mallopt`, by their names in GLIBC_TUNABLES: the number (malloc.h), and the value. Arrays of up
# to 256 MiB come from one heap, of which up to 1 GiB stays. Larger arrays would leave gaps as large.
MALLOC = {"arena_max": (-8, 1), "mmap_threshold": (-3, 2**28), "trim_threshold": (-1, 2**30)}


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Let freed memory stay with this process, from now on. Must run before JAX starts its devices.

    XLA:CPU allocates the temporary arrays of a program anew for each call. By itself glibc gives large arrays back to
    Linux, which clears each page again: a tenth to a third of a step's time. The price is memory in gaps between
    arrays: a run of the quickstart on one device held 1.0 to 1.6 GB in place of 0.8; one of 28 M parameters 2.4 of 2.2.

    Args:
        environ: The environment of the process. Nothing is done where it sets one of these parameters itself, by
            GLIBC_TUNABLES or MALLOC_*.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # a function of glibc
    if mallopt is not None and not _sets_malloc(environ):
        for parameter, value in MALLOC.values():
            mallopt(parameter, value)  # an older glibc refuses some, and goes on as before


def avoid_interruptions() -> None:
    """Let no thread of this process interrupt another when it wakes up: the policy SCHED_BATCH, which threads inherit
    that start from now on. Must run before JAX starts its devices, in a job whose processes communicate by gloo.

    Where a process has one core, gloo's thread else interrupts the thread that sends. It then asks again and again for
    a lock that this one holds, until Linux lets this one go on: 1 to 2 ms for each collective.
    """
    with contextlib.suppress(AttributeError, OSError):  # not on other systems, nor where a sandbox forbids it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _sets_malloc(environ: Mapping[str, str]) -> bool:
    """Whether the environment sets one of the parameters."""
    tunables = environ.get("GLIBC_TUNABLES", "")
    return any(f"glibc.malloc.{name}=" in tunables or f"MALLOC_{name.upper()}_" in environ for name in MALLOC)
