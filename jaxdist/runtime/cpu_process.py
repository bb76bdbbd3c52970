"""How Linux serves a process that computes on CPUs: its freed memory stays with it, and threads do not interrupt it."""

import contextlib
import ctypes
import os
from collections.abc import Mapping

# Parameters of glibc's `mallopt` (malloc.h). Arrays of up to 256 MiB come from one heap, and no longer from pages of
# their own; up to 1 GiB at its end stays free. glibc before 2.35 allows 32 MiB at most.
MMAP_THRESHOLD, LARGEST_IN_HEAP = -3, (2**28, 2**25)
HEAP = {-8: 1, -1: 2**30}  # M_ARENA_MAX and M_TRIM_THRESHOLD
TUNABLES = ("arena_max", "mmap_threshold", "trim_threshold", "mmap_max", "top_pad")  # in GLIBC_TUNABLES


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Let freed memory stay with this process, from now on. Must run before JAX starts its devices.

    XLA:CPU allocates the temporary arrays of a program anew for each call. By itself glibc gives large arrays back to
    Linux, which clears each page again: a tenth to a third of a step's time. The price is memory in gaps between
    arrays: a run of the quickstart on one device held 1.0 to 1.6 GB in place of 0.8; one of 28 M parameters 2.4 of 2.2.
    What lies between arrays that are in use stays, however much it is.

    Args:
        environ: The environment of the process. Nothing is done where it sets such a parameter itself, by
            GLIBC_TUNABLES or MALLOC_*.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # a function of glibc
    if mallopt is not None and not _sets_malloc(environ):
        # Any of them ends glibc's own choice of this threshold: the others are set only where it is large already.
        allowed = any(mallopt(MMAP_THRESHOLD, size) for size in LARGEST_IN_HEAP)  # asks until one is not refused
        if allowed:
            for parameter, value in HEAP.items():
                mallopt(parameter, value)


def avoid_interruptions() -> None:
    """Let no thread of this process interrupt another when it wakes up: the policy SCHED_BATCH, which threads and
    processes inherit that start from now on. Another policy than Linux's usual one is left as it is. Must run before
    JAX starts its devices, in a job whose processes communicate by gloo.

    Where a process has one core, gloo's thread else interrupts the thread that sends. It then asks again and again for
    a lock that this one holds, until Linux lets this one go on: 1 to 2 ms for each collective.
    """
    with contextlib.suppress(AttributeError, OSError):  # not on other systems, nor where a sandbox forbids it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _sets_malloc(environ: Mapping[str, str]) -> bool:
    """Whether the environment sets one of the parameters."""
    tunables = environ.get("GLIBC_TUNABLES", "")
    variables = {f"MALLOC_{name.upper()}{'' if name == 'arena_max' else '_'}" for name in TUNABLES}
    return not variables.isdisjoint(environ) or any(f"glibc.malloc.{name}=" in tunables for name in TUNABLES)
