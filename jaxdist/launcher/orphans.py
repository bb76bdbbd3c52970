"""Processes that the ranks of a job have left behind: the launcher adopts them in place of init, and ends them."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

PR_SET_CHILD_SUBREAPER = 36
END_S = 5.0  # until a killed process must be gone; one that waits for a dead file system stays
AGAIN_S = 0.01


def adopt_orphans() -> None:
    """From now on a process whose parent has ended becomes a child of this one, if this one is among its ancestors."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


class _Process(NamedTuple):
    """A process of this machine. state: a letter, Z where it has ended and nobody has waited for it."""

    pid: int
    state: str
    parent: int
    group: int


def _processes() -> Iterator[_Process]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has gone meanwhile
            state, parent, group = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
            yield _Process(int(folder.name), state, int(parent), int(group))


def children() -> set[int]:
    """The processes whose parent is this one, those that have ended and are not waited for among them."""
    return {process.pid for process in _processes() if process.parent == os.getpid()}


def group_runs(group: int) -> bool:
    """Whether a process of this group has not ended."""
    return any(process.group == group and process.state != "Z" for process in _processes())


def reap_orphans(own: Collection[int]) -> None:
    """Take note of children that have ended, up to the first of `own`, for which somebody else waits."""
    with contextlib.suppress(ChildProcessError):  # there is no child
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, 0)


def end_orphans(own: Collection[int]) -> None:
    """Kill all children but `own`, and what these leave."""
    deadline = time.monotonic() + END_S
    while (left := children() - set(own)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(AGAIN_S)
        reap_orphans(own)
